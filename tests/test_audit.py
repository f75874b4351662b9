import pytest
import torch

from trl_qarl.rollout.audit import config_differences, fingerprint, fingerprint_differences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn])
def test_any_single_changed_byte_changes_the_fingerprint(dtype):
    data = torch.randint(0, 100, (40, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tensor = data.view(dtype)
    seen = {fingerprint(tensor)}
    for position in range(0, data.numel(), 7):
        changed = data.clone().view(-1)
        changed[position] += 1
        seen.add(fingerprint(changed.view(40, 24).view(dtype)))
    assert len(seen) == 1 + len(range(0, data.numel(), 7))


def test_order_dtype_and_shape_count():
    tensor = torch.arange(64.0).view(8, 8)
    others = [tensor.t(), tensor.flip(0), tensor.view(4, 16), tensor.view(torch.int32), tensor[:7]]
    assert len({fingerprint(t) for t in (tensor, *others)}) == 6


def test_blocks_of_a_large_tensor_are_told_apart():
    words = torch.zeros(3 * 2**18 + 5, dtype=torch.int64)
    first, second, last = words.clone(), words.clone(), words.clone()
    first[0], second[2**18], last[-1] = 1, 1, 1
    assert len({fingerprint(t) for t in (words, first, second, last)}) == 4


def test_a_slice_has_the_fingerprint_of_its_copy():
    tensor = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rows in (slice(1, 4), slice(3, 9), slice(0, 0)):
        assert fingerprint(tensor[rows]) == fingerprint(tensor[rows].clone())
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprint(torch.tensor(3.0)).startswith("float32[]")


def test_a_known_value_pins_the_definition():
    # 3 * g + 5 * 3g for the two words 3 and 5, g = 2**64 / golden ratio.
    expected = (3 + 15) * 0x9E3779B97F4A7C15 % 2**64
    assert fingerprint(torch.tensor([3, 5])) == f"int64[2] {expected:016x}"


def test_differences_name_each_kind():
    lines = fingerprint_differences({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"})
    assert lines == [
        "a: the engine received nothing",
        "d: the learner did not announce it",
        "c: learner 3, engine 4",
    ]
    assert fingerprint_differences({"a": "1"}, {"a": "1"}) == []
    many = fingerprint_differences({f"n{i}": "x" for i in range(9)}, {}, limit=2)
    assert many[-1] == "... and 7 more" and len(many) == 3


def _config(**changes):
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group",
        "group_size": 128,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights | changes, "input_activations": None},
        },
        "ignore": ["lm_head"],
    }


def test_config_differences_give_both_values():
    assert config_differences(_config(), _config()) == []
    assert config_differences(_config(), _config(group_size=32)) == ["weights.group_size: learner 128, engine 32"]
    lines = config_differences(_config(), _config() | {"ignore": ["lm_head", "o_proj"]})
    assert lines == ["exclude list: learner ['lm_head'], engine ['lm_head', 'o_proj']"]
    assert any(
        "quant_method: learner 'compressed-tensors', engine None" in line for line in config_differences(_config(), {})
    )
