"""
Chooses vLLM's kernel for a scheme on an NVIDIA GPU: the option to ask for it, the kernel to expect, or the reason against the scheme and
the scheme to use instead. Everything that depends on scheme, compute capability and release is decided by [`choose_kernels`].

vLLM's own choice changes from release to release, and not every kernel computes what the learner does: some leave activations in 16
bits where the scheme quantizes them, some quantize them where it does not, and one throws. So an engine is asked for the kernel
whose reload was rehearsed, and any other that it reports is an error. `benchmarks/rehearsal/` records what each release chooses; docs/schemes.md
says what such a rehearsal cannot show.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..packages import installed
from ..quantization.schemes import (
    E4M3_CODES,
    INT4_PACKED,
    INT4_ZERO_POINTS,
    INT8,
    INT8_CODES,
    INT8_PACKED,
    INT8_ZERO_POINTS,
    MXFP4,
    NVFP4,
    QuantScheme,
)
from ..wire.describe import scheme_of_group


__all__ = [
    "RELEASES",
    "Gpu",
    "KernelChoice",
    "choose_kernels",
    "kernel_arguments",
    "reason_against",
    "schemes_of",
    "unexpected_kernels",
]

RELEASES = ("0.31", "0.32", "0.33")
"""Releases of vLLM, `major.minor`, that were rehearsed; those that the extra `vllm` takes."""

# The names of kernels that this package puts into vLLM begin so: they are the learner's own products.
_OURS = ("QaRL", "Repeatable")


@dataclass(frozen=True)
class Gpu:
    """
    A kind of GPU, and the vLLM that runs on it.

    Args:
        capability (`Sequence[int]`):
            Its compute capability, major and minor.
        name (`str`, *optional*, defaults to `"a GPU"`):
            Its name.
        vllm (`str`, *optional*):
            The version of vLLM. Defaults to the one that is installed here, or to the newest of [`RELEASES`].
    """

    capability: Sequence[int]
    name: str = "a GPU"
    vllm: str = field(default_factory=lambda: installed("vllm").get("vllm", RELEASES[-1]))

    @classmethod
    def here(cls) -> "Gpu | None":
        """Return the current CUDA device, or `None` without one."""
        import torch

        if not torch.cuda.is_available():
            return None
        return cls(torch.cuda.get_device_capability(), torch.cuda.get_device_name())

    def __post_init__(self) -> None:
        # A server's description is JSON, which has lists.
        object.__setattr__(self, "capability", tuple(self.capability))

    @property
    def release(self) -> str:
        """`major.minor` of vLLM's version."""
        return ".".join(self.vllm.split(".")[:2])

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor}) with vLLM {self.vllm}"


@dataclass(frozen=True)
class KernelChoice:
    """
    Result of [`choose_kernels`] for a scheme on a GPU.

    Args:
        linear (`tuple[str, ...]`, *optional*, defaults to `()`):
            Class names of the kernels that may run its linear layers, the likeliest first; empty where they are not quantized.
        experts (`tuple[str, ...]`, *optional*, defaults to `()`):
            The same of a mixture's experts.
        backends (`Mapping[str, str]`, *optional*, defaults to `{}`):
            Entries of vLLM's `linear_backend_per_quant` with which an engine takes them for linear layers.
        experts_backend (`str`, *optional*):
            vLLM's `moe_backend` with which it takes them for experts; `None` where its own choice does.
        refusal (`str`, *optional*, defaults to `""`):
            The reason why vLLM must not run the scheme there.
        instead (`str`, *optional*, defaults to `""`):
            The scheme to choose instead.
    """

    linear: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    experts_backend: str | None = None
    refusal: str = ""
    instead: str = ""


def choose_kernels(scheme: QuantScheme, gpu: Gpu) -> KernelChoice:
    """
    Return the kernels that run `scheme` on `gpu`, what an engine must be asked for to take them, or the reason against it.

    Raises:
        NotImplementedError: for an unknown container.
    """
    if not scheme.is_quantized:
        return KernelChoice()
    if gpu.capability < (8, 0):
        return KernelChoice(
            refusal="kernels were rehearsed from compute capability 8.0 on",
            instead="use_vllm=False, or a GPU of compute capability 8.0 or newer",
        )
    on_hopper, is_blackwell = gpu.capability == (9, 0), gpu.capability >= (10, 0)
    # Machete takes multiples of 64 input and 128 output features, Marlin the rest.
    integers = ("MacheteLinearKernel", "MarlinLinearKernel") if on_hopper else ("MarlinLinearKernel",)
    container = scheme.container
    if scheme.has_fp8_scales:
        if on_hopper:
            return KernelChoice(linear=("CutlassW4A8LinearKernel",))
        return KernelChoice(
            refusal="vLLM's kernel of INT4 weights and FP8 activations needs compute capability 9.0",
            instead="'w4a16', use_vllm=False, or a Hopper GPU",
        )
    if container == INT4_PACKED and scheme.activation == INT8:
        return KernelChoice(
            refusal="no kernel of INT4 weights and INT8 activations on GPUs can be reloaded",
            instead="'w4a8'" if on_hopper else "'w4a16', or w4a8 on a Hopper GPU",
        )
    if container in (INT4_PACKED, INT8_PACKED, INT4_ZERO_POINTS):
        # Experts: from 0.32 on vLLM takes Humming on Hopper, whose repacking runs only on a GPU. It takes Marlin elsewhere.
        needs_marlin = container == INT4_PACKED and on_hopper and gpu.release != "0.31"
        return KernelChoice(integers, ("MarlinExperts",), experts_backend="marlin" if needs_marlin else None)
    if container == INT8_ZERO_POINTS:
        if on_hopper:
            return KernelChoice(linear=("MacheteLinearKernel",))
        return KernelChoice(
            refusal="vLLM runs it with Humming (HummingLinearKernel) there, whose reload has not been rehearsed",
            instead="'w4a16-asym' or 'w8a16'",
        )
    if container == MXFP4:
        # vLLM does not look at what a checkpoint says of activations, and its first choice on Blackwell rounds them to 4 bits. On Hopper
        # it is Humming from 0.32 on.
        return KernelChoice(linear=("MarlinMxFp4LinearKernel",), backends={"mxfp4": "marlin"})
    if container == NVFP4:
        # On Hopper vLLM takes Humming from 0.32 on, on 10.0 a kernel of FlashInfer. Both repack only on a GPU.
        return KernelChoice(linear=("MarlinNvFp4LinearKernel",), backends={"nvfp4_w4a16": "marlin"})
    if container == INT8_CODES:
        if is_blackwell:
            return KernelChoice(
                refusal="the kernel that vLLM takes (CutlassInt8ScaledMMLinearKernel) has no INT8 on Blackwell and throws at the "
                "first forward",
                instead="'fp8', 'w8a16' or 'w4a16'",
            )
        return KernelChoice(("CutlassInt8ScaledMMLinearKernel",), ("TritonExperts",))
    if container == E4M3_CODES:
        if gpu.capability < (8, 9):
            return KernelChoice(
                refusal="vLLM leaves activations in 16 bits below compute capability 8.9 (CompressedTensorsW8A16Fp8), and the learner "
                "quantizes them",
                instead="'w8a8' or 'w4a16'",
            )
        return KernelChoice(("CutlassFP8ScaledMMLinearKernel",), ("TritonOrCutlassExperts", "TritonExperts"))
    raise NotImplementedError(f"Scheme {scheme.name!r}: no kernel of vLLM is known for container {container.name!r}.")


