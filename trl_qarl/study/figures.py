"""The figures of `trl-qarl report`."""

from pathlib import Path

from .statistics import Group


__all__ = ["DROPPED", "MISMATCH", "TIMES", "draw_figures"]

DROPPED = (
    ("tbpo/dropped/positive_high", "A > 0, ratio above\nits band (share)", False),
    ("tbpo/dropped/negative_low", "A < 0, ratio below\nits band (share)", False),
    ("tbpo/dropped/negative_high", "A < 0, ratio above\nits band (share)", False),
    ("tbpo/dropped/total", "all with A other\nthan 0 (share)", False),
    ("mismatch/rejected_share", "rejected for their\nmismatch (share)", False),
)
MISMATCH = (
    ("mismatch/abs_logp_mean", "mean over tokens of\n|log-prob difference| (nats)", True),
    ("mismatch/abs_logp_max", "maximum over tokens of\n|log-prob difference| (nats)", True),
    ("mismatch/k3", "KL estimate k3\n(nats per token)", True),
)
TIMES = (
    ("step_time", "seconds per update but the optimizer, its rollout included"),
    ("rollout/seconds", "seconds per rollout"),
    ("publish/seconds", "seconds per weight sync"),
    ("step/scoring_seconds", "seconds per rollout for rewards, log-probs and measurements"),
    ("step/forward_backward_seconds", "seconds per update for forward and backward"),
    ("step/optimizer_seconds", "seconds per update for the optimizer and quantizing the master weights"),
    ("rollout/tokens_per_second", "tokens per second of a rollout"),
)


def draw_figures(groups: list[Group], output: Path) -> tuple[list[tuple[str, Path, str]], list[str]]:
    """Figures, and a note for each that the runs have no values for."""
    from .plots import plot_bars, plot_distribution, plot_lines

    figures: list[tuple[str, Path, str]] = []
    notes = []

    def target(name: str) -> Path:
        # A figure of an earlier report at the same place must not pass for one of this.
        path = output.with_name(f"{output.stem}-{name}.png")
        path.unlink(missing_ok=True)
        return path

    bands = "Lines are means over the seeds that have a value, bands go from the smallest to the largest."
    marks = "A cross marks a step at which a value of that colour's group is not finite."
    lines = (
        ("Reward", "reward", (("reward", "mean reward of the\nsampled completions", False),), ""),
        ("Entropy", "entropy", (("entropy", "entropy of the policy\n(nats per token)", False),), ""),
        (
            "Mismatch between learner and rollout",
            "mismatch",
            MISMATCH,
            " A triangle marks a value of 0 or below, which a logarithmic axis cannot show.",
        ),
        (
            "Share of dropped sequences",
            "dropped",
            DROPPED,
            " Shares are of the sequences with that sign of the advantage. Updates without such a sequence have none. "
            "What a mask rejects is a share of all sequences, or of all tokens where it looks at tokens.",
        ),
    )
    for heading, name, panels, more in lines:
        path = target(name)
        drawn = plot_lines(groups, list(panels), path)
        notes += [
            f"No run has a value of {metric}."
            for metric, _, _ in panels
            if metric not in (*drawn, "mismatch/rejected_share")
        ]
        if drawn:
            figures.append((heading, path, f"{bands} {marks}{more}"))
    scale = (
        " The axis is logarithmic in the distance from 1, and so are the bins: fewer in a bin next to 1 are not fewer "
        "near 1."
    )
    ratio, weight = "ratio r, learner now / learner at rollout", "mismatch weight w, learner at rollout / sampler"
    of_sequences, together = (
        "Geometric means over the tokens of a sequence (products where the objective is bounded by them)",
        "all logged steps and seeds of a group together.",
    )
    for heading, name, unit, xlabel, caption in (
        ("Distribution of the ratio of tokens", "token_ratio", "tokens", ratio, "Token by token"),
        ("Distribution of the mismatch weight of tokens", "token_mismatch_weight", "tokens", weight, "Token by token"),
        ("Distribution of the ratio of sequences", "ratio", "sequences", ratio, of_sequences),
        ("Distribution of the mismatch weight of sequences", "mismatch_weight", "sequences", weight, of_sequences),
    ):
        path = target(name)
        if plot_distribution(groups, name, unit, xlabel, path):
            figures.append((heading, path, f"{caption}, {together}{scale}"))
        else:
            notes.append(f"No run has a distribution of {name}.")
    path = target("time")
    drawn = plot_bars(groups, list(TIMES), path)
    notes += [
        f"No run has a value of {metric}."
        for metric, _ in TIMES
        if metric not in drawn and metric != "rollout/seconds" and not metric.startswith("step/")
    ]
    if drawn:
        caption = (
            "Means over the logged steps of a run; bars are means over the runs of a group, whiskers their range."
        )
        figures.append(("Time", path, caption))
    return figures, notes
