r"""
Trains the cells of a study one after the other, collects their results in study.json, and prints tables.

    python benchmarks/study/cells.py run long --output_dir outputs/long --schemes bf16 w4a16-g128-signed --seeds 0 1
    python benchmarks/study/cells.py run muon_150 --output_dir outputs/muon_150
    python benchmarks/study/cells.py collect long outputs/long
    python benchmarks/study/cells.py table long

`run` skips cells that have scores. `collect` replaces cells of the same settings. `table` needs scipy.
"""

import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
RESULTS = HERE / "study.json"
METRICS = ("reward", "mismatch/abs_logp_mean")
UPDATES_PER_BATCH = 8
Cell = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """Cells with a common start: the model that they begin with, options of `long_study.py`, `ways`, pairs of a kind
    (bf16, rollout-only, QaRL) and an objective, quantized `schemes` and seeds."""

    model: str
    options: str
    ways: tuple[tuple[str, str], ...]
    schemes: tuple[str, ...] = ("w4a16-g128-signed",)
    seeds: tuple[int, ...] = (0, 1, 2)

    def cells(self) -> Iterator[Cell]:
        """Yield the settings of the cells, all of one seed before the next."""
        for seed in self.seeds:
            for scheme in ("bf16", *self.schemes):
                for kind, objective in self.ways:
                    if (kind == "bf16") == (scheme == "bf16"):
                        learner = {} if kind == "bf16" else {"quantize_learner": kind == "QaRL"}
                        yield {**learner, "objective": objective, "scheme": scheme, "seed": seed}


WAYS = (
    ("bf16", "grpo-tis"),
    *(("rollout-only", objective) for objective in ("grpo-tis", "tbpo")),
    *(("QaRL", objective) for objective in ("tbpo", "grpo-tis")),
)
MUON = (("QaRL", "tbpo"), ("rollout-only", "tbpo"))
BOTH = ("w4a16-g128-signed", "w3a16-g32-signed")
SMALL = "--num_prompts 8 --float32"
STUDIES = {
    "long": Study("outputs/long_model", "--band_scale 11", (*WAYS, ("QaRL", "gspo")), BOTH, (0, 1, 2, 3, 4)),
    "length_150": Study("benchmarks/study/start_150", f"{SMALL} --band_scale 13.4", WAYS),
    "length_400": Study("benchmarks/study/start_400", f"{SMALL} --band_scale 2.8", WAYS),
    "length_1000": Study("benchmarks/study/start_1000", f"{SMALL} --band_scale 0.9", WAYS),
    **{
        f"{kept}_groups_150": Study(
            "benchmarks/study/start_150",
            f"--num_prompts 16 --float32 --band_scale 13.4 --keep_groups {value}",
            WAYS[3:],
            seeds=(0, 1),
        )
        for kept, value in (("kept", "true"), ("mixed", "false"))
    },
    "muon_150": Study("benchmarks/study/start_150", f"{SMALL} --band_scale 13.4 --optimizer muon", MUON),
    "muon_8bit_150": Study("benchmarks/study/start_150", f"{SMALL} --band_scale 13.4 --optimizer muon_8bit", MUON[:1]),
    "bf16_gradients_150": Study(
        "benchmarks/study/start_150",
        f"{SMALL} --band_scale 13.4 --optimizer muon_8bit --gradient_dtype bfloat16",
        MUON[:1],
    ),
    "muon_400": Study("benchmarks/study/start_400", f"{SMALL} --band_scale 2.8 --optimizer muon", MUON),
    "muon_1000": Study(
        "benchmarks/study/start_1000",
        f"{SMALL} --band_scale 0.9 --optimizer muon --max_steps 96 --num_scored 64",
        MUON,
    ),
}


def kind_of(cell: Cell) -> str:
    return "bf16" if cell["scheme"] == "bf16" else "QaRL" if cell["quantize_learner"] else "rollout-only"


def name_of(cell: Cell) -> str:
    """
    Return the name of a cell's folder.

    >>> name_of({"quantize_learner": True, "objective": "tbpo", "scheme": "w4a16-g128-signed", "seed": 0})
    'QaRL-tbpo-w4a16-g128-signed-seed0'
    """
    return "-".join([kind_of(cell), cell["objective"], cell["scheme"], f"seed{cell['seed']}"])


