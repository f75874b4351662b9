"""`trl-qarl estimate`: memory of a training on each GPU and in its machine, and commands of the best layout."""

import json
import math
import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..quantization.plan import plan_of
from ..wire.protocol import engine_rank
from .command_line import add_plan_options, check_folder, configuration_errors


_GB = 10**9
_NOT_COUNTED = (
    "Not counted: the CUDA context (about 0.5 GB), buffers of NCCL, workspaces of kernels, activations of a vision tower "
    "and gaps of the allocator on a GPU; keys and values of an engine beyond its share; about 3 GB of host memory for each "
    "process. The layout below has a tenth in reserve, if one does."
)


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Add up the memory of a training on each GPU and in its machine, from only the model's configuration, "
        "for DDP, FSDP2 and FSDP2 with masters in host memory, and name the best layout that fits.",
        epilog="Exit code: 0 if a launch fits, 1 if none does or vLLM cannot run the scheme there, 2 for invalid options.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="hub id or folder; its configuration is read, not its weights")
    add("--gpus", type=int, default=1, help="GPUs of the learner, or of learner and vLLM together")
    add("--gpu_memory", type=float, required=True, metavar="GB", help="memory of each, in GB")
    text = (
        "their compute capability, such as 9.0: also check, like `trl-qarl doctor`, that vLLM runs each scheme there"
    )
    add("--gpu_capability", type=_capability, metavar="X.Y", help=text)
    add_plan_options(parser, default="w4a16")
    add("--host_memory", type=float, metavar="GB", help="host memory of the machine; not compared if it is not given")
    add("--optim", default="muon", help="muon, muon_8bit, adamw_torch_fused, adamw_torch or adamw_torch_8bit")
    add("--gradient_dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of gradients")
    add("--use_peft", action="store_true", help="LoRA on all linear layers, over a frozen base")
    add("--lora_r", type=int, default=16, help="its rank")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches of a process in an update")
    add("--tokens", type=int, default=4096, help="tokens of a micro-batch, prompts and completions")
    text = "share of each GPU for a colocated vLLM; 0 if a server runs on GPUs that are not counted here"
    add("--vllm_gpu_memory_utilization", type=float, default=0.3, help=text)
    add("--rollout_ahead", type=int, default=0, help="1 if generation batches are drawn ahead")
    add("--trust_remote_code", action="store_true", help="allow model code from the hub")
    add("--write", metavar="FILE", help="write the first launch that fits for `accelerate launch --config_file`")
    return parser


def _capability(text: str) -> tuple[int, int]:
    if (found := re.fullmatch(r"(\d+)\.(\d+)", text)) is None:
        raise ArgumentTypeError(f"{text!r} is not a compute capability, such as 9.0.")
    return int(found[1]), int(found[2])


def main(args: Namespace) -> int:
    """Print the memory of each part, and all layouts. Return 0 if one fits and vLLM runs every scheme, else 1."""
    with configuration_errors():
        _check_numbers(args)
        if args.write:
            Path(args.write).parent.mkdir(parents=True, exist_ok=True)
        from ..doctor.memory import MemorySettings, launch_configuration, parts_of_memory, served_bytes, shapes_of

        engine_bytes = int(args.vllm_gpu_memory_utilization * args.gpu_memory * _GB)
        check_folder(args.model)
        rank, accumulates = args.lora_r if args.use_peft else 0, args.gradient_accumulation_steps > 1
        width, ahead = 2 if args.gradient_dtype == "bfloat16" else 4, args.rollout_ahead
        run = MemorySettings(args.gpus, args.optim, args.tokens, engine_bytes, rank, accumulates, ahead, width)
        plan, model = plan_of(vars(args)), shapes_of(args.model, args.trust_remote_code, "MODEL")
        # A server takes the GPUs that the learner leaves.
        split = [
            replace(run, num_gpus=number, engine_bytes=0) for number in range(1, args.gpus if engine_bytes else 1)
        ]
        found, *found_split = parts_of_memory(model, plan, [run, *split], args.exclude_modules)
    if args.gpu_capability is not None:
        from ..doctor.checks import check_gpu
        from ..engines.gpu_kernels import Gpu

        diagnoses = [*check_gpu(Gpu(args.gpu_capability), plan.schemes)]
        print(*diagnoses, sep="\n")
        if any(diagnosis.level == "error" for diagnosis in diagnoses):
            return 1
    _print_parts(args, found)
    if accumulates:
        print(
            'FSDP2 holds whole gradients while it adds up micro-batches. accelerator_config={"gradient_accumulation_kwargs": '
            '{"sync_each_batch": True}} keeps them sharded: estimate this with --gradient_accumulation_steps 1.'
        )
    served = served_bytes(model, found["ddp"]["low-bit weights"])
    layouts = [*_layouts(args, model, served, found, found_split)]
    print("\nGB on each GPU by layout; * fits")
    for place in dict.fromkeys(layout.place for layout in layouts):
        there = [layout for layout in layouts if layout.place == place]
        sizes = [f"{layout.launch} {layout.gpu:.1f}{'*' * layout.fits(args)}" for layout in there]
        print(f"  {place:<46}" + "  ".join(sizes))
    # Calculated within a tenth.
    fitting = [layout for layout in layouts if layout.fits(args)]
    best = next((layout for layout in fitting if 1.1 * layout.gpu <= args.gpu_memory), (fitting or [None])[0])
    print(_NOT_COUNTED)
    if best is None:
        print(
            f"Nothing fits. Use {_enough_gpus(args, found['fsdp2'], accumulates)}, --optim muon_8bit --gradient_dtype bfloat16, "
            "--use_peft, fewer --tokens, more host memory, or a vLLM server elsewhere (--vllm_gpu_memory_utilization 0)."
        )
        return 1
    on_gpus = f" on {best.num_gpus} GPUs" if best.num_gpus < args.gpus else ""
    print(f"Launch with {best.launch}{on_gpus}, {best.place}:")
    # Those of experts and routers are refused.
    is_mixture = any(p.ndim > 2 for p in model.parameters())
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if is_mixture else ["all-linear"]
    # A micro-batch has whole sequences. By default an engine needs keys and values of the longest that a model takes.
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or args.tokens
    print(*_commands(args, best, targets, str(min(args.tokens, longest))), sep="\n")
    if args.use_peft:
        print("The base is loaded in float32: --dtype bfloat16 loads it in half the host memory.")
    if args.write:
        import yaml

        with configuration_errors(), open(args.write, "w") as file:
            yaml.safe_dump(launch_configuration(best.launch, best.num_gpus), file, sort_keys=False)
        print(f"Wrote {args.write}: accelerate launch --config_file {args.write} train.py")
    return 0


