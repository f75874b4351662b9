r"""
The tables of benchmarks/study/README.md, from the directories that `trl-qarl compare` has filled so far, finished
cells only.

    python benchmarks/study/long_tables.py --collect outputs/long outputs/long_variants \
        --output benchmarks/study/study.json
    python benchmarks/study/long_tables.py benchmarks/study/study.json
    python benchmarks/study/long_tables.py benchmarks/study/study.json --fill benchmarks/study/README.md

The first adds what the page and its pictures need of every cell, in the place of cells with the same settings; a study
can so be made of the cells of several machines or days. The second prints
Markdown: means over the seeds with 95 % intervals, what the telemetry saw, and which differences exceed the noise
between seeds. The third renews the tables of the page.

    python benchmarks/study/long_tables.py --bands DIR

prints the `--band_scale` that follows from a run that no band bounds, by the rule in benchmarks/study/README.md.
"""

import itertools
import json
import math
import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import sem, t

from trl_qarl.study.groups import compare_groups
from trl_qarl.study.runs import read_run
from trl_qarl.telemetry.run_files import DISTRIBUTIONS_FILE


sys.path.insert(0, str(Path(__file__).parent))

import places
import routes


# GSPO's authors report that about 15 % of their tokens, which are whole sequences, are clipped.
CLIPPED_SHARE = 0.15
# Table 2 of the paper: the mean of the offsets of GSPO's band.
PAPER_OFFSET = 3.5e-4
# Kept for each generation batch, the means over its updates.
METRICS = (
    "reward",
    "entropy",
    "mismatch/abs_logp_mean",
    "mismatch/abs_logp_mean/positive",
    "mismatch/abs_logp_mean/negative",
    "mismatch/k1/positive",
    "mismatch/k1/negative",
    "rollout/error_token_share",
    "rollout/repetition_share",
    "completions/clipped_ratio",
    "completions/mean_length",
    "tbpo/dropped/total",
    "quant/code_flip_rate",
    "grad_norm",
)
BEHAVIOUR = (
    ("mismatch/abs_logp_mean", "mismatch, nats", 1, 2),
    ("entropy", "entropy, nats", 1, 2),
    ("rollout/error_token_share", "error tokens, %", 100, 2),
    ("completions/clipped_ratio", "cut at the limit, %", 100, 2),
    ("tbpo/dropped/total", "dropped, %", 100, 2),
)
# The last two are of `count_tails`.
MISMATCH = (
    ("mismatch/abs_logp_mean/negative", "nats, wrong answers", 1, 2),
    ("mismatch/abs_logp_mean/positive", "nats, right answers", 1, 2),
    ("mismatch/k1/positive", "signed, right answers", 1, 2),
    ("tail/high", "learner over e times the sampler, % of tokens", 100, 2),
    ("tail/low", "learner under 1/e, % of tokens", 100, 2),
)
# Of mixtures, from `routes.jsonl`.
ROUTES = (
    ("mismatch/abs_logp_mean", "mismatch, nats", 1, 2),
    ("routes/flipped", "flipped routes, %", 100, 2),
    ("routes/flipped_tokens", "tokens with a flipped route, %", 100, 2),
    ("routes/effective_experts", "experts in use, of 8", 1, 3),
)
UPDATES_PER_BATCH = 8
# Rewards in percent to which the way is measured, and the batches over which a course is smoothed.
LEVELS, SMOOTHED = (20, 25, 28), 5
# What is read of masters of several precisions, and what their warm start, the same for all, takes turns at.
BITS = (4, 3, 2)
# What a study takes from another, where it has no cell of its own with such settings.
BASES = {"age_400": ("length_400", "w4a16-g128-signed", "QaRL", ("tbpo", "grpo-tis"))}
Cell = dict[str, Any]
MEASURES: dict[str, Callable[[Cell], float]] = {
    "final reward": lambda cell: 100 * quarter(cell, "reward", 3),
    "greedy": lambda cell: cell["scores"]["greedy"],
    "sampled": lambda cell: cell["scores"]["sampled"],
}


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--bands", action="store_true")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fill", type=Path)
    args = parser.parse_args()
    if args.bands:
        for directory in args.paths:
            print(json.dumps(band_scale(directory)))
    elif args.collect:
        before = json.loads(args.output.read_text()) if args.output.is_file() else []
        found = [summary for directory in args.paths for summary in collect(directory)]
        renewed = [settings_of(cell) for cell in found]
        cells = [cell for cell in before if settings_of(cell) not in renewed] + found
        args.output.write_text("[\n" + ",\n".join(map(json.dumps, cells)) + "\n]\n")
    else:
        (path,) = args.paths
        cells = json.loads(path.read_text())
        if args.fill:
            args.fill.write_text(fill(args.fill.read_text(), cells))
        else:
            print("\n\n".join(f"### {study}: {kind}\n\n{table}" for (study, kind), table in tables(cells).items()))


