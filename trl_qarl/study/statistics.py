"""Groups of runs that differ by their seed alone, and differences between groups."""

import json
import math
import statistics
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from .names import choose_colors, name_parts
from .runs import Run


__all__ = ["STUDENT_95", "Group", "compare_groups", "flatten", "make_groups", "merge_histograms", "summarize"]

# Two-sided 95 % quantiles of Student's distribution with 1, 2, ... degrees of freedom. Beyond the table its last entry
# holds, which is larger than the true one, 1.96 in the limit.
STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass
class Group:
    """Runs that share everything but the seed, under a label and a colour that no other group of the report has."""

    label: str
    config: dict[str, Any]
    runs: list[Run]
    color: str = "blue"
    line: str = "-"

    @property
    def seeds(self) -> list[Any]:
        return list(dict.fromkeys(run.config.get("seed") for run in self.runs))

    @property
    def title(self) -> str:
        return f"{self.label} ({len(self.seeds)} seed{'s' * (len(self.seeds) != 1)})"


def make_groups(runs: list[Run]) -> list[Group]:
    """Group runs that share everything but the seed; labels name what the groups differ in."""
    groups: dict[str, Group] = {}
    for run in runs:
        config = {name: value for name, value in run.config.items() if name != "seed"}
        group = groups.setdefault(json.dumps(config, sort_keys=True), Group("", config, []))
        group.runs.append(run)
    ordered = list(groups.values())
    configs = [flatten(group.config) for group in ordered]
    names = list(dict.fromkeys(name for config in configs for name in config))
    parts = [name_parts(group.config) for group in ordered]
    quantized = {str(group.config.get("scheme")) for group in ordered} - {"bf16", "None"}
    for name in ("scheme",) * (len(quantized) > 1) + ("model",) * (len({c.get("model") for c in configs}) > 1):
        for part, config in zip(parts, configs, strict=True):
            value = config.get(name)
            if value is not None and value not in part and (name, value) != ("scheme", "bf16"):
                part.append(value)
    for group, config, part in zip(ordered, configs, parts, strict=True):
        rivals = [other for other, theirs in zip(configs, parts, strict=True) if theirs == part]
        differing = [name for name in names if len({other.get(name) for other in rivals}) > 1]
        extra = [f"{name}={config.get(name, 'not recorded')}" for name in differing]
        group.label = ", ".join(part + extra) or "runs"
    for group, (color, line) in zip(ordered, choose_colors(group.config for group in ordered), strict=True):
        group.color, group.line = color, line
    for group in ordered:
        seeds = [run.config.get("seed") for run in group.runs]
        for seed in dict.fromkeys(seeds):
            same = [run for run in group.runs if run.config.get("seed") == seed]
            if len(same) > 1:
                same[0].notes.append(
                    f"{', '.join(run.name for run in same)} share configuration and seed {seed}; they count as one "
                    "seed."
                )
    return ordered


def summarize(groups: list[Group], score: str | None = None) -> list[dict[str, Any]]:
    """
    Return the final reward of each group: the mean of `reward` over the logged steps in the last quarter. With
    `score`, the name of an evaluation, it is the share that was solved.

    The last quarter ends at the largest step that any run with the same `max_steps` has reached, so runs that ended
    before it have no final reward.

    Returns:
        Per group `{"by_run": {name: float or None}, "by_seed": {seed: float}, "mean", "sd", "min", "max"}`. `sd` is
        the sample standard deviation over seeds, `None` for one seed; all are `None` without a final reward.
    """
    horizons: dict[Any, int] = {}
    for group in groups:
        for run in group.runs:
            max_steps = group.config.get("max_steps")
            horizons[max_steps] = max(horizons.get(max_steps, 0), run.last_step)
    summaries = []
    for group in groups:
        start = 0.75 * horizons[group.config.get("max_steps")]
        by_run = {}
        by_seed: dict[Any, list[float]] = {}
        for run in group.runs:
            if score is None:
                rewards = [value for step, value in run.values("reward").items() if step > start]
                final = statistics.fmean(rewards) if rewards else None
            else:
                solved = run.evaluation.get(score)
                final = solved["correct"] / solved["total"] if solved else None
            by_run[run.name] = final
            if final is not None:
                by_seed.setdefault(run.config.get("seed"), []).append(final)
        seeds = {seed: statistics.fmean(values) for seed, values in by_seed.items()}
        finals = list(seeds.values())
        summaries.append(
            {
                "by_run": by_run,
                "by_seed": seeds,
                "mean": statistics.fmean(finals) if finals else None,
                "sd": statistics.stdev(finals) if len(finals) > 1 else None,
                "min": min(finals, default=None),
                "max": max(finals, default=None),
            }
        )
    return summaries


