"""Kernels of vLLM by scheme, GPU and release: what is asked for, refused or not expected. Capabilities are made up."""

import json

import pytest
import torch

from testing_utils import make_mixture
from testing_utils.layers import one_layer
from trl_qarl.checkpoint.layout import quantization_config
from trl_qarl.engines.gpu_kernels import (
    RELEASES,
    Gpu,
    choose_kernels,
    kernel_arguments,
    reason_against,
    unexpected_kernels,
)
from trl_qarl.engines.server_command import build_server_command
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.quantization.inventory import Inventory
from trl_qarl.quantization.schemes import SCHEMES, get_scheme
from trl_qarl.quantization.swap import prepare_model


GPUS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]


def gpu_of(capability, release="0.32.0"):
    return Gpu(capability, "NVIDIA X1", release)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_a_kernel_or_an_alternative(scheme, capability, release):
    gpu = gpu_of(capability, f"{release}.0")
    choice = choose_kernels(get_scheme(scheme), gpu)
    assert bool(choice.refusal) == bool(choice.instead) == (not choice.linear and scheme != "bf16")
    for other in SCHEMES:
        if f"'{other}'" in choice.instead:
            assert not choose_kernels(get_scheme(other), gpu).refusal, (scheme, other)


@pytest.mark.parametrize(
    ("scheme", "capability", "reason"),
    [
        ("fp8", (8, 0), "'w8a8'"),
        ("w8a8", (10, 0), "'fp8'"),
        ("w8a8", (12, 0), "has no INT8 on Blackwell"),
        ("w4a8", (8, 9), "'w4a16'"),
        ("w4a8", (10, 0), "needs compute capability 9.0"),
        ("w4a16", (7, 5), "use_vllm=False"),
    ],
)
def test_vllms_other_arithmetic_is_refused_early(scheme, capability, reason):
    (major, minor), gpu = capability, gpu_of(capability)
    _, config = one_layer(scheme)
    message = rf"scheme '{scheme}' does not run on NVIDIA X1 \(compute capability {major}.{minor}\) with vLLM 0.32.0: .*{reason}"
    with pytest.raises(ValueError, match=message):
        build_server_command(EngineSpec("m", config), gpu=gpu)
    assert reason_against(get_scheme(scheme), gpu_of((9, 0))) is None
    kernel_arguments(config, "bfloat16", on_cpu=False, gpu=gpu_of((9, 0)))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("mxfp4a16", {"linear_backend_per_quant": {"mxfp4": "marlin"}, "moe_backend": "marlin"}),
        ("nvfp4a16", {"linear_backend_per_quant": {"nvfp4_w4a16": "marlin"}}),
        ("w8a16", None),
    ],
)
def test_fp4_weights_ask_for_marlin(scheme, options, capability):
    """vLLM would take Humming on Hopper for NVFP4, and on Blackwell for MXFP4 a kernel that rounds activations."""
    _, config = one_layer(scheme)
    argv, _ = build_server_command(EngineSpec("m", config), gpu=gpu_of(capability))
    assert (json.loads(argv[argv.index("--kernel-config") + 1]) if "--kernel-config" in argv else None) == options
    assert "--kernel-config" not in build_server_command(EngineSpec("m", config), on_cpu=True)[0]


@pytest.mark.parametrize(
    ("release", "capability", "backend"),
    [("0.31.0", (9, 0), None), ("0.32.0", (9, 0), "marlin"), ("0.33.0", (9, 0), "marlin"), ("0.32.0", (8, 0), None)],
)
def test_experts_in_int4_ask_for_marlin(release, capability, backend):
    prepare_model(mixture := make_mixture(), "w4a16", scale_dtype=torch.bfloat16)
    config = quantization_config(Inventory.of(mixture))
    arguments = kernel_arguments(config, "bfloat16", False, gpu_of(capability, release))
    assert arguments == ({"kernel_config": {"moe_backend": backend}} if backend else {})


def test_experts_that_are_not_quantized_are_left_to_vllm():
    """vLLM refuses to start with Marlin for them."""
    prepare_model(mixture := make_mixture(), {"re:.*[qkv]_proj": "w4a16", "re:.*o_proj": "fp8"})
    config = quantization_config(Inventory.of(mixture))
    assert len(config["config_groups"]) == 2 and kernel_arguments(config, "bfloat16", False, gpu_of((9, 0))) == {}


@pytest.mark.parametrize(
    ("scheme", "capability", "kernel", "others"),
    [
        ("w4a16", (9, 0), "MacheteLinearKernel", ["HummingLinearKernel", "TritonW4A16LinearKernel"]),
        ("w4a16", (8, 0), "MarlinLinearKernel", ["MacheteLinearKernel", "ConchLinearKernel"]),
        ("fp8", (8, 9), "CutlassFP8ScaledMMLinearKernel", ["MarlinFP8ScaledMMLinearKernel", "CompressedTensorsW8A16Fp8"]),
        ("w8a8", (9, 0), "CutlassInt8ScaledMMLinearKernel", ["TritonInt8ScaledMMLinearKernel"]),
        ("mxfp4a16", (10, 0), "MarlinMxFp4LinearKernel", ["FlashInferMxFp4LinearKernel", "EmulationMxfp4LinearKernel"]),
        ("nvfp4a16", (9, 0), "MarlinNvFp4LinearKernel", ["HummingNvFp4LinearKernel", "CutlassNvFp4LinearKernel"]),
    ],
)  # fmt: skip
def test_another_kernel_than_the_rehearsed_one_is_named(scheme, capability, kernel, others):
    schemes, gpu = [get_scheme(scheme)], gpu_of(capability)
    # The learner's own, of an engine that it repeats, are fine everywhere.
    assert not [*unexpected_kernels([kernel, "RepeatableInt4Kernel"], schemes, [], gpu)]
    for other in others:
        [message] = unexpected_kernels([kernel, other], schemes, [], gpu)
        assert f"scheme '{scheme}' on NVIDIA X1 " in message and "vLLM 0.32.0" in message
        assert f"is run by {other}, not by {kernel}" in message
        assert ("marlin" in message) == ("fp4" in scheme) and "or use_vllm=False." in message


def test_kernels_of_experts_are_judged_by_the_experts_scheme():
    gpu, int4, fp8 = gpu_of((9, 0)), get_scheme("w4a16"), get_scheme("fp8")
    engine = ["CutlassFP8ScaledMMLinearKernel", "MarlinExperts"]
    assert not [*unexpected_kernels(engine, [fp8], [int4], gpu)]
    # vLLM's choice for experts in high precision is its own.
    assert not [*unexpected_kernels([engine[0], "FlashInferExperts"], [fp8], [], gpu)]
    [message] = unexpected_kernels([engine[0], "HummingIndexedExperts"], [fp8], [int4], gpu)
    assert "scheme 'w4a16'" in message and """--kernel-config '{"moe_backend": "marlin"}'""" in message
    [message] = unexpected_kernels(["MacheteLinearKernel", engine[1]], [fp8], [int4], gpu)
    assert "scheme 'fp8'" in message and "not by CutlassFP8ScaledMMLinearKernel" in message