def collect(directory: Path) -> list[Cell]:
    """Settings, held-out scores and course of each finished cell."""
    cells = []
    for path in sorted(directory.iterdir()):
        if not (path / "finished").is_file():
            continue
        run = read_run(path)
        steps = int(run.config["max_steps"])
        series = {metric: dict(run.values(metric)) for metric in METRICS} | count_tails(run.distributions)
        series |= read_routes(path / routes.ROUTES_FILE)
        course = {metric: average_batches(values, steps) for metric, values in series.items() if values}
        settings = json.loads((path / "cell.json").read_text())["cell"]
        scores = {name: 100 * score["correct"] / score["total"] for name, score in run.evaluation.items()}
        cells.append({"study": directory.name, **settings, "scores": scores, "course": course})
        if (path / places.PLACES_FILE).is_file():
            rows = [json.loads(line) for line in (path / places.PLACES_FILE).read_text().splitlines()]
            cells[-1]["places"] = places.add(rows)
    return cells


def settings_of(cell: Cell) -> Cell:
    """The study and the settings of a cell, without what came of it."""
    return {name: value for name, value in cell.items() if name not in ("scores", "course", "places")}


def read_routes(path: Path) -> dict[str, dict[int, float]]:
    """Flipped routes and the balance of the experts by update; nothing of a dense model."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    measures = {
        "routes/flipped": lambda row: row["flipped"],
        "routes/flipped_tokens": lambda row: row["flipped_tokens"],
        "routes/effective_experts": lambda row: routes.effective_experts(row["load"]),
    }
    return {name: {row["step"]: measure(row) for row in rows} for name, measure in measures.items()}


def average_batches(values: dict[int, float], steps: int) -> list[float | None]:
    """
    Means over the updates of each generation batch, to three digits; None where nothing was logged. In a study of
    smaller batches they are over as many updates, of several batches.
    """
    batches = []
    for first in range(1, steps + 1, UPDATES_PER_BATCH):
        batch = [values[step] for step in range(first, first + UPDATES_PER_BATCH) if step in values]
        batches.append(float(f"{statistics.fmean(batch):.3g}") if batch else None)
    return batches


def count_tails(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Shares of tokens that are over e times, and under 1/e, as probable to the learner as to the sampler, by
    update."""
    totals: dict[int, list[int]] = {}
    for row in rows:
        if row["name"] == "token_mismatch_weight":
            low = sum(count for count, edge in zip(row["counts"], row["edges"][1:], strict=False) if edge < 0.37)
            high = sum(count for count, edge in zip(row["counts"], row["edges"], strict=False) if edge > 2.71)
            total = totals.setdefault(row["step"], [0, 0, 0])
            totals[row["step"]] = [a + b for a, b in zip(total, (low, high, sum(row["counts"])), strict=True)]
    tails = {"tail/low": 0, "tail/high": 1}
    return {
        name: {step: total[place] / total[2] for step, total in totals.items() if total[2]}
        for name, place in tails.items()
    }