def compare_groups(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """
    Say whether the final rewards of two groups differ by more than the noise between seeds: Student's test at 5 %,
    `|m_a - m_b| > t s sqrt(1 / n_a + 1 / n_b)` with the pooled standard deviation `s` over seeds.

    Args:
        a, b (`dict`):
            Two of [`summarize`].

    Returns:
        `{"difference": m_a - m_b or None, "noise": the right side or None, "verdict"}`, the verdict being `"exceeds"`,
        `"within"`, or `"unknown"` where a group has fewer than two seeds with a final reward.
    """
    if a["mean"] is None or b["mean"] is None:
        return {"difference": None, "noise": None, "verdict": "unknown"}
    difference = a["mean"] - b["mean"]
    if a["sd"] is None or b["sd"] is None:
        return {"difference": difference, "noise": None, "verdict": "unknown"}
    num_a, num_b = len(a["by_seed"]), len(b["by_seed"])
    freedom = num_a + num_b - 2
    pooled = math.sqrt(((num_a - 1) * a["sd"] ** 2 + (num_b - 1) * b["sd"] ** 2) / freedom)
    quantile = STUDENT_95[min(freedom, len(STUDENT_95)) - 1]
    noise = quantile * pooled * math.sqrt(1 / num_a + 1 / num_b)
    return {"difference": difference, "noise": noise, "verdict": "exceeds" if abs(difference) > noise else "within"}


def merge_histograms(rows: list[dict[str, Any]], max_bins: int = 200) -> tuple[list[float], list[float]]:
    """
    Add histograms up: edges and counts.

    Histograms with other edges than the first one's are redistributed as if each bin were uniform, over `max_bins`
    equal bins that cover all of them.

    Args:
        rows (`list[dict]`):
            Rows of `distributions.jsonl`, `{"edges", "counts"}`.
        max_bins (`int`, *optional*, defaults to `200`):
            Number of bins where edges differ.
    """
    sums: dict[tuple[float, ...], list[float]] = {}
    for row in rows:
        edges = tuple(row["edges"])
        sums[edges] = [a + b for a, b in zip(sums.get(edges, [0.0] * len(row["counts"])), row["counts"], strict=True)]
    edges, counts = next(iter(sums.items()))
    if len(sums) == 1:
        return list(edges), counts
    filled = [_trim(list(edges), counts) for edges, counts in sums.items() if sum(counts)]
    if not filled:
        return list(edges), counts
    low, high = min(edges[0] for edges, _ in filled), max(edges[-1] for edges, _ in filled)
    edges = [low + (high - low) * index / max_bins for index in range(max_bins)] + [high]
    merged = [0.0] * max_bins
    for row_edges, row_counts in filled:
        cumulative = [_cumulative(row_edges, row_counts, edge) for edge in edges]
        for index in range(max_bins):
            merged[index] += cumulative[index + 1] - cumulative[index]
    return edges, merged


def _trim(edges: list[float], counts: list[float]) -> tuple[list[float], list[float]]:
    """Leave out the empty bins on either side."""
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return edges, counts
    return edges[filled[0] : filled[-1] + 2], counts[filled[0] : filled[-1] + 1]


def _cumulative(edges: list[float], counts: list[float], x: float) -> float:
    """Return the counts below `x`."""
    if x >= edges[-1]:
        return float(sum(counts))
    index = bisect_right(edges, x) - 1
    if index < 0:
        return 0.0
    return sum(counts[:index]) + counts[index] * (x - edges[index]) / (edges[index + 1] - edges[index])


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by dotted name, as text."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat
