"""Groups of runs that differ only by their seed: their names, colors and differences."""

import itertools
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas

from .grid import label_parts
from .runs import Run


FINAL_REWARD = "final reward"
# `figures.mplstyle` has the colors.
NUM_COLORS, LINES = 8, ("-", "--", "-.", ":")


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
    color: str = "C0"
    line: str = "-"

    @property
    def seeds(self) -> list[Any]:
        return list(dict.fromkeys(run.config.get("seed") for run in self.runs))

    @property
    def title(self) -> str:
        return f"{self.label} ({count_of(len(self.seeds), 'seed')})"

    def results(self, name: str = FINAL_REWARD) -> pandas.Series:
        """Return the results of each seed, by the names in [`Run.results`]: runs of one seed count once."""
        found = pandas.Series([run.results.get(name) for run in self.runs], dtype=float)
        return found.groupby([str(run.config.get("seed")) for run in self.runs], sort=False).mean().dropna()


def make_groups(runs: list[Run]) -> list[Group]:
    """
    Group runs that share everything but the seed; labels name what the groups differ in. Each run gets its final
    reward: the mean of `reward` over the logged steps in the last quarter before the largest step that any run with
    the same `max_steps` has reached, and none if it ended before.
    """
    found: dict[str, Group] = {}
    for run in runs:
        config = {name: value for name, value in run.config.items() if name != "seed"}
        found.setdefault(json.dumps(config, sort_keys=True), Group(config, _flatten(config))).runs.append(run)
        last = max(other.last_step for other in runs if other.config.get("max_steps") == config.get("max_steps"))
        rewards = run.values("reward")
        if len(rewards := rewards[rewards.index > 0.75 * last]):
            run.results[FINAL_REWARD] = rewards.mean()
    groups = list(found.values())
    for place, group in enumerate(groups):
        group.color, group.line = f"C{place % NUM_COLORS}", LINES[place // NUM_COLORS % len(LINES)]
        parts = label_parts(group.config)
        names = differing_settings([other for other in groups if label_parts(other.config) == parts])
        parts += [f"{name}={group.settings.get(name, 'not recorded')}" for name in names]
        group.label = ", ".join(parts) or "runs"
        if len(group.seeds) < len(group.runs):
            has = f"{group.label} has {len(group.runs)} runs of {count_of(len(group.seeds), 'seed')}"
            group.runs[0].notes.append(f"{has}: runs of one seed count once.")
    return groups


def differing_settings(groups: Iterable[Group]) -> list[str]:
    """Return the names of the settings in which groups differ."""
    settings = pandas.DataFrame([group.settings for group in groups])
    return list(settings.columns[settings.nunique(dropna=False) > 1])


def _flatten(config: dict[str, Any]) -> dict[str, str]:
    def text(value: Any) -> str:
        texts = map(str, value if isinstance(value, list) else [value])
        return "-" if value is None else ", ".join(texts)

    (flat,) = pandas.json_normalize(config).to_dict("records")
    return {str(name): text(value) for name, value in flat.items()}


def compare_groups(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """
    Return the difference of two groups, of one result for each seed, the noise between seeds that it is held against,
    `t s sqrt(1 / n_a + 1 / n_b)` of Student's test at 5 % with the pooled standard deviation `s`, and the verdict:
    `"exceeds"`, `"within"`, or `"unknown"` where a group has fewer than two seeds.
    """
    # The quickstart, which compares nothing, is installed without.
    from scipy.stats import ttest_ind

    difference = sum(a) / len(a) - sum(b) / len(b) if len(a) and len(b) else None
    if difference is None or min(len(a), len(b)) < 2:
        return {"difference": difference, "noise": None, "verdict": "unknown"}
    # scipy warns of seeds that end alike.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        interval = ttest_ind(a, b).confidence_interval(0.95)
    noise = (interval.high - interval.low) / 2
    return {"difference": difference, "noise": noise, "verdict": "exceeds" if abs(difference) > noise else "within"}


def describe_differences(groups: list[Group], name: str = FINAL_REWARD) -> dict[str, list[str]]:
    """
    Return one sentence per pair of groups that train the same model for the same reward, about their final rewards or
    an evaluation of that `name`, by the verdicts of [`compare_groups`]; pairs that differ in the fewest settings come
    first, then larger differences.
    """
    what, ends = (name, "ends at") if name == FINAL_REWARD else (f"{name} score", f"has a {name} score of")
    found: dict[str, list[tuple[int, float, str]]] = {"exceeds": [], "within": [], "unknown": []}
    for a, b in itertools.combinations(groups, 2):
        if any(a.config.get(key) != b.config.get(key) for key in ("model", "reward_funcs")):
            continue
        judged = compare_groups(list(a.results(name)), list(b.results(name)))
        if (difference := judged["difference"]) is None:
            without = " and ".join(group.label for group in (a, b) if group.results(name).empty)
            sentence = f"{a.label} and {b.label}: no {what} of {without}."
        else:
            high, low = (a, b) if difference >= 0 else (b, a)
            means = [format_number(group.results(name).mean()) for group in (high, low)]
            size, noise = format_number(abs(difference)), format_number(judged["noise"])
            single = " and of ".join(group.label for group in (high, low) if len(group.results(name)) == 1)
            exceeds = "exceeds" if judged["verdict"] == "exceeds" else "does not exceed"
            verdict = f"the difference of {size} {exceeds} the seed noise of {noise}"
            if judged["verdict"] == "unknown":
                verdict = f"the seed noise of this difference of {size} cannot be judged, with one seed of {single}"
            sentence = f"{high.label} {ends} {means[0]}, {low.label} {ends.split()[-1]} {means[1]}: {verdict}."
        distance = sum(a.config.get(key) != b.config.get(key) for key in a.config.keys() | b.config.keys())
        found[judged["verdict"]].append((distance, -abs(difference or 0.0), sentence))
    return {verdict: [text for *_, text in sorted(lines)] for verdict, lines in found.items()}


def summarize_differences(found: dict[str, list[str]]) -> str:
    """Return how many differences of [`describe_differences`] there are of each verdict."""
    exceeding, within, unknown = (len(found[verdict]) for verdict in ("exceeds", "within", "unknown"))
    count = count_of(exceeding, "difference")
    return f"{count} of final reward above the seed noise, {within} within it, {unknown} that cannot be judged"


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
