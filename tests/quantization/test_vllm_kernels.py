import pytest
import torch
from torch import nn

from trl_qarl import QaRLConfig, prepare_model
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
    from trl_qarl.quantization.quantize import dequantize_weight

    return dequantize_weight(layer.low_bit_weight(), torch.bfloat16).double()


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


def make_engine_apply(name, low_bit, dtype, shape):
    """The product of an engine's layer that holds `low_bit`, on our kernel for CPUs."""
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig
    from vllm.scalar_type import scalar_types

    from trl_qarl.quantization.quantize import checkpoint_tensors
    from trl_qarl.quantization.schemes import get_scheme
    from trl_qarl.vllm_plugin.cpu_kernels import QaRLInt8Kernel, QaRLWeightOnlyKernel

    layer = nn.Module()
    for key, tensor in checkpoint_tensors(low_bit, get_scheme(name)).items():
        layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    if name == "w8a8":
        kernel = object.__new__(QaRLInt8Kernel)
        kernel.config = Int8ScaledMMLinearLayerConfig(False, True, True)
        kernel.layer_param_names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    else:
        weight_type = scalar_types.uint4b8 if name == "w4a16" else scalar_types.uint8b128
        config = MPLinearLayerConfig(shape[::-1], shape[::-1], weight_type, dtype, -1, False)
        kernel = QaRLWeightOnlyKernel(config, "weight_packed", "weight_scale")
    kernel.process_weights_after_loading(layer)
    return lambda x, bias: kernel.apply_weights(layer, x, bias)


@pytest.mark.vllm
@pytest.mark.parametrize("has_native_instructions", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["w4a16", "w8a16", "w8a8"])
def test_the_engines_prefill_equals_its_decode_bit_for_bit(monkeypatch, name, dtype, has_native_instructions):
    pytest.importorskip("vllm")
    from trl_qarl.quantization import gemm
    from trl_qarl.quantization.quantize import dequantize_weight, quantize_weight
    from trl_qarl.quantization.schemes import get_scheme

    monkeypatch.setattr(gemm, "_has_vnni", lambda: has_native_instructions)
    monkeypatch.setattr(gemm, "has_fast_bf16", lambda: has_native_instructions)
    for shape in [(64, 128), (33, 96), (256, 2048)] + [(16, 100)] * (name != "w4a16"):
        torch.manual_seed(0)
        low_bit = quantize_weight(torch.randn(shape), get_scheme(name), dtype)
        apply = make_engine_apply(name, low_bit, dtype, shape)
        x, bias = torch.randn(300, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        # Decode first: what a layer keeps must serve both.
        decode = torch.cat([apply(row, bias) for row in x[:64].split(1)])
        for rows in (16, 17, 33, 64, 300):
            assert torch.equal(apply(x[:rows], bias)[:64], decode[:rows]), (shape, rows)
        exact = x.double() @ dequantize_weight(low_bit, torch.float64).t() + bias
        error = (apply(x, bias).double() - exact).norm() / exact.norm()
        assert error < (2e-2 if name == "w8a8" else 5e-3)


@pytest.mark.parametrize(
    ("scheme", "dtype", "shape", "message"),
    [
        ("w8a8", torch.bfloat16, (64, 128), "for scheme 'w4a16', not 'w8a8'|not installed"),
        ("w4a16", torch.float32, (64, 128), "takes 16-bit activations|not installed|no AVX512"),
        ("w4a16", torch.bfloat16, (80, 128), "not multiples of 32|not installed|no AVX512"),
    ],
)
def test_where_it_cannot_run_it_is_refused(scheme, dtype, shape, message):
    from trl_qarl.quantization.schemes import get_scheme

    with pytest.raises(ValueError, match=message):
        check_vllm_kernel(get_scheme(scheme), dtype, torch.device("cpu"), torch.Size(shape))


def test_an_unknown_kernel_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"learner_kernel='cuda' is unknown. Choose one of \['auto', 'torch', 'vllm'\]"
    ):
        QaRLConfig(str(tmp_path), use_cpu=True, learner_kernel="cuda")
    with pytest.raises(ValueError, match="learner_kernel='cuda' is unknown"):
        prepare_model(nn.Sequential(nn.Linear(128, 64)), "w4a16", kernel="cuda")
