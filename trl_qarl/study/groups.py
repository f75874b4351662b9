"""Groups of runs that differ only by their seed: their names, colors and differences."""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..objectives.registry import OBJECTIVES
from .runs import Run


__all__ = [
    "COLORS",
    "EVERY_BATCH",
    "Group",
    "choose_colors",
    "compare_groups",
    "count_of",
    "describe_differences",
    "find_gaps",
    "find_holes",
    "flatten",
    "format_number",
    "label_parts",
    "make_groups",
    "name_parts",
    "setting_color",
    "student_95",
]

# Metrics logged at equal distances; others are left out of a row if there is nothing to count.
EVERY_BATCH = ("reward", "entropy", "mismatch/abs_logp_mean")

COLORS = {
    "blue": ("#0072b2", "#4aa8e0"),
    "orange": ("#e69f00", "#f0b840"),
    "grey": ("#767676", "#a0a0a0"),
    "sky": ("#56b4e9", "#9ad7f7"),
    "vermillion": ("#d55e00", "#f08a45"),
    "ink": ("#1a1a1a", "#e8e8e8"),
    "green": ("#009e73", "#2fc79b"),
    "pink": ("#cc79a7", "#e39cc3"),
    "purple": ("#6a51a3", "#a893d9"),
    "brown": ("#8c6d31", "#c4a25d"),
    "teal": ("#1b7f8c", "#52b9c6"),
}
"""
On a light and on a dark page, mostly Okabe and Ito's. The first three are TBPO's, those of a quantized learner, of a
quantized rollout alone and of none; the next three are GRPO's, and the others share the rest.
"""

_KINDS = ("QaRL", "rollout-only", "bf16")
_WORDS = ("positive", "only", "on", "policy", "dual", "clip")


@dataclass
class Group:
    """Runs that share everything but the seed, under a label and a colour that no other group of the report has."""

    label: str
    config: dict[str, Any]
    runs: list[Run]
    color: str = "blue"
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
    """
    Return what a run is called, from the settings that it has of `quantize_learner`, `objective`, `scheme` and
    `lora_mode`.

    Example:

    ```python
    >>> label_parts({"quantize_learner": False, "objective": "tbpo", "scheme": "w4a16"})
    ['rollout-only', 'tbpo', 'w4a16']
    >>> label_parts({"quantize_learner": True, "objective": "grpo", "scheme": "bf16"})
    ['bf16', 'grpo']
    >>> label_parts({"objective": "tbpo", "scheme": "w4a16", "lora_mode": "merged"})
    ['tbpo', 'w4a16', 'lora_merged']
    ```
    """
    is_quantized = config.get("scheme") != "bf16"
    learner = ["QaRL" if config["quantize_learner"] else "rollout-only"] if "quantize_learner" in config else []
    objective = [str(config["objective"])] if "objective" in config else []
    scheme = [str(config["scheme"])] if "scheme" in config and is_quantized else []
    lora = [f"lora_{config['lora_mode']}"] if "lora_mode" in config else []
    return [*(learner if is_quantized else ["bf16"]), *objective, *scheme, *lora]


def name_parts(config: Mapping[str, Any]) -> list[str]:
    """
    Return what a setting is called, from those of `quantize_learner`, `objective`, `scheme` and `lora_mode` that it
    has.

    The scheme of a quantized run is named only where the others say nothing: a report adds it where schemes differ.

    Example:

    ```python
    >>> name_parts({"quantize_learner": False, "objective": "grpo-tis", "scheme": "w4a16"})
    ['rollout-only', 'GRPO-TIS']
    >>> name_parts({"quantize_learner": True, "objective": "tbpo", "scheme": "bf16"})
    ['bf16', 'TBPO']
    ```
    """
    parts = label_parts({name: value for name, value in config.items() if name != "scheme" or value == "bf16"})
    words = str(config.get("objective")).split("-")
    names = {
        config.get("objective"): "-".join(word if word in _WORDS else word.upper() for word in words),
        f"lora_{config.get('lora_mode')}": "LoRA"
        if config.get("lora_mode") == "adapter"
        else f"{config.get('lora_mode')} LoRA",
    }
    return [names.get(part, part) for part in parts] or label_parts(config)


