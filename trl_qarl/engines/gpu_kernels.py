"""
Chooses vLLM's kernel for a scheme on an NVIDIA GPU: the option that selects the kernel and the kernel to expect, or
the reason against the scheme and the scheme to use instead. [`choose_kernels`] asks the format of the scheme's
container ([`trl_qarl.quantization.formats`]).

vLLM's own choice changes from release to release, and not every kernel computes what the learner does: some leave
activations in 16 bits although the scheme quantizes them, some quantize them although the scheme does not, and one
raises an error. So the engine is asked for the kernel whose reload was rehearsed, and any other kernel is an error.
`benchmarks/rehearsal/` records the choices of each release; docs/schemes.md explains the limits of such a rehearsal.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..packages import installed
from ..quantization.schemes import QuantScheme
from ..wire.describe import scheme_of_group


if TYPE_CHECKING:
    from ..quantization.formats.base import KernelChoice

RELEASES = ("0.31", "0.32", "0.33")
"""Releases of vLLM, `major.minor`, that were rehearsed and that the extra `vllm` takes."""

# Prefixes of the kernels that this package registers in vLLM.
_OURS = ("QaRL", "Repeatable")


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: its compute capability, major and minor, and the version of vLLM on it, by default the installed
    one or else the newest of [`RELEASES`]."""

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


def choose_kernels(scheme: QuantScheme, gpu: Gpu) -> "KernelChoice":
    """Return the kernels that run `scheme` on `gpu` and the options that select them, or the reason against it.
    `NotImplementedError` is raised for a format without a known kernel."""
    # Imported here so that commands without a GPU engine load no torch.
    from ..quantization.formats.base import KernelChoice
    from ..quantization.formats.registry import format_of

    if not scheme.is_quantized:
        return KernelChoice()
    if gpu.capability < (8, 0):
        return KernelChoice(
            refusal="kernels were rehearsed for compute capability 8.0 and newer",
            instead="use_vllm=False, or a GPU of compute capability 8.0 or newer",
        )
    return format_of(scheme.container).kernels(scheme, gpu)


def reason_against(scheme: QuantScheme, gpu: Gpu) -> str | None:
    """Return the reason why vLLM must not run `scheme` on `gpu`, with the alternative, or `None`."""
    choice = choose_kernels(scheme, gpu)
    if not choice.refusal:
        return None
    return f"scheme {scheme.name!r} does not run on {gpu}: {choice.refusal}. Choose {choice.instead}."


def kernel_arguments(
    quantization_config: Mapping[str, Any] | None, dtype: str, on_cpu: bool, gpu: Gpu | None = None
) -> dict[str, Any]:
    """
    Return the arguments of `vllm.LLM` that select the kernels of [`choose_kernels`]; none on a CPU.

    The first two arguments are attributes of an [`~trl_qarl.engines.spec.EngineSpec`]. `gpu` defaults to the one of
    this machine; without one, as for a command that another machine will run, to Hopper, which runs most schemes.
    `ValueError` is raised for `w4a8` on a CPU or in another dtype than bfloat16, and for schemes that
    [`choose_kernels`] refuses.
    """
    groups = (quantization_config or {}).get("config_groups", {})
    schemes = {name: scheme for name, group in groups.items() if (scheme := scheme_of_group(name, group)) is not None}
    has_w4a8 = any(scheme.has_fp8_scales for scheme in schemes.values())
    if has_w4a8 and on_cpu:
        raise ValueError(
            "scheme='w4a8' cannot roll out in vLLM on a CPU: vLLM's kernel there uses other arithmetic (INT8 activations) and is wrong "
            "after its weights are reloaded. Use 'w4a8-int8', which has INT8 activations, `use_vllm=False`, or a GPU of compute capability 9.0."
        )
    if has_w4a8 and dtype != "bfloat16":
        raise ValueError(
            f"scheme='w4a8' runs in vLLM in bfloat16 only, not in {dtype}. Set `bf16=True` (`--dtype bfloat16`)."
        )
    if on_cpu:
        return {}
    gpu = gpu or Gpu.here() or Gpu((9, 0))
    if reasons := [reason for scheme in schemes.values() if (reason := reason_against(scheme, gpu))]:
        raise ValueError("\n".join(reasons))
    linear = {name: choose_kernels(scheme, gpu) for name, scheme in schemes.items()}
    # "Linear" includes experts; a dense model ignores the option for them.
    targets = {name: groups[name]["targets"] for name in linear}
    of_experts = [name for name, each in targets.items() if each == ["Linear"] or any("experts" in t for t in each)]
    config = _kernel_config(linear.values(), [linear[name] for name in of_experts])
    return {"kernel_config": config} if config else {}


def _kernel_config(linear: Iterable["KernelChoice"] = (), experts: Iterable["KernelChoice"] = ()) -> dict[str, Any]:
    backends = {key: value for choice in linear for key, value in choice.backends.items()}
    backend = next((choice.experts_backend for choice in experts if choice.experts_backend), None)
    config: dict[str, Any] = {"linear_backend_per_quant": backends} if backends else {}
    return config | ({"moe_backend": backend} if backend else {})


def unexpected_kernels(
    kernels: Iterable[str], linear: Iterable[QuantScheme], experts: Iterable[QuantScheme], gpu: Gpu
) -> Iterator[str]:
    """Yield, in words, each unexpected kernel of an engine: `kernels` are the class names of those that run quantized
    linear layers and experts, `linear` and `experts` the schemes of the learner's. Kernels of unquantized experts are
    left to vLLM."""
    for kernel in kernels:
        of_experts = "Experts" in kernel or "MoE" in kernel
        schemes = [scheme for scheme in dict.fromkeys(experts if of_experts else linear) if scheme.is_quantized]
        choices = [choose_kernels(scheme, gpu) for scheme in schemes]
        expected = dict.fromkeys(name for c in choices for name in (c.experts if of_experts else c.linear))
        if not schemes or kernel in expected or kernel.startswith(_OURS):
            continue
        names = " and ".join(repr(scheme.name) for scheme in schemes)
        asked = _kernel_config(experts=choices) if of_experts else _kernel_config(linear=choices)
        remedy = f"Start the engine with --kernel-config '{json.dumps(asked)}'" if asked else "Use another scheme"
        yield (
            f"kernels: scheme {names} on {gpu} is run by {kernel}, not by {' or '.join(expected) or 'a known one'}. It may "
            "quantize other activations than the learner or continue with old weights: it was not rehearsed with "
            f"vLLM {RELEASES[0]} to {RELEASES[-1]}. {remedy}, or use_vllm=False."
        )
