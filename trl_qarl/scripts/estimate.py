"""`trl-qarl estimate`: memory of a training on each GPU, and the launches that fit."""

import json
import math
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..hub import engine_rank
from ..quantization.plan import plan_of
from .command_line import add_plan_options, check_folder, configuration_errors


_GB = 10**9


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Add up the memory of a training on each GPU, from only the model's configuration, for DDP and FSDP2.",
        epilog="Exit code: 0 if a launch fits, 1 if none does or vLLM cannot run the scheme there, 2 for invalid options.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder; its configuration is read, not its weights")
    add("--gpus", type=int, default=1, help="GPUs of the learner, or of learner and vLLM together")
    add("--gpu_memory", type=float, required=True, metavar="GB", help="memory of each, in GB")
    add(
        "--gpu_capability",
        type=_capability,
        metavar="X.Y",
        help="their compute capability, such as 9.0: also check as `trl-qarl doctor` does that vLLM runs each scheme there",
    )
    add_plan_options(parser, default="w4a16")
    add("--optim", default="muon", help="muon, adamw_torch_fused, adamw_torch or adamw_torch_8bit")
    add("--use_peft", action="store_true", help="LoRA on all linear layers, over a frozen base")
    add("--lora_r", type=int, default=16, help="its rank")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches of a process in an update")
    add("--tokens", type=int, default=4096, help="tokens of a micro-batch, prompts and completions")
    add(
        "--vllm_gpu_memory_utilization",
        type=float,
        default=0.3,
        help="share of each GPU for a colocated vLLM; 0 if a server runs on GPUs that are not counted here",
    )
    add("--rollout_ahead", type=int, default=0, help="1 if generation batches are drawn ahead")
    add("--trust_remote_code", action="store_true", help="allow model code from the hub")
    add("--write", metavar="FILE", help="write the first launch that fits for `accelerate launch --config_file`")
    return parser


def _capability(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"(\d+)\.(\d+)", text)) is None:
        raise ArgumentTypeError(f"{text!r} is not a compute capability, such as 9.0.")
    return int(found[1]), int(found[2])


