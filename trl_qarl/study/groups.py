"""Groups of runs that differ only by their seed: their names, colors and differences."""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..objectives.registry import OBJECTIVES
from .runs import Run


__all__ = [
    "COLORS",
    "EVERY_BATCH",
    "Group",
    "compare_groups",
    "count_of",
    "describe_differences",
    "differing_settings",
    "find_gaps",
    "find_holes",
    "format_number",
    "label_parts",
    "make_groups",
    "student_95",
]

# Metrics logged at equal distances; others are left out of a row if there is nothing to count.
EVERY_BATCH = ("reward", "entropy", "mismatch/abs_logp_mean")

COLORS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "grey": "#767676",
    "sky": "#56b4e9",
    "vermillion": "#d55e00",
    "ink": "#1a1a1a",
    "green": "#009e73",
    "pink": "#cc79a7",
    "purple": "#6a51a3",
    "brown": "#8c6d31",
    "teal": "#1b7f8c",
}
"""
Mostly Okabe and Ito's. The first three are TBPO's, those of a quantized learner, of only a quantized rollout and of
none; the next three are GRPO's, and the others share the rest.
"""

_KINDS = ("QaRL", "rollout-only", "bf16")
_WORDS = ("positive", "only", "on", "policy", "dual", "clip")
_UNQUANTIZED = ("bf16", "-", None)


@dataclass
class Group:
    """
    Runs that share everything but the seed, under a label and a color that no other group of the report has.
    `settings` is `config` as text by dotted name, `-` for what is not set.
    """

    config: dict[str, Any]
    settings: dict[str, str]
    runs: list[Run] = field(default_factory=list)
    label: str = ""
    color: str = COLORS["blue"]
    line: str = "-"
    last_step: int = 0

    @property
    def seeds(self) -> list[Any]:
        return list(dict.fromkeys(run.config.get("seed") for run in self.runs))

    @property
    def title(self) -> str:
        return f"{self.label} ({count_of(len(self.seeds), 'seed')})"

    def result(self, run: Run, score: str | None = None) -> float | None:
        """
        Return the final reward of a run: the mean of `reward` over the logged steps in the last quarter before
        `last_step`, the largest that any run of the report with the same `max_steps` has reached; `None` of a run that
        ended before. With `score`, the name of an evaluation, it is the share that was solved.
        """
        if score is not None:
            solved = run.evaluation.get(score)
            return solved["correct"] / solved["total"] if solved else None
        rewards = [value for step, value in run.values("reward").items() if step > 0.75 * self.last_step]
        return statistics.fmean(rewards) if rewards else None

    def results(self, score: str | None = None) -> list[float]:
        """Return the results of each seed: runs of one seed count once."""
        found: dict[Any, list[float]] = {}
        for run in self.runs:
            if (result := self.result(run, score)) is not None:
                found.setdefault(run.config.get("seed"), []).append(result)
        return [statistics.fmean(values) for values in found.values()]


def label_parts(config: Mapping[str, Any]) -> list[str]:
    """Return what a run is called, from the settings that it has of `quantize_learner`, `objective`, `scheme` and
    `lora_mode`, such as `["rollout-only", "tbpo", "w4a16"]` or `["bf16", "grpo", "lora_merged"]`."""
    is_bf16 = config.get("scheme") == "bf16"
    learner = None if "quantize_learner" not in config else "QaRL" if config["quantize_learner"] else "rollout-only"
    scheme, lora = None if is_bf16 else config.get("scheme"), config.get("lora_mode")
    parts = ["bf16" if is_bf16 else learner, config.get("objective"), scheme, lora and f"lora_{lora}"]
    return [str(part) for part in parts if part is not None]


def _name_parts(config: Mapping[str, Any]) -> list[str]:
    """Return the same for readers, with a quantized scheme only where the others say nothing."""
    objective, lora = str(config.get("objective")), config.get("lora_mode")
    words = "-".join(word if word in _WORDS else word.upper() for word in objective.split("-"))
    names = {objective: words, f"lora_{lora}": "LoRA" if lora == "adapter" else f"{lora} LoRA"}
    parts = label_parts({name: value for name, value in config.items() if name != "scheme" or value == "bf16"})
    return [names.get(part, part) for part in parts] or label_parts(config)


