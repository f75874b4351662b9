"""The figures of `trl-qarl report`: which panels there are, and what they show."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..quantization.precisions import NESTING_BITS
from ..telemetry.advisor import DROPPED_AIM, STALLED_FLIP_RATE, mismatch_bands
from .plots import Metric, draw_bars, draw_distribution, draw_finals, draw_metric, has_values, share_axis
from .runs import printable
from .statistics import Group


__all__ = ["LOGARITHMIC", "METRICS", "TIMES", "Figure", "draw_figures", "draw_result"]

DROPPED = "tbpo/dropped/"
METRICS: dict[str, tuple[Metric, ...]] = {
    "Reward": (
        Metric("reward", "mean reward of the sampled completions"),
        Metric("eval_reward", "mean reward on the evaluation set"),
    ),
    "Reward at each precision": tuple(
        Metric(f"reward/{bits}_bits", f"mean reward of the batches at {bits} bits") for bits in NESTING_BITS
    ),
    "Mismatch between learner and rollout": (
        # The same range in every report, from what rounding leaves to what unaligned weights do.
        Metric("mismatch/abs_logp_mean", "mean |log-prob difference| (nats per token)", "log", (1e-4, 3.0)),
        Metric("mismatch/abs_logp_max", "largest |log-prob difference| (nats)", "log"),
        Metric("mismatch/k3", "KL estimate k3 (nats per token)", "log"),
    ),
    "Share of dropped sequences": (
        Metric(f"{DROPPED}total", "all with A other than 0", "share", None, ((*DROPPED_AIM, "fine"),)),
        Metric(f"{DROPPED}positive_high", "A > 0, ratio above its band", "share"),
        Metric(f"{DROPPED}negative_low", "A < 0, ratio below its band", "share"),
        Metric(f"{DROPPED}negative_high", "A < 0, ratio above its band", "share"),
        Metric("mismatch/rejected_share", "rejected for their mismatch", "share"),
    ),
    "Codes changed": (
        Metric(
            "quant/code_flip_rate",
            "share of codes changed by an update",
            "log",
            None,
            ((0, STALLED_FLIP_RATE, "bad"),),
        ),
        Metric("quant/update_to_step", "update of a master, in quantization steps", "log"),
    ),
    "Reward spread": (
        Metric("reward_std", "standard deviation of the rewards"),
        Metric("frac_reward_zero_std", "share of prompts whose completions all earn the same", "share"),
    ),
    "Entropy and length": (
        Metric("entropy", "entropy of the policy (nats per token)"),
        Metric("completions/mean_length", "tokens per completion"),
        Metric("completions/clipped_ratio", "share cut at the length limit", "share"),
    ),
    "Sound text": (
        Metric("rollout/repetition_share", "share of completions with a loop", "share"),
        Metric("rollout/garbled_share", "share of garbled completions", "share"),
        Metric("rollout/error_token_share", "share of tokens unlikely under both", "share"),
    ),
}
LOGARITHMIC = [metric.name for metrics in METRICS.values() for metric in metrics if metric.scale == "log"]
TIMES = (
    ("step_time", "seconds per update but the optimizer, its rollout included"),
    ("rollout/seconds", "seconds per rollout"),
    ("publish/seconds", "seconds per weight sync"),
    ("step/scoring_seconds", "seconds per rollout for rewards, log-probs and measurements"),
    ("step/forward_backward_seconds", "seconds per update for forward and backward"),
    ("step/optimizer_seconds", "seconds per update for optimizer and quantizing"),
    ("rollout/tokens_per_second", "tokens per second of a rollout"),
)
_NAMES = {
    "Reward at each precision": "bits",
    "Mismatch between learner and rollout": "mismatch",
    "Share of dropped sequences": "dropped",
    "Codes changed": "codes",
    "Entropy and length": "length",
    "Reward spread": "spread",
    "Sound text": "text",
}
_CAPTIONS = {
    "Mismatch between learner and rollout": (
        "Green: rounding. Amber: noisy. Red: learner and sampler are two policies. Where groups of one report have other "
        "thresholds, nothing is shaded. A triangle marks a value of 0 or below, which a logarithmic axis cannot show."
    ),
    "Share of dropped sequences": (
        "Shares are of the sequences with that sign of the advantage. Updates without such a sequence have none. What a mask "
        "rejects is a share of all sequences, or of all tokens where it looks at tokens. Green: what to aim at."
    ),
    "Codes changed": "Red: the low-bit policy is stalled.",
    "Reward spread": "Completions of one prompt that all earn the same teach nothing.",
}
_SCALE = (
    "The axis is logarithmic in the distance from 1, and so are the bins: fewer in a bin next to 1 are not fewer near 1. Dashed: "
    "clip bounds."
)
_RATIO, _WEIGHT = "ratio r, learner now / learner at rollout", "weight w, learner at rollout / sampler"
_OF_SEQUENCES = "Geometric means over the tokens of a sequence (products where the objective bounds them)."
_DISTRIBUTIONS = (
    ("Ratio of tokens", "token_ratio", "tokens", _RATIO, "Token by token."),
    ("Mismatch weight of tokens", "token_mismatch_weight", "tokens", _WEIGHT, "Token by token."),
    ("Ratio of sequences", "ratio", "sequences", _RATIO, _OF_SEQUENCES),
    ("Mismatch weight of sequences", "mismatch_weight", "sequences", _WEIGHT, _OF_SEQUENCES),
)


@dataclass
class Figure:
    """Panels under one heading: pairs of a title and what draws it on axes, and an SVG of each."""

    heading: str
    name: str
    caption: str
    panels: list[tuple[str, Callable]]
    height: float = 2.6
    margins: dict[str, float] | None = field(
        default_factory=lambda: {"left": 0.14, "right": 0.98, "top": 0.96, "bottom": 0.17}
    )
    svgs: list[str] = field(default_factory=list)

    def __post_init__(self):
        from .canvas import to_svg

        self.svgs = [
            to_svg(draw, f"{self.name}{index}", title, (4.4, self.height))
            for index, (title, draw) in enumerate(self.panels)
        ]


def draw_figures(groups: list[Group], output: Path, with_png: bool = False) -> list[Figure]:
    """Draw the figures of which some run has values, `with_png` also as files beside the page `output`."""
    figures = [figure for heading, metrics in METRICS.items() if (figure := _lines(groups, heading, metrics))]
    figures += [figure for spec in _DISTRIBUTIONS if (figure := _distribution(groups, *spec))]
    panels = [
        (title, partial(draw_bars, groups=groups, metric=name)) for name, title in TIMES if has_values(groups, name)
    ]
    if panels:
        caption = (
            "Means over the logged steps of a run; bars are means over the runs of a group, whiskers their range."
        )
        figures.append(Figure("Time", "time", caption, panels, 0.6 + 0.32 * len(groups), None))
    if with_png:
        from .canvas import to_png

        for name in (*(_name(heading) for heading in METRICS), *(spec[1] for spec in _DISTRIBUTIONS), "time"):
            # A figure of an earlier report at the same place must not pass for one of this.
            output.with_name(f"{output.stem}-{name}.png").unlink(missing_ok=True)
        legend = [(plain(group.title), group.color, group.line) for group in groups]
        for figure in figures:
            to_png(figure.panels, legend, output.with_name(f"{output.stem}-{figure.name}.png"))
    return figures


def draw_result(groups: list[Group], summaries: list[dict[str, Any]], what: str) -> str:
    """Draw final results by group with their range over seeds, as SVG."""
    from .canvas import to_svg

    draw = partial(draw_finals, groups=groups, summaries=summaries, xlabel=what)
    return to_svg(draw, f"final-{what.split()[0]}", f"{what} by group", (5.2, 0.8 + 0.34 * len(groups)))


def plain(text: str) -> str:
    """Leave out what a font cannot draw; a `$` in a name would start a formula."""
    return printable(text).replace("$", r"\$")


def _name(heading: str) -> str:
    return _NAMES.get(heading, heading.lower())


def _lines(groups: list[Group], heading: str, metrics: tuple[Metric, ...]) -> Figure | None:
    bands = {mismatch_bands({**group.config.get("options", {}), **group.config}) for group in groups}
    panels = []
    for metric in metrics:
        if metric.name == "mismatch/abs_logp_mean" and len(bands) == 1:
            fine, bad = next(iter(bands))
            shaded = ((0.0, fine, "fine"), (fine, bad, "watch"), (bad, 1e9, "bad")) if bad else ()
            metric = metric._replace(bands=shaded)
        if has_values(groups, metric.name):
            panels.append((metric.title, partial(draw_metric, groups=groups, metric=metric)))
    return Figure(heading, _name(heading), _CAPTIONS.get(heading, ""), panels) if panels else None


def _distribution(groups: list[Group], heading: str, name: str, unit: str, xlabel: str, caption: str) -> Figure | None:
    of_groups = [
        (group, [row for run in group.runs for row in run.distributions if row["name"] == name]) for group in groups
    ]
    of_groups = [(group, rows) for group, rows in of_groups if any(sum(row["counts"]) for row in rows)]
    if not of_groups:
        return None
    signs = {"positive": "A > 0", "negative": "A < 0"}
    signed = [
        (group, sign, [row for row in rows if row["sign"] == sign]) for group, rows in of_groups for sign in signs
    ]
    totals = [sum(sum(row["counts"]) for row in rows) for _, _, rows in signed]
    shared = share_axis([row for _, rows in of_groups for row in rows], max(totals))
    panels = [
        (
            f"{plain(group.label)}: {signs[sign]}, {total:,.0f} {unit}",
            partial(draw_distribution, group=group, rows=rows, xlabel=xlabel, shared=shared),
        )
        for (group, sign, rows), total in zip(signed, totals, strict=True)
    ]
    together = "All logged steps and seeds of a group together, as shares in a bin."
    margins = {"left": 0.14, "right": 0.98, "top": 0.96, "bottom": 0.3}
    return Figure(heading, name, f"{caption} {together} {_SCALE}", panels, margins=margins)