def main(args: Namespace) -> int:
    """Print the memory of each part by launch. Return 0 if a launch fits and vLLM runs every scheme, else 1."""
    with configuration_errors():
        for name in ("gpus", "gpu_memory", "tokens", "lora_r", "gradient_accumulation_steps"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name}={getattr(args, name)} must be greater than 0.")
        if not 0 <= args.vllm_gpu_memory_utilization < 1:
            share = f"--vllm_gpu_memory_utilization={args.vllm_gpu_memory_utilization}"
            raise ValueError(f"{share} must be at least 0, for a server elsewhere, and less than 1, a whole GPU.")
        if args.rollout_ahead not in (0, 1):
            raise ValueError(f"--rollout_ahead={args.rollout_ahead} must be 0 or 1.")
        if args.write:
            Path(args.write).parent.mkdir(parents=True, exist_ok=True)
        from ..doctor.memory import Run, launch_configuration, parts_of_runs, served_bytes, shapes_of

        engine_bytes = int(args.vllm_gpu_memory_utilization * args.gpu_memory * _GB)
        check_folder(args.model)
        rank, accumulates = args.lora_r if args.use_peft else 0, args.gradient_accumulation_steps > 1
        run = Run(args.gpus, args.optim, args.tokens, engine_bytes, rank, accumulates, args.rollout_ahead)
        plan, model = plan_of(vars(args)), shapes_of(args.model, args.trust_remote_code, "MODEL")
        # A server takes the GPUs that the learner leaves.
        split = [
            replace(run, num_gpus=number, engine_bytes=0) for number in range(1, args.gpus if engine_bytes else 1)
        ]
        found, *found_split = parts_of_runs(model, plan, [run, *split], args.exclude_modules)
    if args.gpu_capability is not None:
        from ..doctor.checks import check_gpu
        from ..rollout.gpu_kernels import Gpu

        diagnoses = [*check_gpu(Gpu(args.gpu_capability), plan.schemes)]
        print(*diagnoses, sep="\n")
        if any(diagnosis.level == "error" for diagnosis in diagnoses):
            return 1
    totals = {launch: sum(parts.values()) / _GB for launch, parts in found.items()}
    fitting = next((launch for launch, total in totals.items() if total <= args.gpu_memory), None)
    each = f"each of {args.gpus} GPUs" if args.gpus > 1 else "one GPU"
    print(f"GB on {each} of {args.gpu_memory:g} GB")
    names = dict.fromkeys(name for parts in found.values() for name, size in parts.items() if size)
    rows = [(name, [f"{parts.get(name, 0) / _GB:.1f}" for parts in found.values()]) for name in names]
    rows.append(("total", [f"{total:.1f}" for total in totals.values()]))
    rows.append(("", ["fits" if total <= args.gpu_memory else "too much" for total in totals.values()]))
    for name, values in [("", list(found)), *rows]:
        print(f"{name:<16}" + "".join(f"{value:>10}" for value in values))
    if accumulates:
        print(
            'fsdp2 holds whole gradients while it adds up micro-batches. accelerator_config={"gradient_accumulation_kwargs": '
            '{"sync_each_batch": True}} keeps them sharded: estimate this with --gradient_accumulation_steps 1.'
        )
    num_gpus = args.gpus
    for number, parts in enumerate(found_split, 1):
        sizes = {launch: sum(each.values()) / _GB for launch, each in parts.items()}
        if (launch := next((name for name, size in sizes.items() if size <= args.gpu_memory), None)) is not None:
            print(
                f"Or a server on {args.gpus - number} of them, and the learner on {number} with {launch}: {sizes[launch]:.1f} GB."
            )
            served = served_bytes(model, found["ddp"]["low-bit weights"]) / _GB / args.gpu_memory
            print(*_commands(args, number, served), sep="\n")
            if fitting is None:
                fitting, num_gpus = launch, number
            break
    if fitting is None:
        # Only these parts become smaller with more GPUs.
        sharded = ["masters", "optimizer", "low-bit weights", "kept weights"] + ["gradients"] * (not accumulates)
        divided = args.gpus * sum(found["fsdp2"][name] for name in sharded) / _GB
        room = args.gpu_memory - totals["fsdp2"] + divided / args.gpus
        more = "GPUs with more memory, as no number of these is enough"
        if room > 0:
            more = f"--gpus {math.ceil(divided / room)} (fits with fsdp2)"
        print(
            f"Nothing fits. Use {more}, --optim adamw_torch_8bit, --use_peft, fewer --tokens, or a vLLM server elsewhere "
            "(--vllm_gpu_memory_utilization 0)."
        )
        return 1
    print(f"Launch with {fitting}." if num_gpus == args.gpus else f"Launch with {fitting} on {num_gpus} GPUs.")
    if args.write:
        import yaml

        is_loaded_by_all = args.use_peft or any(scheme.container.has_global_scale for scheme in plan.schemes)
        with configuration_errors(), open(args.write, "w") as file:
            yaml.safe_dump(launch_configuration(fitting, num_gpus, is_loaded_by_all), file, sort_keys=False)
        print(f"Wrote {args.write}: accelerate launch --config_file {args.write} train.py")
    return 0


def _commands(args: Namespace, num_learner: int, served: float) -> Iterator[str]:
    """Yield the commands of a server and of the learner, which has the first GPUs; `served` is the share of a GPU that
    the weights take in an engine. Replicas answer more requests than as many GPUs that share one engine."""
    num_left = args.gpus - num_learner
    # The other half is for keys and values.
    size = next((size for size in (1, 2, 4, 8) if served / size <= 0.5 and size <= num_left), num_left)
    gpus = [",".join(map(str, each)) for each in (range(num_learner), range(num_learner, args.gpus))]
    scheme = args.scheme if isinstance(args.scheme, str) else json.dumps(args.scheme)
    argv = ["trl-qarl", "vllm-serve", "--model", args.model, "--scheme", scheme]
    for option in ("group_size", "exclude_modules"):
        given = getattr(args, option)
        argv += [f"--{option}", *map(str, given if isinstance(given, list) else [given])] if given else []
    argv += ["--max_lora_rank", str(engine_rank(args.lora_r))] if args.use_peft else []
    argv += ["--tensor-parallel-size", str(size)] if size > 1 else []
    argv += ["--data-parallel-size", str(num_left // size)] if num_left // size > 1 else []
    yield f"  CUDA_VISIBLE_DEVICES={gpus[1]} {shlex.join(argv)}"
    launch = ["--accelerate_config", args.write or "LAUNCH.yaml", "--num_processes", str(num_learner)]
    yield f"  CUDA_VISIBLE_DEVICES={gpus[0]} trl-qarl train {shlex.join(launch)} --use_vllm true --vllm_mode server ..."
