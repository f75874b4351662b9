import pytest
import torch

from testing_utils import make_tiny_config, make_tiny_tokenizer
from trl_qarl.quantization.schemes import get_scheme, group_name
from trl_qarl.wire.describe import config_differences, describe_model, describe_tokenizer, model_differences
from trl_qarl.wire.fingerprint import fingerprint, fingerprint_differences


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
    words = torch.zeros(3 * 2**15 + 5, dtype=torch.int64)
    first, second, last = words.clone(), words.clone(), words.clone()
    first[0], second[2**15], last[-1] = 1, 1, 1
    assert len({fingerprint(t) for t in (words, first, second, last)}) == 4


def test_a_slice_has_the_fingerprint_of_its_copy():
    tensor = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rows in (slice(1, 4), slice(3, 9), slice(0, 0)):
        assert fingerprint(tensor[rows]) == fingerprint(tensor[rows].clone())
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    assert fingerprint(torch.tensor(3.0)).startswith("float32[]")


def test_a_known_value_pins_the_definition():
    mask = 2**64 - 1

    def mix(word):
        word = (word ^ (word >> 32)) * 0xBF58476D1CE4E5B9 & mask
        return word ^ (word >> 29)

    def odd(index):
        x = (index + 1) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return (x ^ (x >> 31)) | 1

    words = [3, -5, 2**62, -(2**63)]
    expected = sum(odd(i) * mix(word & mask) for i, word in enumerate(words)) & mask
    assert fingerprint(torch.tensor(words)) == f"int64[4] {expected:016x}"
    far = torch.zeros(2**15 + 1, dtype=torch.int64)
    far[-1] = -5
    assert fingerprint(far) == f"int64[{2**15 + 1}] {3 * odd(0) * mix(mask - 4) & mask:016x}"


def test_the_same_bit_of_two_words_does_not_cancel():
    generator = torch.Generator().manual_seed(0)
    for words in (
        torch.zeros(512, dtype=torch.int64),
        torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator),
    ):
        before = fingerprint(words)
        for bit in range(64):
            flip = torch.tensor(-(2**63) if bit == 63 else 1 << bit)
            for first, second in ((0, 1), (0, 2), (3, 5), (7, 263), (255, 511)):
                changed = words.clone()
                changed[first] ^= flip
                changed[second] ^= flip
                assert fingerprint(changed) != before, (bit, first, second)


@pytest.mark.parametrize("num_words", [2, 4096, 2**15, 2**16, 3 * 2**15 + 6])
def test_the_top_bit_of_every_word_does_not_cancel(num_words):
    generator = torch.Generator().manual_seed(0)
    for values in (torch.zeros(4 * num_words), torch.randn(4 * num_words, generator=generator)):
        values = values.bfloat16()
        every_fourth = values.clone()
        every_fourth[3::4] = -every_fourth[3::4]
        assert fingerprint(every_fourth) != fingerprint(values)


def test_what_a_gpu_would_do_in_one_step_gives_the_same_sum(monkeypatch):
    """The number of blocks taken at a time depends on the device, the sum must not."""
    words = torch.randint(-(2**63), 2**63 - 1, (5 * 2**15 + 77,), generator=torch.Generator().manual_seed(0))
    one_by_one = fingerprint(words)
    monkeypatch.setattr("trl_qarl.wire.fingerprint._blocks_at_a_time", lambda device: 3)
    assert fingerprint(words) == one_by_one


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


def test_an_engine_for_another_grid_in_the_same_container_is_no_other_engine():
    """It multiplies whatever codes by whatever scales arrive."""

    def described(name):
        group = {"targets": ["Linear"], "weights": get_scheme(name).weight_args(128), "input_activations": None}
        return _config() | {"config_groups": {group_name(0, get_scheme(name)): group}}

    for name in ("w4a16-signed", "w3a16", "w2a16-signed"):
        assert described(name) != described("w4a16")
        assert config_differences(described(name), described("w4a16")) == []


def test_what_changes_a_forward_is_told_apart_and_names_are_not():
    ours = describe_model(make_tiny_config("qwen2"))
    same = make_tiny_config("qwen2", use_cache=False, initializer_range=0.5, attention_dropout=0.5, bos_token_id=7)
    same.name_or_path, same.quantization_config = "elsewhere", {"quant_method": "compressed-tensors"}
    assert model_differences("model", ours, describe_model(same)) == []
    for name, value in {"num_attention_heads": 4, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}.items():
        other = describe_model(make_tiny_config("qwen2", **{name: value}))
        assert model_differences("model", ours, other) == [f"model.{name}: learner {ours[name]!r}, engine {value!r}"]
    theta = describe_model(make_tiny_config("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    (line,) = model_differences("model", ours, theta)
    assert line.startswith("model.rope_parameters: learner") and "100.0" in line
    # Another version of transformers may write a setting that this one does not know, or leave one that is not set out.
    newer = ours | {"new_setting": 1, "rope_parameters": ours["rope_parameters"] | {"factor": None}}
    assert model_differences("model", ours, newer) == []


def test_tokenizers_are_told_apart():
    ours = describe_tokenizer(make_tiny_tokenizer())
    assert model_differences("tokenizer", ours, describe_tokenizer(make_tiny_tokenizer())) == []
    other = make_tiny_tokenizer()
    other.eos_token = "<|unk|>"
    other.add_tokens(["12"])
    lines = model_differences("tokenizer", ours, describe_tokenizer(other))
    assert [line.partition(":")[0] for line in lines] == [
        "tokenizer.encoding of a fixed text",
        "tokenizer.eos_token_id",
        "tokenizer.vocabulary size",
    ]
    assert lines[1:] == [
        "tokenizer.eos_token_id: learner 2, engine 3",
        "tokenizer.vocabulary size: learner 260, engine 261",
    ]