def command_of(study: Study, cell: Cell, folder: Path) -> list[str]:
    words = [sys.executable, str(HERE / "long_study.py"), "--model", study.model, "--output_dir", str(folder)]
    words += ["--objective", cell["objective"], "--scheme", cell["scheme"], "--seed", str(cell["seed"])]
    return [*words, "--quantize_learner", str(cell.get("quantize_learner", True)).lower(), *study.options.split()]


def run(args: Namespace) -> None:
    study = STUDIES[args.study]
    # Memory that glibc gives back after each product has to be cleared again at the next one, so it keeps what it has.
    memory = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TOP_PAD_": str(2**26)}
    environment = {**os.environ, **memory, "MALLOC_TRIM_THRESHOLD_": str(2**34)}
    for cell in study.cells():
        folder = args.output_dir / name_of(cell)
        is_wanted = cell["seed"] in (args.seeds or study.seeds) and cell["scheme"] in (
            args.schemes or [cell["scheme"]]
        )
        if is_wanted and not (folder / "scores.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            print(folder, flush=True)
            with open(folder / "log.txt", "w") as log:
                subprocess.run(command_of(study, cell, folder), env=environment, stdout=log, stderr=log, check=True)


def collect(args: Namespace) -> None:
    before = json.loads(RESULTS.read_text())
    found = []
    for cell in STUDIES[args.study].cells():
        folder = args.output_dir / name_of(cell)
        if (folder / "scores.json").is_file():
            scores = json.loads((folder / "scores.json").read_text())
            solved = {name: 100 * score["correct"] / score["total"] for name, score in scores.items()}
            found.append({"study": args.study, **cell, "scores": solved, "course": read_course(folder)})
    renewed = [settings_of(cell) for cell in found]
    cells = [cell for cell in before if settings_of(cell) not in renewed] + found
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, cells)) + "\n]\n")


def settings_of(cell: Cell) -> Cell:
    return {name: value for name, value in cell.items() if name not in ("scores", "course")}


def read_course(folder: Path) -> dict[str, list[float | None]]:
    """Return means of metrics over the updates of each generation batch, to three digits."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    course = {}
    for metric in METRICS:
        batches: dict[int, list[float]] = {}
        for row in rows:
            if "loss" in row and row.get(metric) is not None:
                batches.setdefault((row["step"] - 1) // UPDATES_PER_BATCH, []).append(row[metric])
        course[metric] = [float(f"{statistics.fmean(batches[batch]):.3g}") for batch in sorted(batches)]
    return course


def group_cells(cells: Sequence[Cell]) -> dict[tuple[str, str, str, str], list[Cell]]:
    """Group cells that only differ by seed, by study, scheme, kind and objective."""
    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["study"], cell["scheme"], kind_of(cell), cell["objective"]), []).append(cell)
    return groups


def half_width(values: Sequence[float]) -> float:
    """Return the half width of the mean's 95 % interval by Student's distribution."""
    from scipy.stats import sem, t

    return float(sem(values) * t.ppf(0.975, len(values) - 1))


def interval(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.fmean(values):.0f}" + (f" ± {half_width(values):.0f}" if len(values) > 1 else "")


def table(args: Namespace) -> None:
    """Print final rewards (the last quarter of the batches) and held-out scores in percent."""
    print(
        "| scheme | run | seeds | final reward | greedy | sampled | masters, greedy |\n|---|---|---|---|---|---|---|"
    )
    for (study, scheme, kind, objective), cells in sorted(group_cells(json.loads(RESULTS.read_text())).items()):
        if study == args.study:
            courses = [cell["course"]["reward"] for cell in cells]
            values = [[100 * statistics.fmean(course[-len(course) // 4 :]) for course in courses]]
            for name in ("greedy", "sampled", "unquantized greedy"):
                values.append([cell["scores"][name] for cell in cells if name in cell["scores"]])
            texts = [scheme, f"{kind}, {objective}", str(len(cells)), *map(interval, values)]
            print(f"| {' | '.join(texts)} |")


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.strip().splitlines()[0])
    actions = parser.add_subparsers(required=True)
    for action in (run, collect, table):
        of_action = actions.add_parser(action.__name__)
        of_action.add_argument("study", choices=list(STUDIES))
        of_action.set_defaults(action=action)
        if action is collect:
            of_action.add_argument("output_dir", type=Path)
        if action is run:
            of_action.add_argument("--output_dir", type=Path, required=True)
            of_action.add_argument("--seeds", type=int, nargs="+")
            of_action.add_argument("--schemes", nargs="+")
    args = parser.parse_args(argv)
    args.action(args)


if __name__ == "__main__":
    main()
