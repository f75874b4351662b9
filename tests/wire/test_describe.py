import json
import math
from types import SimpleNamespace

import pytest
from torch import nn

from testing_utils import make_tiny_config, make_tiny_tokenizer
from testing_utils.trainings import QUANTIZED
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.wire.describe import (
    config_differences,
    describe_model,
    describe_tokenizer,
    differences,
    group_name,
    rotation_differences,
    scheme_of_group,
    window_differences,
)


def test_grids_of_one_container_share_an_engine():
    """It multiplies whatever codes by whatever scales arrive."""

    def described(name):
        prepare_model(model := nn.ModuleDict({"q_proj": nn.Linear(128, 128)}), name)
        return quantization_config(Inventory.of(model))

    for name in ("w3a16", "w2a16"):
        assert described(name) != described("w4a16")
        assert config_differences(described(name), described("w4a16")) == []


def test_what_changes_a_forward_is_told_apart_and_names_are_not():
    ours = describe_model(make_tiny_config("qwen2"))
    same = make_tiny_config("qwen2", use_cache=False, initializer_range=0.5, attention_dropout=0.5, bos_token_id=7)
    same.name_or_path, same.quantization_config = "elsewhere", {"quant_method": "compressed-tensors"}
    assert differences("model.", ours, describe_model(same)) == []
    for name, value in {"num_attention_heads": 4, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}.items():
        other = describe_model(make_tiny_config("qwen2", **{name: value}))
        assert differences("model.", ours, other) == [f"model.{name}: learner {ours[name]!r}, engine {value!r}"]
    theta = describe_model(make_tiny_config("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    (line,) = differences("model.", ours, theta)
    assert line.startswith("model.rope_parameters.rope_theta: learner") and "100.0" in line
    # Another version of transformers may write a setting that this one does not know, or leave one that is not set
    # out.
    newer = ours | {"new_setting": 1, "rope_parameters.factor": None}
    assert differences("model.", ours, newer) == []


@pytest.mark.parametrize(
    ("kinds", "engines", "context", "is_same"),
    [
        (["sliding_attention", "full_attention"], [0, 16], 64, True),
        (["sliding_attention", "full_attention"], [0], 64, False),
        (["sliding_attention", "full_attention"], [0], 16, True),
        (["full_attention"], [16], 64, False),
        (["sliding_attention", "mamba"], [16], 64, True),
        (None, [16], 64, True),
        (["sliding_attention"], [], 64, True),
    ],
)
def test_windows_that_a_sequence_leaves_are_compared(kinds, engines, context, is_same):
    config = SimpleNamespace(layer_types=kinds, sliding_window=16)
    assert (window_differences(config, engines, context) == []) == is_same


def test_a_server_can_answer_with_an_infinite_limit():
    described = describe_model(SimpleNamespace(to_dict=lambda: {"time_step_limit": (0.0, math.inf)}))
    assert json.loads(json.dumps(described, allow_nan=False))["time_step_limit"] == [0.0, "Infinity"]


def test_renamed_kinds_of_layers_are_the_same():
    """transformers renames them in vLLM's own configuration of LFM2's mixture."""

    def described(*kinds):
        return describe_model(SimpleNamespace(to_dict=lambda: {"layer_types": [*kinds]}))

    assert described("conv", "full_attention") == described("linear_attention", "full_attention")
    assert described("conv", "full_attention") != described("full_attention", "conv")


def test_what_an_engine_adds_to_a_part_of_a_configuration_is_no_difference():
    """vLLM gives DBRX's `attn_config` `rope_parameters`."""

    def described(**part):
        return describe_model(
            SimpleNamespace(to_dict=lambda: {"attn_config": {"clip_qkv": 8.0, "dtype": None} | part})
        )

    assert differences("", described(), described(rope_parameters={"rope_theta": 1e4}, dtype="float32")) == []
    (line,) = differences("", described(), described(clip_qkv=6.0))
    assert line == "attn_config.clip_qkv: learner 8.0, engine 6.0"


def test_rotary_embeddings_are_compared_by_their_angles():
    ours = [(1.0, [1.0, 0.1, 0.01]), (1.2, [1.0, 0.5])]
    rounded = [(1.196, [0.998, 0.501])]
    assert (
        rotation_differences(ours, rounded)
        == rotation_differences([], rounded)
        == rotation_differences(ours, [])
        == []
    )
    for other in ((1.0, [1.0, 0.5]), (1.2, [1.0, 0.55]), (1.0, [1.0, 0.1])):
        (line,) = rotation_differences(ours, [other])
        assert line.startswith("rotary embedding: the learner has 3 pairs with angles of 1 to 0.01")


def test_tokenizers_are_told_apart():
    ours = describe_tokenizer(make_tiny_tokenizer())
    assert differences("tokenizer.", ours, describe_tokenizer(make_tiny_tokenizer())) == []
    other = make_tiny_tokenizer()
    other.eos_token = "<|unk|>"
    other.add_tokens(["12"])
    lines = differences("tokenizer.", ours, describe_tokenizer(other))
    assert lines[0].startswith("tokenizer.encoding of a fixed text: ") and lines[1:] == [
        "tokenizer.eos_token_id: learner 2, engine 3",
        "tokenizer.vocabulary size: learner 260, engine 261",
    ]


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_scheme_is_found_again_in_what_it_writes(name):
    scheme = get_scheme(name)
    for size in scheme.group_sizes or (None,):
        group = {"weights": scheme.weight_args(size), "input_activations": scheme.activation_args}
        assert scheme_of_group(group_name(3, scheme), group) == scheme
        other = group | {"weights": group["weights"] | {"symmetric": not group["weights"]["symmetric"]}}
        assert scheme_of_group(group_name(3, scheme), other) is None


def test_groups_of_other_tools_are_read_as_our_grid():
    group = {"weights": get_scheme("w3a16").weight_args(32), "input_activations": None}
    assert scheme_of_group("group_0", group).name == "w4a16"
    assert scheme_of_group("group_0-int5", group) is None
