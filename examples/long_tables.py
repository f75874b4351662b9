"""
The tables of docs/study_long.md from the directories that `trl-qarl compare` has filled so far, finished cells only.

    python examples/long_tables.py outputs/long

prints Markdown: what each group of runs ends at, with 95 % intervals over its seeds, and what the telemetry saw.

    python examples/long_tables.py --bands DIR

prints the `--band_scale` that follows from a run that no band bounds, by the rule in docs/study_long.md.
"""

import json
import math
import statistics
from argparse import ArgumentParser
from pathlib import Path

from trl_qarl.study.runs import Run, read_run
from trl_qarl.study.statistics import STUDENT_95, Group, make_groups
from trl_qarl.telemetry.run_files import DISTRIBUTIONS_FILE


# GSPO's authors report that about 15 % of their tokens, which are whole sequences, are clipped.
CLIPPED_SHARE = 0.15
# Table 2 of the paper: the mean of the offsets of GSPO's band.
PAPER_OFFSET = 3.5e-4
BEHAVIOUR = (
    ("mismatch/abs_logp_mean", "mismatch, nats", 1, 4),
    ("entropy", "entropy, nats", 1, 4),
    ("rollout/error_token_share", "error tokens, %", 100, 3),
    ("rollout/repetition_share", "repetition, %", 100, 2),
    ("completions/clipped_ratio", "cut at the limit, %", 100, 2),
    ("tbpo/dropped/total", "dropped by TBPO, %", 100, 1),
)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--bands", action="store_true")
    args = parser.parse_args()
    if args.bands:
        for directory in args.directories:
            print(json.dumps(band_scale(directory)))
        return
    cells = [cell for directory in args.directories for cell in sorted(directory.iterdir())]
    groups = make_groups([read_run(cell) for cell in cells if (cell / "finished").is_file()])
    print("\n".join([*ends_table(groups), "", *behaviour_table(groups)]))


def ends_table(groups: list[Group]) -> list[str]:
    """Final rewards and held-out scores in percent."""
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in run.evaluation))
    lines = [f"| run | seeds | final reward | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for group in groups:
        values = [[100 * final_mean(run, "reward") for run in group.runs]]
        values += [[score for run in group.runs if (score := _solved(run, name)) is not None] for name in names]
        seeds = ", ".join(str(run.config["seed"]) for run in group.runs)
        lines.append(f"| {group.label} | {seeds} | {' | '.join(map(interval, values))} |")
    return lines


def behaviour_table(groups: list[Group]) -> list[str]:
    """Means over the seeds of what was measured in the first and in the last quarter of the updates."""
    lines = [f"| run | {' | '.join(name for _, name, *_ in BEHAVIOUR)} |", "|---" * (1 + len(BEHAVIOUR)) + "|"]
    for group in groups:
        texts = []
        for metric, _, factor, digits in BEHAVIOUR:
            quarters = [[factor * final_mean(run, metric, part) for run in group.runs] for part in (0, 3)]
            means = [statistics.fmean(values) for values in quarters]
            texts.append("-" if any(map(math.isnan, means)) else " to ".join(f"{mean:.{digits}g}" for mean in means))
        lines.append(f"| {group.label} | {' | '.join(texts)} |")
    return lines


def final_mean(run: Run, metric: str, quarter: int = 3) -> float:
    """Mean over the logged steps of a quarter of the run, NaN where nothing was logged."""
    low, high = (run.config["max_steps"] * part / 4 for part in (quarter, quarter + 1))
    values = [value for step, value in run.values(metric).items() if low < step <= high]
    return statistics.fmean(values) if values else math.nan


def interval(values: list[float]) -> str:
    """
    Mean and half width of the 95 % interval of Student's distribution.

    >>> interval([50.0, 52.0, 54.0])
    '52 ± 5'
    >>> interval([50.0])
    '50'
    """
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.0f}"
    width = STUDENT_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.0f} ± {width:.0f}"


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


def _solved(run: Run, name: str) -> float | None:
    score = run.evaluation.get(name)
    return None if score is None else 100 * score["correct"] / score["total"]


if __name__ == "__main__":
    main()
