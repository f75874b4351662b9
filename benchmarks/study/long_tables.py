r"""
Makes the tables of benchmarks/study/README.md from the finished cells of `trl-qarl compare`.

    python benchmarks/study/long_tables.py --collect outputs/long outputs/long_variants \
        --output benchmarks/study/study.json
    python benchmarks/study/long_tables.py benchmarks/study/study.json
    python benchmarks/study/long_tables.py benchmarks/study/study.json --fill benchmarks/study/README.md

The first command collects scores and telemetry of every cell into study.json and replaces cells with the same
settings, so the cells of a study can come from several machines or days. The second prints Markdown: means over the
seeds with 95 % intervals, telemetry, and differences with the noise between seeds. The third updates the tables of the
page.

    python benchmarks/study/long_tables.py --bands DIR

prints the `--band_scale` for a run without bands, by the rule in benchmarks/study/README.md.
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

from trl_qarl.study.runs import compare_groups, read_run
from trl_qarl.telemetry.run_files import DISTRIBUTIONS_FILE


sys.path.insert(0, str(Path(__file__).parent))

import places
import routes


# GSPO's authors report that about 15 % of their tokens are clipped, always whole sequences.
CLIPPED_SHARE = 0.15
# Table 2 of the paper: the mean of the offsets of GSPO's band.
PAPER_OFFSET = 3.5e-4
# Metrics kept for each generation batch, as means over its updates.
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
# The last two come from `count_tails`.
MISMATCH = (
    ("mismatch/abs_logp_mean/negative", "nats, wrong answers", 1, 2),
    ("mismatch/abs_logp_mean/positive", "nats, right answers", 1, 2),
    ("mismatch/k1/positive", "signed, right answers", 1, 2),
    ("tail/high", "learner over e times the sampler, % of tokens", 100, 2),
    ("tail/low", "learner under 1/e, % of tokens", 100, 2),
)
# From the `routes.jsonl` of mixtures.
ROUTES = (
    ("mismatch/abs_logp_mean", "mismatch, nats", 1, 2),
    ("routes/flipped", "flipped routes, %", 100, 2),
    ("routes/flipped_tokens", "tokens with a flipped route, %", 100, 2),
    ("routes/effective_experts", "experts in use, of 8", 1, 3),
)
UPDATES_PER_BATCH = 8
# Rewards in percent for `reach_table`, and the number of batches over which rewards are smoothed.
LEVELS, SMOOTHED = (20, 25, 28), 5
# Bits at which masters of several precisions are scored, and between which their common warm start alternates.
BITS = (4, 3, 2)
# Cells that a study takes from another one unless it has its own: base study, scheme, kind and objectives.
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
    """Return settings, held-out scores and the course of metrics for each finished cell."""
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
    """Return the study and the settings of a cell, without its results."""
    return {name: value for name, value in cell.items() if name not in ("scores", "course", "places")}


def read_routes(path: Path) -> dict[str, dict[int, float]]:
    """Return flipped routes and the balance of the experts by update; empty series for a dense model."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    measures = {
        "routes/flipped": lambda row: row["flipped"],
        "routes/flipped_tokens": lambda row: row["flipped_tokens"],
        "routes/effective_experts": lambda row: routes.effective_experts(row["load"]),
    }
    return {name: {row["step"]: measure(row) for row in rows} for name, measure in measures.items()}


def average_batches(values: dict[int, float], steps: int) -> list[float | None]:
    """
    Return means over the updates of each generation batch, to three digits; None where nothing was logged. Where a
    batch has fewer updates, means are over eight updates of several batches.
    """
    batches = []
    for first in range(1, steps + 1, UPDATES_PER_BATCH):
        batch = [values[step] for step in range(first, first + UPDATES_PER_BATCH) if step in values]
        batches.append(float(f"{statistics.fmean(batch):.3g}") if batch else None)
    return batches


def count_tails(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return by update the shares of tokens whose mismatch weight (learner to sampler) is above e and below 1/e."""
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
    """Group cells that only differ by seed, by study, scheme, kind (bf16, rollout-only, QaRL) and objective."""
    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        kind = "bf16" if cell["scheme"] == "bf16" else "QaRL" if cell["quantize_learner"] else "rollout-only"
        groups.setdefault((cell["study"], cell["scheme"], kind, cell["objective"]), []).append(cell)
    return groups


def tables(cells: Sequence[Cell]) -> dict[tuple[str, str], str]:
    """Return the Markdown tables of each study by study and kind of table."""
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
    """Return the groups of a study, with missing cells taken from its base study."""
    own = {name: cells for name, cells in groups.items() if name[0] == study}
    base, scheme, kind, objectives = BASES.get(study, (study, "", "", ()))
    for objective in objectives:
        cells = own.get(name := (study, scheme, kind, objective), [])
        seeds = [cell["seed"] for cell in cells]
        others = [cell for cell in groups[base, scheme, kind, objective] if cell["seed"] not in seeds]
        own[name] = cells + others
    return own


def fill(page: str, cells: Sequence[Cell]) -> str:
    """Return `page` with its tables, between `<!-- STUDY: KIND -->` and `<!-- end -->`, updated."""
    for (study, kind), table in tables(cells).items():
        start = f"<!-- {study}: {kind} -->\n"
        before, found, rest = page.partition(start)
        if found:
            page = before + start + table + "\n" + rest[rest.index("<!-- end -->") :]
    return page


def ends_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """Return a table of final rewards and held-out scores in percent."""
    header = ["scheme", "run", "seeds", "final reward", "greedy", "sampled", "masters, greedy"]
    lines = [_row(header), _row(["---"] * len(header))]
    for (scheme, kind, objective), cells in groups.items():
        values = [[100 * quarter(cell, "reward", 3) for cell in cells]]
        for name in ("greedy", "sampled", "unquantized greedy"):
            values.append([cell["scores"][name] for cell in cells if name in cell["scores"]])
        lines.append(_row([scheme, f"{kind}, {objective}", str(len(cells)), *map(interval, values)]))
    schemes = {scheme for scheme, *_ in groups}
    for (_, kind, objective), cells in groups.items():
        # Scores of bf16 runs after quantizing their weights.
        names = dict.fromkeys(name for cell in cells for name in cell["scores"] if name.split()[0] in schemes)
        for name in names:
            scores = interval([cell["scores"][name] for cell in cells if name in cell["scores"]])
            run = f"{kind}, {objective}, quantized afterwards"
            lines.append(_row([name.split()[0], run, str(len(cells)), "-", scores, "-", "-"]))
    return lines


def quarters_table(
    groups: dict[tuple[str, str, str], list[Cell]], columns: Sequence[tuple[str, str, float, int]]
) -> list[str]:
    """Return a table of telemetry in the first and in the last quarter of the updates, as means over the seeds."""
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
    """Return a table of scores in percent for one set of masters at each number of bits, for the groups that have
    them."""
    header = ["recipe", "seeds", *(f"{bits} bits, {name}" for name in ("greedy", "sampled") for bits in BITS)]
    lines = [_row(header), _row(["---"] * len(header))]
    for (recipe, *_), cells in groups.items():
        if read_at_bits(cells, 4):
            scores = [read_at_bits(cells, bits, name) for name in ("greedy", "sampled") for bits in BITS]
            lines.append(_row([recipe, str(len(cells)), *map(interval, scores)]))
    return lines


def places_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """Return a table of where error tokens and mismatch are, summed over the seeds, for the groups that count them."""
    header = ["scheme", "run", *places.COLUMNS]
    lines = [_row(header), _row(["---"] * len(header))]
    for (scheme, kind, objective), cells in groups.items():
        if counts := [cell["places"] for cell in cells if "places" in cell]:
            lines.append(_row([scheme, f"{kind}, {objective}", *places.describe(places.add(counts))]))
    return lines


def read_at_bits(cells: Sequence[Cell], bits: int, name: str = "greedy") -> list[float]:
    """Return scores in percent of masters at `bits` bits; none for cells with one precision."""
    return [cell["scores"][f"{bits} bits {name}"] for cell in cells if f"{bits} bits {name}" in cell["scores"]]


def differences_table(groups: dict[tuple[str, str, str], list[Cell]]) -> list[str]:
    """Return a table of pairwise differences of greedy scores, within a scheme and bf16, with the noise of `trl-qarl
    report`."""
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
    """Return a table of what each change of a recipe (a scheme named `RECIPE-CHANGE`) gains in points: for each
    objective and, where all have the same number of runs, for all together. Bold exceeds the noise."""
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
    """Return a table of the generation batches after which the reward, averaged over `SMOOTHED` batches and all seeds,
    reaches each of `LEVELS`: at age 0, at a later age, and their ratio, the speedup of a batch that breaks even."""
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
    """Return means over the runs and the last `SMOOTHED` generation batches."""
    means = [statistics.fmean(values) for values in zip(*courses, strict=True)]
    return [statistics.fmean(means[max(0, last - SMOOTHED) : last]) for last in range(1, len(means) + 1)]


def batches_to(cells: Sequence[Cell], reward: float) -> int | None:
    """Return the first batch whose smoothed reward reaches `reward`, or None."""
    rewards = smooth([cell["course"]["reward"] for cell in cells])
    return next((number for number, value in enumerate(rewards, 1) if value >= reward), None)


def quarter(cell: Cell, metric: str, part: int) -> float:
    """Return the mean over a quarter of the batches, `part` from 0 to 3; NaN where nothing was logged."""
    course = cell["course"].get(metric, [])
    low, high = (round(len(course) * edge / 4) for edge in (part, part + 1))
    values = [value for value in course[low:high] if value is not None]
    return statistics.fmean(values) if values else math.nan


def half_width(values: Sequence[float]) -> float:
    """Return the half width of the mean's 95 % interval by Student's distribution; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(sem(values) * t.ppf(0.975, len(values) - 1))


def interval(values: Sequence[float]) -> str:
    """
    Format the mean and the half width of its 95 % interval by Student's distribution.

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
    Return the factor of the paper's offsets beyond which `CLIPPED_SHARE` of a run's sequence ratios lie, over all its
    updates. The bins of the ratio are log-spaced, four per decade; the factor is interpolated between their edges.
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