def _check_numbers(args: Namespace) -> None:
    for name in ("gpus", "gpu_memory", "tokens", "lora_r", "gradient_accumulation_steps"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be greater than 0.")
    if not 0 <= args.vllm_gpu_memory_utilization < 1:
        share = f"--vllm_gpu_memory_utilization={args.vllm_gpu_memory_utilization}"
        raise ValueError(f"{share} must be at least 0, for a server elsewhere, and less than 1, a whole GPU.")
    if args.rollout_ahead not in (0, 1):
        raise ValueError(f"--rollout_ahead={args.rollout_ahead} must be 0 or 1.")


def _print_parts(args: Namespace, found: dict[str, dict[str, int]]) -> None:
    """Print the size of each part with each launch, the host's last."""
    from ..doctor.memory import on_gpu, on_host

    each = f"each of {args.gpus} GPUs" if args.gpus > 1 else "one GPU"
    print(f"GB on {each} of {args.gpu_memory:g} GB, and in host memory for all processes together")
    names = dict.fromkeys(name for parts in found.values() for name, size in parts.items() if size)
    rows = [(name, [parts.get(name, 0) for parts in found.values()]) for name in names]
    rows.sort(key=lambda row: row[0].startswith("host "))
    rows += [(name, [*map(total, found.values())]) for name, total in (("total", on_gpu), ("host memory", on_host))]
    print(f"{'':<21}" + "".join(f"{launch:>14}" for launch in found))
    for name, sizes in rows:
        print(f"{name:<21}" + "".join(f"{size / _GB:>14.1f}" for size in sizes))


def _enough_gpus(args: Namespace, parts: dict[str, int], accumulates: bool) -> str:
    """Return what to use so that `parts`, those of FSDP2, fit."""
    from ..doctor.memory import on_gpu

    # Only these become smaller with more GPUs.
    sharded = ["masters", "optimizer", "low-bit weights", "kept weights"] + ["gradients"] * (not accumulates)
    divided = args.gpus * sum(parts[name] for name in sharded) / _GB
    room = args.gpu_memory - on_gpu(parts) / _GB + divided / args.gpus
    if room > 0:
        return f"--gpus {math.ceil(divided / room)} (fits with fsdp2)"
    return "GPUs with more memory, as no number of these is enough"


@dataclass(frozen=True)
class _Layout:
    """A launch, the place of its engine, the GPUs of learner and server, and GB on a GPU and in host memory. `server`
    has the number of servers, and the replicas and ranks of each."""

    launch: str
    place: str
    num_gpus: int
    gpu: float
    host: float
    server: tuple[int, int, int] | None = None
    is_asleep: bool = False
    has_room: bool = True

    def fits(self, args: Namespace) -> bool:
        has_host = args.host_memory is None or self.host <= args.host_memory
        return self.has_room and has_host and self.gpu <= args.gpu_memory


def _layouts(args, model, served: int, found: dict, found_split: list[dict]) -> Iterator[_Layout]:
    """Yield layouts that are not refused: those without offload first, then in the order of `LAUNCHES`."""
    from ..doctor.memory import LAUNCHES, on_gpu, on_host
    from ..quantization.inventory import Inventory
    from ..quantization.weight import TransposedSource

    # Shards of transposed masters are no rows of low-bit weights, which are rows themselves in a frozen base.
    is_transposed = any(isinstance(weight.source, TransposedSource) for _, weight in Inventory.of(model).weights())
    can_shard = args.use_peft or not is_transposed

    def without_refused(launches: Iterable[str], num_gpus: int) -> list[str]:
        can_round = num_gpus == 1 or args.gradient_dtype == "float32"
        return [name for name in launches if (can_round if name == "ddp" else can_shard)]

    engine = found["ddp"]["engine"]
    servers = {n: _server(model, n, served / _GB / args.gpu_memory) for n in range(1, args.gpus)}
    for launches in (LAUNCHES[:-1], LAUNCHES[-1:]):
        for is_asleep in (False, True) if engine else (False,):
            place = "an engine in each process" + ", asleep in updates" * is_asleep if engine else "a server elsewhere"
            for launch in without_refused(launches, args.gpus):
                sizes = on_gpu(found[launch], is_asleep) / _GB, on_host(found[launch]) / _GB
                yield _Layout(launch, place, args.gpus, *sizes, None, is_asleep, not engine or served < engine)
        for number, parts in enumerate(found_split, 1):
            server = servers[args.gpus - number]
            # The learner also gets GPUs that a server cannot use.
            if server is None or server == servers.get(args.gpus - number - 1):
                continue
            several = f"{server[0]} servers" if server[0] > 1 else "a server"
            place = f"{number} of the GPUs, and {several} on {math.prod(server)}"
            for launch in without_refused(launches, number):
                yield _Layout(launch, place, number, on_gpu(parts[launch]) / _GB, on_host(parts[launch]) / _GB, server)


def _server(model, num_left: int, served: float) -> tuple[int, int, int] | None:
    """Return the number of servers on `num_left` GPUs, and the replicas and tensor-parallel ranks of each; `None` if
    weights, which take the share `served` of a GPU, do not fit. Replicas answer more requests than as many ranks of
    one engine; those of a mixture are servers of their own."""
    from ..checkpoint.layout import quantization_config
    from ..quantization.inventory import Inventory
    from ..sync.publisher import problems_of_ranks

    inventory = Inventory.of(model)
    config = quantization_config(inventory) or {}
    sizes = [n for n in (1, 2, 4, 8) if n <= num_left and not any(problems_of_ranks(inventory, config, n))]
    # The other half is for keys and values.
    fitting = [n for n in sizes if served / n <= 0.5]
    if not fitting:
        return None
    count = num_left // fitting[0]
    return (count, 1, fitting[0]) if inventory.stacked_experts or inventory.experts else (1, count, fitting[0])


def _commands(args: Namespace, layout: _Layout, targets: list[str], length: str) -> Iterator[str]:
    """Yield the commands of servers here, if any, and of the learner on the first GPUs, for this `length`."""
    scheme = args.scheme if isinstance(args.scheme, str) else json.dumps(args.scheme)
    options = ["--scheme", scheme]
    for option in ("group_size", "exclude_modules"):
        given = getattr(args, option)
        options += [f"--{option}", *map(str, given if isinstance(given, list) else [given])] if given else []
    prefix, urls = "", []
    if layout.server is not None:
        servers, replicas, ranks = layout.server
        argv = ["trl-qarl", "vllm-serve", "--model", args.model, *options, "--max-model-len", length]
        argv += ["--max_lora_rank", str(engine_rank(args.lora_r))] if args.use_peft else []
        argv += ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
        argv += ["--data-parallel-size", str(replicas)] if replicas > 1 else []
        for number in range(servers):
            first = layout.num_gpus + number * ranks * replicas
            # Of equal seeds servers would draw with the same random numbers.
            own = ["--port", str(8000 + number), "--seed", str(number)] if servers > 1 else []
            yield f"  CUDA_VISIBLE_DEVICES={_numbers(first, first + ranks * replicas)} {shlex.join(argv + own)}"
            urls += [f"http://127.0.0.1:{8000 + number}"] if servers > 1 else []
        prefix = f"CUDA_VISIBLE_DEVICES={_numbers(0, layout.num_gpus)} "
    argv = ["trl-qarl", "train", "--accelerate_config", args.write or "LAUNCH.yaml"]
    argv += ["--num_processes", str(layout.num_gpus), "--model_name_or_path", args.model, *options]
    argv += ["--optim", args.optim] if args.optim != "muon" else []
    argv += ["--gradient_dtype", args.gradient_dtype] if args.gradient_dtype != "float32" else []
    argv += ["--use_peft", "--lora_r", str(args.lora_r), "--lora_target_modules", *targets] if args.use_peft else []
    argv += ["--gradient_checkpointing", "true", "--use_vllm", "true"]
    if layout.server is not None or not args.vllm_gpu_memory_utilization:
        argv += ["--vllm_mode", "server", *(["--vllm_server_base_url", ",".join(urls)] if urls else [])]
    else:
        argv += ["--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", f"{args.vllm_gpu_memory_utilization:g}"]
        argv += ["--vllm_max_model_length", length]
        argv += ["--vllm_enable_sleep_mode", "true"] if layout.is_asleep else []
    yield f"  {prefix}{shlex.join(argv)} ..."


def _numbers(start: int, end: int) -> str:
    return ",".join(map(str, range(start, end)))
