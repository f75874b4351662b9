"""What the page says in words: differences between groups, and what is wrong with a run's files."""

import itertools

from .figures import LOGARITHMIC
from .runs import EVERY_BATCH, Run, find_holes
from .statistics import Group, compare_groups, summarize


__all__ = ["RULE", "count_of", "describe_differences", "find_gaps", "format_number"]

RULE = (
    "The final reward of a run is the mean of its logged rewards in the last quarter of the updates; a run that ended "
    "before has none. A difference between two groups exceeds the seed noise if it is larger than "
    "t s sqrt(1/n + 1/m): n and m are the numbers of seeds, s is the pooled standard deviation of the final rewards "
    "over seeds, and t is the two-sided 95 % quantile of Student's distribution with n + m - 2 degrees of freedom. Of "
    "twenty pairs that do not differ, about one exceeds it by chance."
)


def describe_differences(groups: list[Group], score: str | None = None) -> dict[str, list[str]]:
    """
    Return one sentence per pair of groups that train the same model for the same reward, about their final rewards or
    their evaluation `score`. The sentences come under `"exceeds"`, `"within"` and `"unknown"` as [`compare_groups`]
    judges them, pairs that differ in the fewest settings first, then larger differences.
    """
    what, ends_at = ("final reward", "ends at") if score is None else (f"{score} score", f"has a {score} score of")
    summaries = summarize(groups, score)
    found: dict[str, list[tuple[int, float, str]]] = {"exceeds": [], "within": [], "unknown": []}
    for (a, summary_a), (b, summary_b) in itertools.combinations(zip(groups, summaries, strict=True), 2):
        if any(a.config.get(name) != b.config.get(name) for name in ("model", "reward_funcs")):
            continue
        result = compare_groups(summary_a, summary_b)
        distance = sum(a.config.get(name) != b.config.get(name) for name in a.config.keys() | b.config.keys())
        if result["difference"] is None:
            without = [group.label for group, summary in ((a, summary_a), (b, summary_b)) if summary["mean"] is None]
            sentence = f"{a.label} and {b.label}: no {what} of {' and '.join(without)}."
            found["unknown"].append((distance, 0.0, sentence))
            continue
        if result["difference"] < 0:
            (a, summary_a), (b, summary_b) = (b, summary_b), (a, summary_a)
        size = abs(result["difference"])
        sentence = (
            f"{a.label} {ends_at} {format_number(summary_a['mean'])}, "
            f"{b.label} {ends_at.split()[-1]} {format_number(summary_b['mean'])}: "
        )
        if result["verdict"] == "unknown":
            single = [group.label for group, summary in ((a, summary_a), (b, summary_b)) if summary["sd"] is None]
            sentence += (
                f"the seed noise of this difference of {format_number(size)} cannot be judged, with one seed of "
                f"{' and of '.join(single)}."
            )
        else:
            relation = "exceeds" if result["verdict"] == "exceeds" else "does not exceed"
            sentence += f"the difference of {format_number(size)} {relation} the seed noise of {format_number(result['noise'])}."
        found[result["verdict"]].append((distance, -size, sentence))
    return {verdict: [text for *_, text in sorted(lines)] for verdict, lines in found.items()}


def find_gaps(run: Run) -> list[str]:
    """
    Return sentences about values that are not finite, or not positive where an axis is logarithmic, or missing between
    others of the run. Metrics with the same gaps share a sentence. The first update has no code flips: there is
    nothing to compare with.
    """
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for metric in dict.fromkeys(metric for row in run.rows.values() for metric in row):
        gaps = [step for step in run.gaps(metric) if (metric, step) != ("quant/code_flip_rate", min(run.rows))]
        zeros = [step for step, value in run.values(metric).items() if value <= 0] if metric in LOGARITHMIC else []
        for steps, problem in ((gaps, "not finite"), (zeros, "0 or below")):
            if steps:
                found.setdefault((problem, tuple(steps)), []).append(metric)
    holes: dict[tuple[int, int], list[str]] = {}
    for metric in EVERY_BATCH:
        for hole in find_holes(sorted(run.values(metric).keys() | set(run.gaps(metric)))):
            holes.setdefault(hole, []).append(metric)
    return [
        f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} {problem} at {count_of(len(steps), 'step')}: "
        f"{_ranges(list(steps), list(run.rows))}."
        for (problem, steps), metrics in found.items()
    ] + [f"{', '.join(metrics)}: nothing logged between steps {a} and {b}." for (a, b), metrics in holes.items()]


def _ranges(steps: list[int], logged: list[int]) -> str:
    """Write steps as ranges of neighbours among those that were logged, at most ten of them."""
    position = {step: index for index, step in enumerate(logged)}
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and position[step] == position[ranges[-1][-1]] + 1:
            ranges[-1].append(step)
        else:
            ranges.append([step])
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in ranges]
    return ", ".join(texts[:10]) + (" and more" if len(texts) > 10 else "")


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