def group_cells(cells: Sequence[Cell]) -> dict[tuple[str, str, str, str], list[Cell]]:
    """Cells that differ by their seed alone, by study, scheme, kind (bf16, rollout-only, QaRL) and objective."""
    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        kind = "bf16" if cell["scheme"] == "bf16" else "QaRL" if cell["quantize_learner"] else "rollout-only"
        groups.setdefault((cell["study"], cell["scheme"], kind, cell["objective"]), []).append(cell)
    return groups


def tables(cells: Sequence[Cell]) -> dict[tuple[str, str], str]:
    """For each study what its groups end at, how they behaved, and how they differ, in Markdown."""
    found = {}
    for study in dict.fromkeys(cell["study"] for cell in cells):
        groups = {name[1:]: members for name, members in sorted(_with_base(group_cells(cells), study).items())}
        found[study, "ends"] = ends_table(groups)
        found[study, "behaviour"] = quarters_table(groups, BEHAVIOUR)
        found[study, "mismatch"] = quarters_table(groups, MISMATCH)
        found[study, "routes"] = quarters_table(groups, ROUTES)
        found[study, "bits"] = bits_table(groups)
        found[study, "places"] = places_table(groups)
        found[study, "differences"] = differences_table(groups)
        found[study, "changes"] = changes_table(groups)
        found[study, "reach"] = reach_table(groups)
    return {name: "\n".join(lines) for name, lines in found.items()}


def _with_base(
    groups: dict[tuple[str, str, str, str], list[Cell]], study: str
) -> dict[tuple[str, str, str, str], list[Cell]]:
    """The groups of a study, filled up with cells of what it is compared with."""
    own = {name: cells for name, cells in groups.items() if name[0] == study}
    base, scheme, kind, objectives = BASES.get(study, (study, "", "", ()))
    for objective in objectives:
        cells = own.get(name := (study, scheme, kind, objective), [])
        seeds = [cell["seed"] for cell in cells]
        others = [cell for cell in groups[base, scheme, kind, objective] if cell["seed"] not in seeds]
        own[name] = cells + others
    return own


def fill(page: str, cells: Sequence[Cell]) -> str:
    """`page` with its tables renewed: what is between `<!-- STUDY: KIND -->` and `<!-- end -->`."""
    for (study, kind), table in tables(cells).items():
        start = f"<!-- {study}: {kind} -->\n"
        before, found, rest = page.partition(start)
        if found:
            page = before + start + table + "\n" + rest[rest.index("<!-- end -->") :]
    return page


def ends_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """Final rewards and held-out scores in percent."""
    header = ["scheme", "run", "seeds", "final reward", "greedy", "sampled", "masters, greedy"]
    lines = [_row(header), _row(["---"] * len(header))]
    for (scheme, kind, objective), cells in groups.items():
        values = [[100 * quarter(cell, "reward", 3) for cell in cells]]
        for name in ("greedy", "sampled", "unquantized greedy"):
            values.append([cell["scores"][name] for cell in cells if name in cell["scores"]])
        lines.append(_row([scheme, f"{kind}, {objective}", str(len(cells)), *map(interval, values)]))
    schemes = {scheme for scheme, *_ in groups}
    for (_, kind, objective), cells in groups.items():
        # Of unquantized runs, what is left after quantizing their weights.
        names = dict.fromkeys(name for cell in cells for name in cell["scores"] if name.split()[0] in schemes)
        for name in names:
            scores = interval([cell["scores"][name] for cell in cells if name in cell["scores"]])
            run = f"{kind}, {objective}, quantized afterwards"
            lines.append(_row([name.split()[0], run, str(len(cells)), "-", scores, "-", "-"]))
    return lines


def quarters_table(
    groups: dict[tuple[str, str, str], list[Cell]], columns: Sequence[tuple[str, str, float, int]]
) -> list[str]:
    """Means over the seeds of what was measured in the first and in the last quarter of the updates."""
    header = ["scheme", "run", *(name for _, name, *_ in columns)]
    lines = [_row(header), _row(["---"] * len(header))]
    for (scheme, kind, objective), cells in groups.items():
        texts = []
        for metric, _, factor, digits in columns:
            means = [statistics.fmean(factor * quarter(cell, metric, part) for cell in cells) for part in (0, 3)]
            texts.append("-" if any(map(math.isnan, means)) else " to ".join(f"{mean:.{digits}g}" for mean in means))
        lines.append(_row([scheme, f"{kind}, {objective}", *texts]))
    return lines


def bits_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """What one set of masters scores when it is read at each number of bits, in percent; a row for each group that was
    so read."""
    header = ["recipe", "seeds", *(f"{bits} bits, {name}" for name in ("greedy", "sampled") for bits in BITS)]
    lines = [_row(header), _row(["---"] * len(header))]
    for (recipe, *_), cells in groups.items():
        if read_at_bits(cells, 4):
            scores = [read_at_bits(cells, bits, name) for name in ("greedy", "sampled") for bits in BITS]
            lines.append(_row([recipe, str(len(cells)), *map(interval, scores)]))
    return lines


def places_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """Where error tokens and mismatch are, added over the seeds, a row for each group in which that was counted."""
    header = ["scheme", "run", *places.COLUMNS]
    lines = [_row(header), _row(["---"] * len(header))]
    for (scheme, kind, objective), cells in groups.items():
        if counts := [cell["places"] for cell in cells if "places" in cell]:
            lines.append(_row([scheme, f"{kind}, {objective}", *places.describe(places.add(counts))]))
    return lines


def read_at_bits(cells: Sequence[Cell], bits: int, name: str = "greedy") -> list[float]:
    """Scores in percent of masters read at `bits` bits; none of cells with one precision."""
    return [cell["scores"][f"{bits} bits {name}"] for cell in cells if f"{bits} bits {name}" in cell["scores"]]


def differences_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """Greedy scores of runs of one scheme, and of bf16, pair by pair, beside the noise that `trl-qarl report` uses."""
    lines = [_row(["scheme", "run", "against", "difference", "noise", ""]), _row(["---"] * 6)]
    scores = {name: [MEASURES["greedy"](cell) for cell in cells] for name, cells in groups.items()}
    for scheme in dict.fromkeys(scheme for scheme, *_ in groups if scheme != "bf16"):
        for a, b in itertools.combinations([name for name in groups if name[0] in (scheme, "bf16")], 2):
            found = compare_groups(scores[a], scores[b])
            noise = "-" if found["noise"] is None else f"{found['noise']:.0f}"
            names = [", ".join(name[1:]) for name in (a, b)]
            lines.append(_row([scheme, *names, f"{found['difference']:+.0f}", noise, found["verdict"]]))
    return lines


def changes_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """What each change of a recipe, a scheme named `RECIPE-CHANGE`, gains in points, with each objective and, where
    all have the same number of runs, with all; bold where that exceeds the noise."""
    header = ["change", "runs", *(f"{name} (noise)" for name in MEASURES)]
    lines = [_row(header), _row(["---"] * len(header))]
    objectives = {objective for _, _, objective in groups}
    of_all: dict[str, list[tuple[list[Cell], list[Cell]]]] = {}
    for (scheme, *run), cells in groups.items():
        recipe, _, change = scheme.rpartition("-")
        before = groups.get((recipe, *run))
        if before is not None:
            name = f"{change}, {run[1]}" if len(objectives) > 1 else change
            lines.append(_row([name, str(len(cells)), *_gains(cells, before)]))
            of_all.setdefault(change, []).append((cells, before))
    for change, pairs in of_all.items():
        if len(pairs) == len(objectives) > 1 and len({len(cells) for pair in pairs for cells in pair}) == 1:
            cells, before = ([cell for members in of for cell in members] for of in zip(*pairs, strict=True))
            lines.append(_row([f"{change}, all", str(len(cells)), *_gains(cells, before)]))
    return lines


