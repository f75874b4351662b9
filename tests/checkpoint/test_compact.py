"""Exports whose codes of 3 and 2 bits take as many bits."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing_utils import make_mixture, run_export, start_engines_quickly
from testing_utils.layers import TOKENS, logits
from testing_utils.trainings import assert_equal
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.checkpoint.layout import is_compact
from trl_qarl.checkpoint.load import load_deployed, load_frozen_model
from trl_qarl.quantization.swap import prepare_model, quantized_layers


PLAN = {
    "re:.*mlp.down_proj": "w8a16",
    "re:.*mlp.*": {"scheme": "w3a16", "group_size": 32},
    "re:.*layers.0.self_attn.*": {"scheme": "w2a16", "group_size": 32},
    "re:.*layers.1.self_attn.o_proj": None,
    "_default": {"scheme": "w4a16", "group_size": 64},
}


@pytest.fixture
def exports(tiny_model, tmp_path):
    """The same policy in the container of INT4 and compact, and the model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    prepare_model(model, PLAN, scale_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for name in ("plain", "compact"):
        export_checkpoint(model, tmp_path / name, tokenizer, torch.float32, is_compact=name == "compact")
    return model, tmp_path / "plain", tmp_path / "compact"


def test_each_layer_has_the_bits_of_its_grid_and_the_same_weights(exports):
    model, plain, compact = exports
    described = json.loads((compact / "config.json").read_text())["quantization_config"]
    named = {
        name.partition("-")[2]: group["weights"]["num_bits"] for name, group in described["config_groups"].items()
    }
    assert named == {"": 8, "int3-signed": 3, "int2-signed": 2, "int4-signed": 4}
    wide, narrow = (load_file(folder / "model.safetensors") for folder in (plain, compact))
    assert wide.keys() == narrow.keys()
    for name, layer in quantized_layers(model).items():
        key, bits = f"{name}.weight_packed", layer.scheme.grid.num_bits
        assert narrow[key].shape[1] * 32 == bits * layer.weight.shape[1]
        assert narrow[key].nbytes == wide[key].nbytes * bits // layer.scheme.container.num_bits
    assert all(torch.equal(wide[name], narrow[name]) for name in wide if not name.endswith("packed"))
    # Another tool's group of 3 bits has another name.
    [three] = (group for group in described["config_groups"].values() if group["weights"]["num_bits"] == 3)
    assert is_compact(described) and not is_compact({"config_groups": {"group_0": three}}) and not is_compact({})
    loaded = load_frozen_model(str(compact), "auto")
    for name, layer in quantized_layers(loaded).items():
        ours, theirs = (of.low_bit_weight().parts() for of in (quantized_layers(model)[name], layer))
        assert all(map(torch.equal, ours, theirs)), name
    assert torch.equal(logits(load_deployed(str(compact))), logits(model))
    assert "Not every version of transformers" in (compact / "README.md").read_text()
    assert "Not every version of transformers" not in (plain / "README.md").read_text()


def test_the_command_writes_what_an_export_in_the_container_of_int4_holds(tiny_model, tmp_path):
    scheme = ["--scheme", "w4a16", "--group_size", "32", "--bits", "3"]
    assert run_export(tiny_model, tmp_path / "a", *scheme) == 0
    assert run_export(tiny_model, tmp_path / "b", *scheme, "--compact") == 0
    # An export is made compact later, too, and back.
    assert run_export(tmp_path / "a", tmp_path / "c", "--bits", "3", "--compact") == 0
    assert run_export(tmp_path / "b", tmp_path / "d", "--bits", "3") == 0
    written = [load_file(tmp_path / name / "model.safetensors") for name in "abcd"]
    assert_equal(written[1], written[2])
    assert_equal(written[0], written[3])
    packed = [sum(t.nbytes for name, t in tensors.items() if name.endswith("packed")) for tensors in written]
    assert packed[1] * 4 == packed[0] * 3


@pytest.mark.parametrize(("scheme", "arch"), [("w4a16", "llama"), ("bf16", "llama"), ("w3a16", "qwen3_moe")])
def test_what_cannot_be_packed_closer_is_refused(scheme, arch, tiny_model, tmp_path):
    is_mixture = arch != "llama"
    model = make_mixture(arch) if is_mixture else AutoModelForCausalLM.from_pretrained(tiny_model)
    prepare_model(model, scheme)
    message = "experts .* only in INT4's container" if is_mixture else rf"only \['{scheme}'\]. Add --bits 3"
    with pytest.raises(ValueError, match=rf"--compact \(is_compact=True\): .*{message}"):
        export_checkpoint(model, tmp_path, is_compact=True)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_computes_the_same_with_compact_codes(exports, monkeypatch):
    start_engines_quickly(monkeypatch)
    from vllm import LLM, SamplingParams

    answers = []
    for folder in exports[1:]:
        llm = LLM(model=str(folder), dtype="float32", max_model_len=64, enforce_eager=True)
        prompts = [{"prompt_token_ids": tokens} for tokens in TOKENS.tolist()]
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, logprobs=0), use_tqdm=False)
        answers.append(
            [
                [(token, step[token].logprob) for token, step in zip(o.token_ids, o.logprobs, strict=True)]
                for request in found
                for o in request.outputs
            ]
        )
        del llm
    assert answers[0] == answers[1]
