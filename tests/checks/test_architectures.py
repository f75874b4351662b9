"""Refusals of models before an engine is started."""

import os
import sys

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
)

from testing_utils import make_tiny_config
from testing_utils.pictures import make_picture_config, needs_torchvision
from testing_utils.trainings import EXPERTS
from trl_qarl.checks.architectures import problem_of_architecture, problem_of_trial, problems_with_vllm
from trl_qarl.checks.model import problems_of_body
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.swap import assign_schemes


def model_of(arch, **fields):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_tiny_config(arch, **fields))


def test_a_class_without_a_body_for_trls_loss_is_refused():
    config = Llama4Config(vision_config={"num_hidden_layers": 1}, text_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        model = Llama4ForConditionalGeneration(config)
    assert "Llama4ForCausalLM" in next(problems_of_body(model)) and not [*problems_of_body(model.language_model)]


def test_a_class_that_leaves_out_a_scale_of_logits_is_refused():
    tower = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    for scale in (0.25, 1.0):
        text = make_tiny_config("cohere2", logit_scale=scale).to_dict()
        config = Cohere2VisionConfig(text_config=text, vision_config=tower, alignment_intermediate_size=64)
        with torch.device("meta"):
            model = Cohere2VisionForConditionalGeneration(config)
        found = [*problems_of_body(model)]
        assert [each.partition(" of its")[0] for each in found] == (
            [] if scale == 1.0 else ["Cohere2VisionForConditionalGeneration leaves out logit_scale=0.25"]
        )


def test_a_checkpoint_that_joins_layers_is_refused():
    (problem,) = problems_with_vllm(model_of("hrm_text"), None, on_cpu=False, schemes={})
    assert problem.startswith("checkpoints of HrmTextForCausalLM join layers, such as `model.L_module.layers.0.")

    tower = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    config = Kimi_K25Config(text_config={"num_hidden_layers": 1, "first_k_dense_replace": 1}, vision_config=tower)
    with torch.device("meta"):
        model = Kimi_K25ForConditionalGeneration(config)
    # Its conversion also renames groups of layers, by expressions.
    (problem,) = problems_with_vllm(model, None, on_cpu=False, schemes={})
    assert "join layers, such as `model.vision_tower.layers.0.attn.q_proj" in problem


def test_a_class_that_loses_a_row_when_it_is_loaded_is_refused():
    (problem,) = problems_of_body(model_of("youtu"))
    assert problem.startswith("YoutuForCausalLM: whenever transformers loads it,")
    assert [*problems_of_body(model_of("qwen3")), *problems_of_body(model_of("xlstm", num_heads=2))] == []


@pytest.mark.parametrize(
    ("arch", "fields", "dtype", "remedy"),
    [
        ("apertus", {}, torch.float32, "Set bf16=True"),
        ("stablelm", {"head_dim": None, "partial_rotary_factor": 0.3}, torch.bfloat16, "Set bf16=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kernels_that_a_cpu_lacks_are_named_with_the_dtype(arch, fields, dtype, remedy):
    model = model_of(arch, **fields)
    (problem,) = problems_with_vllm(model, dtype, on_cpu=True, schemes={})
    assert type(model).__name__ in problem and problem.endswith(remedy)
    other = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
    assert [*problems_with_vllm(model, other, on_cpu=True, schemes={})] == []
    assert bool([*problems_with_vllm(model, dtype, on_cpu=False, schemes={})]) == (arch == "apertus")


def test_sparse_attention_is_refused_on_a_cpu_alone():
    model = model_of("llama", index_topk=16)
    (problem,) = problems_with_vllm(model, torch.bfloat16, on_cpu=True, schemes={})
    assert "sparse attention" in problem
    assert [*problems_with_vllm(model, torch.bfloat16, on_cpu=False, schemes={})] == []


@pytest.mark.parametrize(
    ("arch", "is_tied"),
    [("gemma2", True), ("lfm2", True), ("lfm2_moe", True), ("phi", False), ("gptj", False), ("jamba", False)],
)
def test_a_class_that_always_or_never_ties_its_head_is_named(arch, is_tied):
    fields = {"layer_types": ["conv", "full_attention"]} if arch.startswith("lfm2") else {}
    tied, untied = (
        [*problems_with_vllm(model_of(arch, tie_word_embeddings=ties, **fields), None, False, {})]
        for ties in (is_tied, not is_tied)
    )
    assert tied == [] and f"tie_word_embeddings={not is_tied}: vLLM" in untied[0]


FIXED = {"attention_bias": True, "lm_head_bias": True}


@pytest.mark.parametrize(
    ("arch", "fields", "problem"),
    [
        ("phimoe", FIXED, None),
        (
            "phimoe",
            FIXED | {"router_jitter_noise": 0.0},
            "router_jitter_noise=0.0: vLLM 0.31's class always has router_jitter_noise=0.01.",
        ),
        ("phimoe", {"lm_head_bias": True}, "attention_bias=False: vLLM 0.31's class always has attention_bias=True."),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True: vLLM 0.31's class always has qk_layernorm=False."),
        (
            "mamba2",
            {"n_groups": 2, "num_heads": 8, "head_dim": 32},
            "n_groups=2: vLLM 0.31's class always has n_groups=1.",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "tokens attend to later ones, and in vLLM to earlier"),
        ("gemma3_text", {}, None),
        *(
            (arch, {name: value}, f"{name}={value}: vLLM 0.31's class always has {name}={not value}.")
            for arch, name, value in (
                ("cohere", "attention_bias", True),
                ("gpt_oss", "attention_bias", False),
                ("glm4_moe_lite", "rope_interleave", False),
                ("olmoe", "norm_topk_prob", True),
                ("qwen2_moe", "qkv_bias", False),
            )
        ),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate=True: vLLM 0.31 always"),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, None),
        ("afmoe", {"n_group": 1, "num_experts": 4}, None),
        (
            "afmoe",
            {"n_group": 2, "num_experts": 4},
            "n_group=2: transformers' class always has n_group=1",
        ),
        # transformers reads it, although its configuration does not name it.
        ("glm4_moe", {"head_dim": 128, "n_routed_experts": 4}, None),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, None),
        (
            "qwen2",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "all layers of vLLM 0.31's class have the same",
        ),
    ],
)
def test_a_configuration_that_vllms_class_needs_is_named(arch, fields, problem):
    model = model_of(arch, num_experts_per_tok=2, moe_intermediate_size=64, **fields)
    found = [*problems_with_vllm(model, None, False, {})]
    assert found == [] if problem is None else problem in found[0]


def test_statistics_that_a_weight_sync_leaves_are_named():
    model = model_of("llama")
    assert [*problems_with_vllm(model, torch.float32, on_cpu=True, schemes={})] == []
    model.norm = torch.nn.BatchNorm1d(4)
    (problem,) = problems_with_vllm(model, torch.float32, on_cpu=True, schemes={})
    assert problem.startswith("LlamaForCausalLM has batch norms")


def test_ungated_experts_have_no_kernel_in_16_bits_on_a_cpu():
    sizes = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
    model = model_of("nemotron_h", hybrid_override_pattern="*E", n_routed_experts=4, **sizes)
    schemes, _ = assign_schemes(model, get_plan("w4a16"))
    assert [*problems_with_vllm(model, torch.float32, on_cpu=True, schemes=schemes)] == []
    (problem,) = problems_with_vllm(model, torch.float32, on_cpu=True, schemes={})
    assert "experts without a gate" in problem and problem.endswith("Use scheme='w4a16'")


def test_experts_in_schemes_that_were_not_compared_are_refused():
    model = model_of("qwen3_moe", **EXPERTS)
    schemes, _ = assign_schemes(model, get_plan("w8a16"))
    (problem,) = problems_with_vllm(model, None, on_cpu=False, schemes=schemes)
    assert problem.startswith("experts ('model.layers.0.mlp.experts') with scheme 'w8a16' are untested in vLLM.")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arch", "fields", "problem"),
    [
        ("llama", {}, None),
        ("smollm3", {}, None),
        ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "attn_layer_indices": [1]}, None),
        ("codegen", {"n_embd": 128, "n_head": 4, "n_layer": 2, "rotary_dim": 16}, "has no class CodeGenForCausalLM"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"]}, "only if all its layers attend"),
        ("biogpt", {}, "only if the output head is `lm_head`"),
        ("ctrl", {"n_embd": 128, "n_layer": 2, "n_head": 4, "dff": 256}, "`lm_head`, without a bias"),
        (
            "bart",
            {"decoder_layers": 1, "decoder_ffn_dim": 64, "is_encoder_decoder": False},
            "only if its body takes positions",
        ),
        ("xlstm", {"num_heads": 2}, "only if all its layers attend"),
        # Two attentions with one cache, and a mask that a layer computes.
        ("diffllama", {"num_key_value_heads": 2}, "only if each layer attends once"),
        ("doge", {}, "only if each layer attends once"),
        ("kimi_linear", {"layer_types": ["full_attention"] * 2}, "has its class KimiLinearForCausalLM for GPUs alone"),
        ("solar_open", {"n_routed_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2}, None),
    ],
)
def test_a_class_that_vllm_cannot_run_is_named(arch, fields, problem):
    found = problem_of_architecture(model_of(arch, **fields))
    assert found is None if problem is None else problem in found


@pytest.mark.vllm
@pytest.mark.usefixtures("no_groups")
def test_a_trial_leaves_transformers_and_torch_as_they_were():
    """vLLM has a class of configurations of HyperCLOVA X, too."""
    assert problem_of_trial(model_of("hyperclovax"), torch.float32) is None
    assert type(make_tiny_config("hyperclovax")).__module__.startswith("transformers.")
    assert not torch.distributed.is_initialized() and torch.get_default_dtype() is torch.float32


@pytest.mark.vllm
@needs_torchvision
@pytest.mark.usefixtures("no_groups")
def test_a_trial_takes_experts_that_checkpoints_hold_transposed(monkeypatch):
    """As those of Qwen3-VL's mixture; an engine gets them one by one."""
    # vLLM inspects a class in a process of its own.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(make_picture_config("qwen3_vl_moe"))
    assert problem_of_trial(model, torch.float32) is None


@pytest.mark.vllm
@pytest.mark.usefixtures("no_groups")
def test_a_trial_imports_vllms_class_outside_the_meta_device(monkeypatch):
    """An engine shares the constants of a module, such as `EPS` of Gemma 3n."""
    from vllm.model_executor.models import registry

    devices, load = [], registry._LazyRegisteredModel.load_model_cls

    def record(self):
        devices.append(torch.get_default_device().type)
        return load(self)

    monkeypatch.setattr(registry._LazyRegisteredModel, "load_model_cls", record)
    registry._try_load_model_cls.cache_clear()
    assert problem_of_trial(model_of("qwen2"), torch.float32) is None
    assert devices and "meta" not in devices


@pytest.mark.vllm
def test_a_class_that_takes_no_adapter_in_vllm_is_named():
    model = model_of("gptj", n_embd=128, n_head=4, n_layer=2, rotary_dim=16)
    assert problem_of_architecture(model) is None
    assert "GPTJForCausalLM takes no adapters" in problem_of_architecture(model, has_adapter=True)
    assert "latent attention" in problem_of_architecture(model_of("youtu"), has_adapter=True)
    for arch in ("llama", "mamba"):
        assert problem_of_architecture(model_of(arch), has_adapter=True) is None