def _gains(cells: Sequence[Cell], before: Sequence[Cell]) -> list[str]:
    texts = []
    for measure in MEASURES.values():
        found = compare_groups(*([measure(cell) for cell in of] for of in (cells, before)))
        noise = "-" if found["noise"] is None else f"{found['noise']:.0f}"
        gain = f"{found['difference']:+.0f}"
        texts.append(f"{f'**{gain}**' if found['verdict'] == 'exceeds' else gain} ({noise})")
    return texts


def reach_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """After how many generation batches rollouts of earlier weights reach a reward, `SMOOTHED` batches and all seeds
    together, against those of age 0; and the shortest time in which a batch must be made for them to be as fast."""
    lines = [_row(["run", "age", *(f"batches to {share} %: age 0, this one (to break even)" for share in LEVELS)])]
    lines.append(_row(["---"] * (2 + len(LEVELS))))
    for (scheme, *run), cells in groups.items():
        recipe, _, age = scheme.rpartition("-age")
        if (recipe, *run) not in groups:
            continue
        texts = []
        for share in LEVELS:
            first, later = (batches_to(of, share / 100) for of in (groups[recipe, *run], cells))
            ratio = "-" if first is None or later is None else f"{later / first:.2f}"
            texts.append(f"{first or '-'}, {later or '-'} ({ratio})")
        lines.append(_row([run[1], age, *texts]))
    return lines


def smooth(courses: Sequence[Sequence[float]]) -> list[float]:
    """Means over the runs and the last `SMOOTHED` generation batches."""
    means = [statistics.fmean(values) for values in zip(*courses, strict=True)]
    return [statistics.fmean(means[max(0, last - SMOOTHED) : last]) for last in range(1, len(means) + 1)]


def batches_to(cells: Sequence[Cell], reward: float) -> int | None:
    """The first batch at which the smoothed reward is that high."""
    rewards = smooth([cell["course"]["reward"] for cell in cells])
    return next((number for number, value in enumerate(rewards, 1) if value >= reward), None)


def quarter(cell: Cell, metric: str, part: int) -> float:
    """Mean over the batches of a quarter of the run, NaN where nothing was logged."""
    course = cell["course"].get(metric, [])
    low, high = (round(len(course) * edge / 4) for edge in (part, part + 1))
    values = [value for value in course[low:high] if value is not None]
    return statistics.fmean(values) if values else math.nan


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean by Student's distribution, NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(sem(values) * t.ppf(0.975, len(values) - 1))


def interval(values: Sequence[float]) -> str:
    """
    Mean and half width of the 95 % interval of Student's distribution.

    >>> interval([50.0, 52.0, 54.0])
    '52 ± 5'
    >>> interval([50.0])
    '50'
    """
    if not values:
        return "-"
    width = half_width(values)
    return f"{statistics.fmean(values):.0f}" + ("" if math.isnan(width) else f" ± {width:.0f}")


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def band_scale(directory: Path) -> dict[str, float]:
    """
    The factor of the paper's offsets beyond which `CLIPPED_SHARE` of a run's sequence ratios lie, all its updates
    together; log-spaced bins of the ratio resolve it to a quarter of a decade, between whose edges it is interpolated.
    """
    rows = map(json.loads, (directory / DISTRIBUTIONS_FILE).read_text().splitlines())
    counts: dict[tuple[float, float], float] = {}
    for row in rows:
        if row["name"] == "ratio":
            edges = row["edges"]
            for low, high, count in zip(edges, edges[1:], row["counts"], strict=False):
                distances = sorted(round(abs(math.log(edge)), 9) for edge in (low, high))
                key = (distances[0], distances[1]) if (low < 1) == (high <= 1) else (0.0, distances[1])
                counts[key] = counts.get(key, 0) + count
    left = CLIPPED_SHARE * sum(counts.values())
    for (near, far), count in sorted(counts.items(), reverse=True):
        if count >= left:
            offset = far - (far - near) * left / count
            return {"offset": offset, "band_scale": offset / PAPER_OFFSET}
        left -= count
    raise ValueError(f"{directory} has no distribution of sequence ratios.")


if __name__ == "__main__":
    main()