def _choose_colors(groups: list[Group]) -> None:
    """Give each setting its own color, always the same one. Of several groups with it, only the first keeps it: others
    take the colors that are free, and further line styles when none is left."""
    order = [name for name in dict.fromkeys(["tbpo", "grpo", *OBJECTIVES]) if name != "grpo-tis"]
    wanted = []
    for group in groups:
        objective = str(group.config.get("objective", "tbpo")).replace("grpo-tis", "grpo")
        kind = next((part for part in label_parts(group.config) if part in _KINDS), "QaRL")
        place = 3 * [*order, objective].index(objective) + _KINDS.index(kind)
        wanted.append([*COLORS.values()][place if place < 6 else 6 + place % 5])
    free = [color for color in [*COLORS.values()][6:] + [*COLORS.values()] if color not in wanted]
    used: list[str] = []
    for group, color in zip(groups, wanted, strict=True):
        group.color = free.pop(0) if color in used and free else color
        group.line = ("-", "--", "-.", ":")[used.count(group.color) % 4]
        used.append(group.color)


def make_groups(runs: list[Run]) -> list[Group]:
    """Group runs that share everything but the seed; labels name what the groups differ in."""
    found: dict[str, Group] = {}
    for run in runs:
        config = {name: value for name, value in run.config.items() if name != "seed"}
        found.setdefault(json.dumps(config, sort_keys=True), Group(config, _flatten(config))).runs.append(run)
    groups = list(found.values())
    parts = [_name_parts(group.config) for group in groups]
    for name in ("scheme", "model"):
        values = [group.settings.get(name) for group in groups]
        if len({*values} - {*_UNQUANTIZED}) > 1:
            for part, value in zip(parts, values, strict=True):
                part += [] if value in (*_UNQUANTIZED, *part) else [value]
    _choose_colors(groups)
    for group, part in zip(groups, parts, strict=True):
        names = differing_settings([other for other, theirs in zip(groups, parts, strict=True) if theirs == part])
        named = (f"{name}={group.settings.get(name, 'not recorded')}" for name in names)
        group.label = ", ".join([*part, *named]) or "runs"
        max_steps = group.config.get("max_steps")
        group.last_step = max(run.last_step for run in runs if run.config.get("max_steps") == max_steps)
        for seed in group.seeds:
            same = [run for run in group.runs if run.config.get("seed") == seed]
            if len(same) > 1:
                names = ", ".join(run.name for run in same)
                same[0].notes.append(f"{names} share configuration and seed {seed}; they count as one seed.")
    return groups


def differing_settings(groups: Iterable[Group]) -> list[str]:
    """Return the names of the settings in which groups differ."""
    settings = [group.settings for group in groups]
    names = dict.fromkeys(name for of in settings for name in of)
    return [name for name in names if len({of.get(name) for of in settings}) > 1]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            texts = map(str, value if isinstance(value, list) else [value])
            flat[prefix + name] = "-" if value is None else ", ".join(texts)
    return flat


def student_95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def compare_groups(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """
    Return the difference of two groups, of one result for each seed, the noise between seeds that it is held against,
    `t s sqrt(1 / n_a + 1 / n_b)` of Student's test at 5 % with the pooled standard deviation `s`, and the verdict:
    `"exceeds"`, `"within"`, or `"unknown"` where a group has fewer than two seeds.
    """
    difference = statistics.fmean(a) - statistics.fmean(b) if a and b else None
    if difference is None or min(len(a), len(b)) < 2:
        return {"difference": difference, "noise": None, "verdict": "unknown"}
    freedom = len(a) + len(b) - 2
    pooled = sum((len(values) - 1) * statistics.variance(values) for values in (a, b)) / freedom
    noise = student_95(freedom) * math.sqrt(pooled * (1 / len(a) + 1 / len(b)))
    return {"difference": difference, "noise": noise, "verdict": "exceeds" if abs(difference) > noise else "within"}


def describe_differences(groups: list[Group], score: str | None = None) -> dict[str, list[str]]:
    """
    Return one sentence per pair of groups that train the same model for the same reward, about their final rewards or
    their evaluation `score`, by the verdicts of [`compare_groups`]; pairs that differ in the fewest settings come
    first, then larger differences.
    """
    what, ends = ("final reward", "ends at") if score is None else (f"{score} score", f"has a {score} score of")
    found: dict[str, list[tuple[int, float, str]]] = {"exceeds": [], "within": [], "unknown": []}
    results = {group.label: group.results(score) for group in groups}
    for a, b in itertools.combinations(groups, 2):
        if any(a.config.get(name) != b.config.get(name) for name in ("model", "reward_funcs")):
            continue
        judged = compare_groups(results[a.label], results[b.label])
        difference, noise = judged["difference"], format_number(judged["noise"])
        if difference is None:
            without = " and ".join(group.label for group in (a, b) if not results[group.label])
            sentence = f"{a.label} and {b.label}: no {what} of {without}."
        else:
            high, low = (group.label for group in ((a, b) if difference >= 0 else (b, a)))
            means = {label: format_number(statistics.fmean(results[label])) for label in (high, low)}
            size, single = format_number(abs(difference)), [label for label in means if len(results[label]) == 1]
            sentence = (
                f"{high} {ends} {means[high]}, {low} {ends.split()[-1]} {means[low]}: "
                + {
                    "exceeds": f"the difference of {size} exceeds the seed noise of {noise}.",
                    "within": f"the difference of {size} does not exceed the seed noise of {noise}.",
                    "unknown": f"the seed noise of this difference of {size} cannot be judged, with one seed of "
                    f"{' and of '.join(single)}.",
                }[judged["verdict"]]
            )
        distance = sum(a.config.get(name) != b.config.get(name) for name in a.config.keys() | b.config.keys())
        found[judged["verdict"]].append((distance, -abs(difference or 0.0), sentence))
    return {verdict: [text for *_, text in sorted(lines)] for verdict, lines in found.items()}


def find_holes(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Return neighbours among increasing `steps` that lie further apart than most of them do, such as `(9, 31)` among
    1, 3, ..., 9, 31, ... Fewer than three steps have no usual distance."""
    pairs = list(itertools.pairwise(steps))
    usual = statistics.mode(sorted(b - a for a, b in pairs)) if len(pairs) > 1 else math.inf
    return [(a, b) for a, b in pairs if b - a > usual]


def find_gaps(run: Run) -> list[str]:
    """
    Return sentences about values that are not finite, about updates that changed nothing, and about values that are
    missing between others of the run. Metrics with the same gaps share a sentence. The first update has no code flips,
    as there is nothing to compare with or the learning rate starts at 0; a mismatch of 0 is what exact numerics
    promise.
    """
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    holes: dict[tuple[int, int], list[str]] = {}
    for metric in dict.fromkeys(metric for row in run.rows.values() for metric in row):
        steps = [step for step, row in run.rows.items() if metric in row]
        for hole in find_holes(steps) if metric in EVERY_BATCH else ():
            holes.setdefault(hole, []).append(metric)
        is_change = metric in ("quant/code_flip_rate", "quant/update_to_step")
        values = {step: run.rows[step][metric] for step in steps if not (is_change and step == min(run.rows))}
        gaps = tuple(step for step, value in values.items() if value is None)
        zeros = tuple(step for step, value in values.items() if is_change and value is not None and value <= 0)
        for problem, those in (("not finite", gaps), ("0", zeros)):
            if those:
                found.setdefault((problem, those), []).append(metric)
    return [
        f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} {problem} at {count_of(len(steps), 'step')}: "
        f"{_ranges(steps, list(run.rows))}."
        for (problem, steps), metrics in found.items()
    ] + [f"{', '.join(metrics)}: nothing logged between steps {a} and {b}." for (a, b), metrics in holes.items()]


def _ranges(steps: Sequence[int], logged: list[int]) -> str:
    """Write steps as ranges of neighbours among those that were logged, at most ten of them."""
    texts, places = [], {step: place for place, step in enumerate(logged)}
    for _, part in itertools.groupby(enumerate(steps), lambda pair: places[pair[1]] - pair[0]):
        first, *_, last = [step for _, step in part] * 2
        texts.append(str(first) if first == last else f"{first} to {last}")
    return ", ".join(texts[:10]) + (" and more" if len(texts) > 10 else "")


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