def setting_color(config: Mapping[str, Any]) -> str:
    """Return the key of [`COLORS`] for a setting, always the same one."""
    objective = str(config.get("objective", "tbpo")).replace("grpo-tis", "grpo")
    others = [name for name in OBJECTIVES if name not in ("tbpo", "grpo", "grpo-tis")]
    position = ["tbpo", "grpo", *others, objective].index(objective)
    kind = next((part for part in label_parts(config) if part in _KINDS), "QaRL")
    place = 3 * position + _KINDS.index(kind)
    return list(COLORS)[place if place < 6 else 6 + place % 5]


def choose_colors(configs: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """
    Choose colour and line style of each setting of a report: the first with a colour keeps it, others of the same name
    take the colours that are free, and further line styles when none is left.
    """
    wanted = [setting_color(config) for config in configs]
    free = [color for color in [*list(COLORS)[6:], *COLORS] if color not in wanted]
    chosen: list[tuple[str, str]] = []
    for color in wanted:
        if (color, "-") in chosen and free:
            color = free.pop(0)
        chosen.append((color, ("-", "--", "-.", ":")[sum(used == color for used, _ in chosen) % 4]))
    return chosen


def make_groups(runs: list[Run]) -> list[Group]:
    """Group runs that share everything but the seed; labels name what the groups differ in."""
    found: dict[str, Group] = {}
    for run in runs:
        config = {name: value for name, value in run.config.items() if name != "seed"}
        found.setdefault(json.dumps(config, sort_keys=True), Group("", config, [])).runs.append(run)
    groups = list(found.values())
    configs = [flatten(group.config) for group in groups]
    names = list(dict.fromkeys(name for config in configs for name in config))
    parts = [name_parts(group.config) for group in groups]
    for name in ("scheme", "model"):
        values = [config.get(name) for config in configs]
        if len(set(values) - {"bf16", "-", None}) > 1:
            for part, value in zip(parts, values, strict=True):
                part += [] if value in (None, "-", "bf16", *part) else [value]
    ends: dict[Any, int] = {}
    for run in runs:
        ends[run.config.get("max_steps")] = max(ends.get(run.config.get("max_steps"), 0), run.last_step)
    colors = choose_colors(group.config for group in groups)
    for group, config, part, (group.color, group.line) in zip(groups, configs, parts, colors, strict=True):
        rivals = [other for other, theirs in zip(configs, parts, strict=True) if theirs == part]
        differing = [name for name in names if len({other.get(name) for other in rivals}) > 1]
        group.label = (
            ", ".join([*part, *(f"{name}={config.get(name, 'not recorded')}" for name in differing)]) or "runs"
        )
        group.last_step = ends[group.config.get("max_steps")]
        for seed in group.seeds:
            same = [run for run in group.runs if run.config.get("seed") == seed]
            if len(same) > 1:
                same[0].notes.append(
                    f"{', '.join(run.name for run in same)} share configuration and seed {seed}; they count as one seed."
                )
    return groups


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by dotted name, as text; `-` for what is not set."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
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
    Say whether two groups differ by more than the noise between seeds: Student's test at 5 %,
    `|m_a - m_b| > t s sqrt(1 / n_a + 1 / n_b)` with the pooled standard deviation `s` over seeds.

    Args:
        a, b (`Sequence[float]`):
            One result for each seed.

    Returns:
        `{"difference": m_a - m_b or None, "noise": the right side or None, "verdict"}`, the verdict being `"exceeds"`,
        `"within"`, or `"unknown"` where a group has fewer than two seeds.
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
    their evaluation `score`. The sentences come under `"exceeds"`, `"within"` and `"unknown"` as [`compare_groups`]
    judges them, pairs that differ in the fewest settings first, then larger differences.
    """
    what, ends_at = ("final reward", "ends at") if score is None else (f"{score} score", f"has a {score} score of")
    found: dict[str, list[tuple[int, float, str]]] = {"exceeds": [], "within": [], "unknown": []}
    results = {group.label: group.results(score) for group in groups}
    for a, b in itertools.combinations(groups, 2):
        if any(a.config.get(name) != b.config.get(name) for name in ("model", "reward_funcs")):
            continue
        judged = compare_groups(results[a.label], results[b.label])
        difference, noise, verdict = judged["difference"], format_number(judged["noise"]), judged["verdict"]
        if difference is None:
            without = " and ".join(group.label for group in (a, b) if not results[group.label])
            sentence = f"{a.label} and {b.label}: no {what} of {without}."
        else:
            high, low = (a, b) if difference >= 0 else (b, a)
            means = [format_number(statistics.fmean(results[group.label])) for group in (high, low)]
            size = format_number(abs(difference))
            sentence = f"{high.label} {ends_at} {means[0]}, {low.label} {ends_at.split()[-1]} {means[1]}: "
            sentence += {
                "exceeds": f"the difference of {size} exceeds the seed noise of {noise}.",
                "within": f"the difference of {size} does not exceed the seed noise of {noise}.",
                "unknown": f"the seed noise of this difference of {size} cannot be judged, with one seed of "
                f"{' and of '.join(group.label for group in (high, low) if len(results[group.label]) == 1)}.",
            }[verdict]
        distance = sum(a.config.get(name) != b.config.get(name) for name in a.config.keys() | b.config.keys())
        found[verdict].append((distance, -abs(difference or 0.0), sentence))
    return {verdict: [text for *_, text in sorted(lines)] for verdict, lines in found.items()}


def find_holes(steps: Iterable[int]) -> list[tuple[int, int]]:
    """
    Return neighbours among increasing `steps` that lie further apart than most of them do, such as `(9, 31)` among 1,
    3, ..., 9, 31, ... Fewer than three steps have no usual distance.
    """
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
    for metric in dict.fromkeys(metric for row in run.rows.values() for metric in row):
        is_change = metric in ("quant/code_flip_rate", "quant/update_to_step")
        later = [step for step in run.rows if not (is_change and step == min(run.rows))]
        gaps = [step for step in run.gaps(metric) if step in later]
        zeros = (
            [step for step, value in run.values(metric).items() if value <= 0 and step in later] if is_change else []
        )
        for steps, problem in ((gaps, "not finite"), (zeros, "0")):
            if steps:
                found.setdefault((problem, tuple(steps)), []).append(metric)
    holes: dict[tuple[int, int], list[str]] = {}
    for metric in EVERY_BATCH:
        for hole in find_holes(sorted(run.values(metric).keys() | set(run.gaps(metric)))):
            holes.setdefault(hole, []).append(metric)
    return [
        f"{', '.join(metrics)} {'is' if len(metrics) == 1 else 'are'} {problem} at {count_of(len(steps), 'step')}: "
        f"{_ranges(steps, list(run.rows))}."
        for (problem, steps), metrics in found.items()
    ] + [f"{', '.join(metrics)}: nothing logged between steps {a} and {b}." for (a, b), metrics in holes.items()]


def _ranges(steps: Sequence[int], logged: list[int]) -> str:
    """Write steps as ranges of neighbours among those that were logged, at most ten of them."""
    positions = {step: index for index, step in enumerate(logged)}
    parts = [
        [step for _, step in part]
        for _, part in itertools.groupby(enumerate(steps), lambda pair: positions[pair[1]] - pair[0])
    ]
    texts = [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
    return ", ".join(texts[:10]) + (" and more" if len(texts) > 10 else "")


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
