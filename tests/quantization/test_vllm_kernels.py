import pytest
import torch
from torch import nn

from trl_qarl import QaRLConfig, prepare_model
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.quantization.swap import kernels_run
from trl_qarl.quantization.vllm_kernels import check_vllm_kernel


def make_pair(out_features, in_features, bias=True):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(in_features, out_features, bias=bias)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.mark.vllm
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's INT4 CPU kernel needs AVX512")
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize(
    ("out_features", "in_features", "bias"), [(64, 128, True), (96, 576, False), (1536, 320, True)]
)
def test_the_product_and_its_gradients_are_those_of_the_torch_kernel(rows, out_features, in_features, bias):
    pytest.importorskip("vllm")
    ours, theirs = make_pair(out_features, in_features, bias)
    prepare_model(ours, "w4a16", scale_dtype=torch.bfloat16, kernel="torch")
    prepare_model(theirs, "w4a16", scale_dtype=torch.bfloat16, kernel="vllm")
    x = torch.randn(rows, in_features)
    results = []
    for model in (ours, theirs):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(inputs)
        y.float().square().sum().backward()
        results.append((y.float(), inputs.grad, model[0].weight.grad, model[0].bias.grad if bias else torch.zeros(())))
    assert kernels_run(theirs) == {"vllm::cpu_gemm_wna16": 1}
    # One rounding of the output to bf16 apart, and what follows from it in the gradients.
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * a.abs().max().item())
    exact = torch.nn.functional.linear(
        x.bfloat16().double(), _weight(ours[0]), ours[0].bias.double() if bias else None
    )
    torch.testing.assert_close(results[1][0].double(), exact.detach(), rtol=1e-2, atol=1e-2)


def _weight(layer):
    return layer.low_bit_weight().dequantize(torch.bfloat16).double()


@pytest.mark.vllm
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's INT4 CPU kernel needs AVX512")
def test_a_changed_master_changes_what_the_kernel_computes():
    pytest.importorskip("vllm")
    _, model = make_pair(64, 128)
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16, kernel="vllm")
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    before = model(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(model(x) - model[0].bias, 2 * (before - model[0].bias), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("scheme", "dtype", "shape", "message"),
    [
        ("w8a8", torch.bfloat16, (64, 128), "for scheme 'w4a16', not 'w8a8'|not installed"),
        ("w4a16", torch.float32, (64, 128), "takes 16-bit activations|not installed|no AVX512"),
        ("w4a16", torch.bfloat16, (80, 128), "not multiples of 32|not installed|no AVX512"),
    ],
)
def test_where_it_cannot_run_it_is_refused(scheme, dtype, shape, message):

    with pytest.raises(ValueError, match=message):
        check_vllm_kernel(get_scheme(scheme), dtype, torch.device("cpu"), torch.Size(shape))


def test_an_unknown_kernel_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"learner_kernel='cuda' is unknown. Choose one of \['auto', 'torch', 'vllm'\]"
    ):
        QaRLConfig(str(tmp_path), use_cpu=True, learner_kernel="cuda")
    with pytest.raises(ValueError, match="learner_kernel='cuda' is unknown"):
        prepare_model(nn.Sequential(nn.Linear(128, 64)), "w4a16", kernel="cuda")
