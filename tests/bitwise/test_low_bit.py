"""Products that learner and engine share, of every scheme, against the dequantized product in float64."""

import copy
import gc
import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from testing_utils.learners import needs_vllm
from testing_utils.trainings import QUANTIZED
from trl_qarl.bitwise import low_bit as products
from trl_qarl.bitwise.exact import check_arithmetic
from trl_qarl.quantization.quantize import dequantize_activation, quantize_activation
from trl_qarl.quantization.schemes import E4M3, INT8, SCHEMES, get_scheme
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.quantization.tensors import LowBitTensor
from trl_qarl.wire.protocol import CPU_WEIGHTS_VARIABLE


KERNELS = {INT8: "dynamic_scaled_int8_quant", E4M3: "quantize_fp8e4m3_vec"}
EXPANDED = "expanded once + vLLM's product of unquantized layers"


def make(name, shape, dtype=torch.bfloat16):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return LowBitTensor.from_hp(weight, get_scheme(name), dtype)


def has_kernel(name):
    """Return whether vLLM's build for this processor has the operator."""
    return products.reason_not_to_call() is None and hasattr(torch.ops._C, name)


def _bytes(x):
    return x.contiguous().view(torch.uint8)


@pytest.fixture(params=["expanded", "packed", "without bf16", "without VNNI", "without vLLM"])
def processor(request, monkeypatch):
    """The instruction sets this machine is taken to have; vLLM's kernels are those of the machine."""
    if request.param == "without vLLM":
        monkeypatch.setattr(products, "reason_not_to_call", lambda: "it is not installed")
    elif products.reason_not_to_call() is not None:
        pytest.skip(products.reason_not_to_call())
    elif request.param == "packed":
        monkeypatch.setenv(CPU_WEIGHTS_VARIABLE, "packed")
    elif request.param == "without bf16":
        monkeypatch.setattr(products.gemm, "has_fast_bf16", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    elif request.param == "without VNNI":
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
        monkeypatch.setattr(products.gemm, "_has_vnni", lambda: False)
        monkeypatch.setattr(products, "_computes", products._computes.__wrapped__)
    return request.param


# Those of no kernel's block sizes are filled up with zeros; the last has several groups.
@pytest.mark.parametrize("shape", [(64, 128), (40, 128), (33, 384), (256, 1024)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_and_channels_are_invariant(name, shape, processor):
    low_bit = make(name, shape)
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(90, shape[1], generator=generator).bfloat16(), torch.randn(shape[0], generator=generator)
    y, seen, _ = products.low_bit_linear(x, low_bit, bias)
    assert y.shape == (90, shape[0]) and y.dtype is torch.bfloat16
    for rows in (1, 2, 5, 16, 33, 47, 64):
        assert torch.equal(products.low_bit_linear(x[-rows:], low_bit, bias)[0], y[-rows:]), rows
    # An engine holds several layers of the learner as one.
    part = low_bit.take(slice(32))
    assert torch.equal(products.low_bit_linear(x, part, bias[:32])[0], y[:, :32])
    scheme = low_bit.scheme
    rows = (
        x.double()
        if scheme.activation is None
        else dequantize_activation(*quantize_activation(x, scheme), torch.float64)
    )
    exact = rows @ low_bit.gemm_weight().dequantize(torch.float64).t() + bias
    # Roundings of weight, activation and sum to bfloat16; a code of an activation on the other side of a tie.
    assert (y.double() - exact).norm() < 2**-7 * exact.norm()
    rebuilt = seen[0] if len(seen) == 1 else dequantize_activation(*seen, torch.bfloat16)
    assert torch.equal(rebuilt, rows.bfloat16())


@needs_vllm
@pytest.mark.parametrize("activation", [INT8, E4M3], ids=lambda grid: grid.name)
def test_kernels_quantize_activations_like_the_learner(activation, monkeypatch):
    if products.reason_not_to_call() is not None:
        pytest.skip(products.reason_not_to_call())
    every_bfloat16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = every_bfloat16[every_bfloat16.isfinite()].view(-1, 255)
    rows = torch.cat([finite, finite.flip(0).t().reshape(-1, 255), torch.zeros(2, 255).bfloat16()])
    rows = torch.cat([rows, torch.randn(300, 255).bfloat16() * torch.logspace(-40, 36, 300)[:, None].bfloat16()])
    scheme = get_scheme("w8a8" if activation == INT8 else "fp8")
    rows = rows[: len(rows) // 32 * 32]
    # Rows of 256 inputs fill the blocks of the kernels, also those with the smallest scale.
    in_blocks = torch.nn.functional.pad(rows, (0, 1))
    for part in (rows, in_blocks, rows.t(), rows.t()[:, rows.abs().amax(1) > 1e-2]):
        expected = quantize_activation(part, scheme)
        assert all(map(torch.equal, map(_bytes, products.quantize_rows(part, activation)), map(_bytes, expected)))
    assert products._quantizes(activation) == has_kernel(KERNELS[activation])
    # A kernel of another release with other bits.
    monkeypatch.setitem(products._KERNELS, activation, lambda rows: tuple(map(torch.zeros_like, expected)))
    assert not products._quantizes.__wrapped__(activation)


@needs_vllm
@pytest.mark.parametrize("group_size", [32, 64, 128])
# Rows that do not fill a block of 32 outputs are filled up.
@pytest.mark.parametrize("num_outputs", [64, 40, 33])
def test_int4_weights_are_packed_as_by_vllm(num_outputs, group_size):
    if products.reason_not_to_call() is not None:
        pytest.skip(products.reason_not_to_call())
    if not has_kernel("convert_weight_packed_scale_zp"):
        pytest.skip("vLLM's build for this processor has no convert_weight_packed_scale_zp")
    import vllm._custom_ops as ops

    weight = torch.randn(num_outputs, 384, generator=torch.Generator().manual_seed(0))
    low_bit = LowBitTensor.from_hp(weight, get_scheme("w4a8-int8", group_size), torch.bfloat16)
    padding = 0, -num_outputs % 32
    # GPTQ stores a row of words per eight input features, and zero points, here 8, less 1.
    words = torch.nn.functional.pad(low_bit.qdata.t(), padding).contiguous()
    scale = torch.nn.functional.pad(low_bit.scale.t(), padding, value=1.0).contiguous()
    zeros = words.new_full((len(scale), words.shape[1] // 8), 0x77777777)
    expected = ops.convert_weight_packed_scale_zp(words, zeros, scale, ops.CPUQuantAlgo.GPTQ)
    for ours, theirs in zip(products._Int4(low_bit)._operands, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@needs_vllm
@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs VNNI")
def test_what_runs_is_what_the_processor_has(processor):
    kernels = {
        name: products.low_bit_linear(torch.randn(3, 128).bfloat16(), make(name, (64, 128)), None)[2]
        for name in QUANTIZED
    }
    for name, kernel in kernels.items():
        theirs = "int8_scaled_mm_with_quant" if name == "w8a8" else "int4_scaled_mm_cpu"
        has_theirs = processor != "without VNNI" and has_kernel(theirs)
        if processor == "without vLLM" or (SCHEMES[name].activation == INT8 and not has_theirs):
            assert "vllm" not in kernel.lower(), name
        elif SCHEMES[name].activation == INT8:
            assert kernel == f"vllm::{theirs}"
        else:
            assert (kernel == EXPANDED) == (processor != "packed"), name


@needs_vllm
def test_an_operand_is_made_once_for_each_version_of_a_weight(monkeypatch):
    low_bit, x = make("w4a16", (64, 128)), torch.randn(3, 128).bfloat16()
    products.low_bit_linear(x, low_bit, None)
    monkeypatch.setattr(LowBitTensor, "dequantize", lambda *args: pytest.fail("expanded again"))
    products.low_bit_linear(x, low_bit, None)


@needs_vllm
def test_a_copy_of_a_weight_can_be_freed_before_the_weight():
    low_bit, x = make("w4a16", (64, 128)), torch.randn(3, 128).bfloat16()
    y = products.low_bit_linear(x, low_bit, None)[0]
    copied = copy.deepcopy(low_bit)
    assert torch.equal(products.low_bit_linear(x, copied, None)[0], y)
    del copied
    gc.collect()
    assert torch.equal(products.low_bit_linear(x, low_bit, None)[0], y)


@needs_vllm
def test_an_ill_fitting_weight_is_refused_before_expansion(monkeypatch):
    monkeypatch.setattr(products.psutil, "virtual_memory", lambda: type("", (), {"available": 2**20}))
    with pytest.raises(MemoryError, match=f"{CPU_WEIGHTS_VARIABLE}=packed"):
        products.low_bit_linear(torch.randn(1, 1024).bfloat16(), make("w4a16", (1024, 1024)), None)


class Product:
    """An INT8 product like vLLM's, in torch."""

    scheme = "w8a8"

    def __init__(self, low_bit):
        self.low_bit = low_bit

    def __call__(self, rows, bias):
        return products.gemm.low_bit_linear(rows, self.low_bit, bias)[0]


class RowVariant(Product):
    def __call__(self, rows, bias):
        return super().__call__(rows, bias) * (1 + (len(rows) == 5))


class Wrong(Product):
    def __call__(self, rows, bias):
        return 1.1 * super().__call__(rows, bias)


class Missing(Product):
    def __init__(self, low_bit):
        torch.ops._C.there_is_none()


def test_a_kernel_that_is_not_row_invariant_is_not_used(monkeypatch):
    computes = products._computes.__wrapped__
    has_vnni = torch.cpu._is_vnni_supported()
    assert computes(products._Int8) == (has_vnni and has_kernel("int8_scaled_mm_with_quant"))
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    assert [computes(make) for make in (Product, RowVariant, Wrong, Missing)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("scheme", "num_copies", "is_trained", "needed"),
    [
        # Two bytes per weight of each copy; 12 for each trained parameter, or 2 for each of an engine.
        ("w4a16", 1, False, 2 * 2048 + 2 * 2176),
        ("w4a16", 2, True, 4 * 2048 + 12 * 2176),
        ("fp8", 1, False, 2 * 2048 + 2 * 2176),
        # INT8 activations have a product that reads the codes.
        ("w8a8", 1, False, 2 * 2176),
        ("w4a8-int8", 1, True, 12 * 2176),
    ],
)
def test_weights_are_expanded_if_the_host_has_the_memory(monkeypatch, caplog, scheme, num_copies, is_trained, needed):
    monkeypatch.setattr(products.gemm, "has_fast_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(48))
    prepare_model(model, get_scheme(scheme, 32) if "4" in scheme else scheme, scale_dtype=torch.bfloat16)
    for free, form in ((needed, "expanded"), (needed - 1, "packed")):
        monkeypatch.setattr(products.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        with caplog.at_level("INFO", "trl_qarl.bitwise.low_bit"):
            assert products.choose_cpu_weights(model, torch.bfloat16, num_copies, is_trained) == form
        assert f"on this CPU are {form}: expanded they take" in caplog.messages[-1]
    if not is_trained:
        # Without bf16 instructions copies have 4 bytes per weight, and so have those of the norm's 96 weights.
        monkeypatch.setattr(products.gemm, "has_fast_bf16", lambda: False)
        needed = 2 * needed - 2 * 2080
        for free, form in ((needed, "expanded"), (needed - 1, "packed")):
            monkeypatch.setattr(products.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
            assert products.choose_cpu_weights(model, torch.bfloat16, num_copies, is_trained) == form
    # Two processes of this host share the memory.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(products.psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * needed - 1))
    assert products.choose_cpu_weights(model, torch.bfloat16, num_copies, is_trained) == "packed"


@pytest.mark.parametrize(("form", "has_room"), [("expanded", True), ("expanded", False), ("packed", True)])
def test_an_engine_without_a_repeated_product_expands_once(monkeypatch, form, has_room):
    monkeypatch.setenv(CPU_WEIGHTS_VARIABLE, form)
    monkeypatch.setattr(products.gemm, "has_room", lambda *_: has_room)
    if find_spec("vllm"):
        from vllm.platforms import current_platform

        # As in an engine.
        current_platform.import_kernels()
    low_bit, rows = make("w4a16", (64, 128), torch.float32), torch.randn(300, 128)
    expected = products.gemm.low_bit_linear(rows, make("w4a16", (64, 128), torch.float32), None)[0]
    calls, unpack = [], type(low_bit.format).unpack
    monkeypatch.setattr(type(low_bit.format), "unpack", lambda *args: calls.append(args) or unpack(*args))
    product = products.multiplication(low_bit, torch.float32)
    for _ in range(3):
        assert (product(rows, None) - expected).abs().max() < 1e-4
    assert len(calls) == (1 if form == "expanded" and has_room else 3)


@pytest.mark.parametrize(("scheme", "dtype"), [("w8a8", torch.bfloat16), ("w4a8-int8", torch.float32)])
def test_codes_without_a_kernel_for_them_are_expanded(monkeypatch, scheme, dtype):
    """INT8 codes without VNNI, and INT4 codes in float32."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: dtype is torch.float32)
    monkeypatch.setattr(products.gemm, "has_fast_bf16", lambda: False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    needed = 4 * 2048 + 2 * 2048
    for free, form in ((needed, "expanded"), (needed - 1, "packed")):
        monkeypatch.setattr(products.psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert products.choose_cpu_weights(model, dtype) == form


def test_the_environment_overrides_the_form_that_was_chosen(monkeypatch):
    monkeypatch.setattr(products, "_chosen", products._chosen)
    for form in ("packed", "expanded"):
        products.use_cpu_weights(form)
        assert products.cpu_weights() == form
    monkeypatch.setenv(CPU_WEIGHTS_VARIABLE, "packed")
    assert products.cpu_weights() == "packed"


@needs_vllm
def test_an_engine_with_another_product_is_refused(monkeypatch):
    theirs = products.describe_arithmetic() | {"VLLM_CPU_ATTN_SPLIT_KV": 0}
    monkeypatch.setenv(CPU_WEIGHTS_VARIABLE, "packed")
    with pytest.raises(ValueError, match=re.escape("cpu_weights: learner 'packed', engine 'expanded'")):
        check_arithmetic({"arithmetic": theirs})