def reason_against(scheme: QuantScheme, gpu: Gpu) -> str | None:
    """Return why vLLM must not run `scheme` on `gpu`, and what to choose instead, or `None`."""
    choice = choose_kernels(scheme, gpu)
    if not choice.refusal:
        return None
    return f"scheme {scheme.name!r} does not run on {gpu}: {choice.refusal}. Choose {choice.instead}."


def schemes_of(quantization_config: Mapping[str, Any] | None) -> list[QuantScheme]:
    """Return the schemes of a [`~trl_qarl.checkpoint.layout.quantization_config`] that are known here; of `None` there are none."""
    groups = (quantization_config or {}).get("config_groups", {}).items()
    return [scheme for scheme in itertools.starmap(scheme_of_group, groups) if scheme is not None]


def kernel_arguments(quantization_config: Mapping[str, Any] | None, gpu: Gpu | None = None) -> dict[str, Any]:
    """
    Return the arguments of `vllm.LLM` with which an engine takes the kernels of [`choose_kernels`] on `gpu`, by default the one that is
    here. Where there is none, as for a command that another machine will run, they are those of Hopper, which ask for most.
    """
    gpu = gpu or Gpu.here() or Gpu((9, 0))
    linear, experts = [], []
    for name, group in (quantization_config or {}).get("config_groups", {}).items():
        scheme = scheme_of_group(name, group)
        if scheme is not None:
            linear.append(choose_kernels(scheme, gpu))
            # "Linear" stands for experts too where there are some; a dense model does not look at what is asked for them.
            if group["targets"] == ["Linear"] or any("experts" in target for target in group["targets"]):
                experts.append(linear[-1])
    config = _kernel_config(linear, experts)
    return {"kernel_config": config} if config else {}


def _kernel_config(linear: Iterable[KernelChoice], experts: Iterable[KernelChoice]) -> dict[str, Any]:
    backends = {key: value for choice in linear for key, value in choice.backends.items()}
    backend = next((choice.experts_backend for choice in experts if choice.experts_backend), None)
    config: dict[str, Any] = {"linear_backend_per_quant": backends} if backends else {}
    return config | ({"moe_backend": backend} if backend else {})


def unexpected_kernels(
    kernels: Iterable[str], linear: Iterable[QuantScheme], experts: Iterable[QuantScheme], gpu: Gpu
) -> Iterator[str]:
    """
    Yield, in words, each kernel of an engine that is not the one to expect.

    Args:
        kernels (`Iterable[str]`):
            Class names of the kernels that run quantized linear layers and experts, as the engine reports them.
        linear (`Iterable[QuantScheme]`):
            Schemes of the learner's linear layers.
        experts (`Iterable[QuantScheme]`):
            Schemes of its experts; none where they are not quantized, whose kernels are vLLM's own affair.
        gpu ([`Gpu`]):
            The engine's.
    """
    for kernel in kernels:
        of_experts = "Experts" in kernel or "MoE" in kernel
        schemes = [scheme for scheme in dict.fromkeys(experts if of_experts else linear) if scheme.is_quantized]
        choices = [choose_kernels(scheme, gpu) for scheme in schemes]
        expected = dict.fromkeys(name for c in choices for name in (c.experts if of_experts else c.linear))
        if not schemes or kernel in expected or kernel.startswith(_OURS):
            continue
        names = " and ".join(repr(scheme.name) for scheme in schemes)
        asked = _kernel_config(*(((), choices) if of_experts else (choices, ())))
        remedy = f"Start the engine with --kernel-config '{json.dumps(asked)}'" if asked else "Use another scheme"
        yield (
            f"kernels: scheme {names} on {gpu} is run by {kernel}, not by {' or '.join(expected) or 'one that is known'}. It may "
            "quantize other activations than the learner or go on with old weights: nobody has rehearsed it with "
            f"vLLM {RELEASES[0]} to {RELEASES[-1]}. {remedy}, or use_vllm=False."
        )
