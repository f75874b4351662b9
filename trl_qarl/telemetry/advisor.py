"""
Rules about the health of a run: a metric, a threshold, and the next step if the threshold is exceeded.

They read logged rows and the options of a run, and are silent if a metric is missing. docs/health.md has the source of
every threshold. Needs no torch.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..objectives.objective import LOSS_TYPES
from ..quantization.plan import get_plan


LEVELS = ("fine", "watch", "bad")
"""From best to worst."""

DROPPED_AIM, DROPPED_MOST, MIN_UPDATES_OF_LOW_SHARE = (0.10, 0.40), 0.70, 16
STALLED_FLIP_RATE, STALLED_UPDATES = 1e-6, 50
EFFECTIVE_FINE, EFFECTIVE_BAD = 0.90, 0.75
ENTROPY_LEFT, ENTROPY_UP, ENTROPY_FAR_UP = 0.10, 2.0, 4.0
UNSOUND_WATCH, UNSOUND_BAD = 0.05, 0.20
ZERO_SPREAD_WATCH, ZERO_SPREAD_BAD = 0.50, 0.90

Rows = Iterable[Mapping[str, float | None]]
Judged = tuple[str, str, str, str]
"""Level, value, threshold, and advice, which is ignored if the level is fine."""


@dataclass(frozen=True)
class Finding:
    """Result of one rule for a run: the rule, one of [`LEVELS`], the measured value, the threshold, and the next step.
    Only findings with a next step are logged."""

    rule: str
    level: str
    value: str
    threshold: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.value}; {self.threshold}. {self.advice}".strip()


def assess(rows: Rows, settings: Mapping[str, Any]) -> list[Finding]:
    """Apply the rules to a run: its logged rows in order, each with its `step` and `None` for values that are not
    finite, and its options."""
    parts = _by_bits(rows, settings)
    findings = []
    for name, judge in RULES.items():
        found = [(judged, bits) for bits, part in parts.items() if (judged := judge(part, settings)) is not None]
        if found:
            (level, value, threshold, advice), bits = max(found, key=lambda pair: LEVELS.index(pair[0][0]))
            value += "" if bits is None else f" at {bits:g} bits"
            findings.append(Finding(name, level, value, threshold, "" if level == "fine" else advice))
    return findings


def _by_bits(rows: Rows, settings: Mapping[str, Any]) -> dict[float | None, list[Mapping[str, float | None]]]:
    """Return the rows of each precision, that of the bits logged last; for a schedule only those of the last."""
    parts: dict[float | None, list[Mapping[str, float | None]]] = {}
    bits = None
    for row in rows:
        bits = row.get("quant/bits", bits)
        parts.setdefault(bits, []).append(row)
    return {bits: parts[bits]} if isinstance(settings.get("precisions"), Mapping) and parts else parts


def advise(findings: Iterable[Finding], ongoing: Set[str]) -> tuple[list[Finding], frozenset[str]]:
    """Return the findings to log, one per episode, and the updated set of `ongoing` rules. An ongoing rule has been
    logged, and is logged again only after it was fine in between."""
    findings = list(findings)
    fine = {finding.rule for finding in findings if not finding.advice}
    new = [finding for finding in findings if finding.advice and finding.rule not in ongoing]
    return new, frozenset(ongoing - fine | {finding.rule for finding in new})


def mismatch_bands(settings: Mapping[str, Any]) -> tuple[float, float]:
    """
    Return two mean differences of log-probs (nats per token): up to the first it is rounding, above the second the
    policies differ. Engine numerics promise 0. Activations of 8 bits amplify rounding, weight-only schemes do
    not.
    """
    if settings.get("numerics") in ("engine", "exact"):
        return 0.0, 0.0
    return (
        (0.3, 0.6)
        if any(scheme.activation is not None for scheme in get_plan(settings["scheme"]).schemes)
        else (0.06, 0.3)
    )


def _learning(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    rewards = _values(rows, "reward")
    if len(rewards) < 8:
        return None
    first, last = _ends(rewards)
    change = statistics.fmean(last) - statistics.fmean(first)
    noise = 2 * math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    value = f"reward {statistics.fmean(first):.3g} → {statistics.fmean(last):.3g}"
    evaluated = _values(rows, "eval_reward")
    if evaluated:
        value += f", eval {' → '.join(f'{x:.3g}' for x in dict.fromkeys((evaluated[0], evaluated[-1])))}"
    threshold = f"first and last quarter; to rise by more than its noise, {noise:.2g}"
    level = "fine" if change > noise else "watch" if change >= -noise else "bad"
    advice = (
        "The reward falls. Lower `learning_rate`, look at the entropy and at completions (`log_completions`), and go back to a checkpoint "
        "from before."
    )
    return level, value, threshold, advice if level == "bad" else ""


def _mismatch(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    mean, (fine, bad) = _recent_mean(rows, "mismatch/abs_logp_mean"), mismatch_bands(settings)
    if mean is None:
        return None
    threshold = (
        f"rounding up to {fine:g} nats per token, two policies above {bad:g}" if bad else "0 with these numerics"
    )
    return _rising(mean, fine, bad), f"mismatch {_short(mean)}", threshold, _realign(settings)


def _realign(settings: Mapping[str, Any]) -> str:
    if settings.get("numerics") in ("engine", "exact"):
        return "The log names the first token and layer that differ."
    if settings.get("quantize_learner") is False and settings.get("scheme") != "bf16":
        return "The learner differentiates another policy than the one that samples. Set `quantize_learner=True`."
    if settings.get("loss_type") in LOSS_TYPES:
        # TRL corrects the mismatch of vLLM rollouts only.
        return (
            "Use an objective that corrects the mismatch (`tbpo`), and compare with the table of your scheme on the page about "
            "alignment."
        )
    return (
        "Compare with the table of your scheme on the page about alignment, and take a scheme without "
        "8-bit activations or, on a CPU, numerics='engine'."
    )


def _dropped(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    values = _recent(rows, "tbpo/dropped/total")
    ratios = _recent(rows, "tbpo/ratio/min") + _recent(rows, "tbpo/ratio/max")
    # On-policy updates have ratios of 1 and drop nothing.
    if len(values) < 4 or (ratios and max(abs(ratio - 1) for ratio in ratios) < 1e-6):
        return None
    share, (low, high) = statistics.fmean(values), DROPPED_AIM
    # The first batches, under a warm-up, are not representative.
    if share < low and len(_values(rows, "tbpo/dropped/total")) < MIN_UPDATES_OF_LOW_SHARE:
        return None
    level = "fine" if low <= share <= high else "bad" if share > DROPPED_MOST else "watch"
    too_narrow = (
        "Most of the batch is outside the trust band and teaches nothing. Lower `learning_rate`, take fewer updates per batch "
        "(`steps_per_generation`), or widen `positive_epsilon_high` and `negative_epsilon_low/high`."
    )
    too_wide = (
        "The trust band hardly ever binds. Narrow `positive_epsilon_high` and `negative_epsilon_low/high`, or raise "
        "`learning_rate`, if the reward rises too slowly."
    )
    advice = too_narrow if share > high else too_wide
    return level, f"dropped {share:.0%}", f"aim {low:.0%} to {high:.0%}", advice


def _flips(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    logged = [row for row in rows if _values([row], "quant/code_flip_rate")]
    if len(logged) < 4:
        return None
    first, last = (int(row["step"]) for row in (logged[0], logged[-1]))
    values = _values([row for row in logged if row["step"] > last - STALLED_UPDATES], "quant/code_flip_rate")
    value, threshold = f"code flips {_short(statistics.fmean(values))}", f"stalled below {STALLED_FLIP_RATE:g}"
    has_few = last - first < STALLED_UPDATES - 1
    level = "fine" if max(values) >= STALLED_FLIP_RATE else "watch" if has_few else "bad"
    moved = _recent(rows, "quant/update_to_step")
    by = f"; an update moves a master by {_short(moved[-1])} quantization steps" if moved else ""
    advice = (
        f"The low-bit policy is stalled: no code changes{by}. Raise `learning_rate` ({settings.get('learning_rate', 'unknown')} "
        "here), and keep the masters in float32."
    )
    return level, value, threshold, advice if level == "bad" else ""


def _effective(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    share = _recent_mean(rows, "mismatch/effective_sample_size")
    if share is None:
        return None
    level = _rising(-share, -EFFECTIVE_FINE, -EFFECTIVE_BAD)
    advice = "A few completions carry the batch. Lower the mismatch first, then `mismatch_cap`."
    return level, f"effective samples {share:.0%} of the batch", f"at least {EFFECTIVE_FINE:.0%}", advice


def _entropy(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    values = _values(rows, "entropy")
    if len(values) < 8:
        return None
    first, last = (statistics.fmean(part) for part in _ends(values))
    if first <= 0:
        return None
    value, threshold = (
        f"entropy {first:.3g} → {last:.3g}",
        f"{ENTROPY_LEFT:g} to {ENTROPY_UP:g} times that of the start",
    )
    if last > ENTROPY_UP * first:
        level = "bad" if last > ENTROPY_FAR_UP * first else "watch"
        advice = "The text falls apart. Look at completions (`log_completions`) and at the repetition, and lower `learning_rate`."
        return level, value, threshold, advice
    advice = (
        "Completions become copies of each other. If the reward has stopped below what is possible, raise `temperature` or "
        "`positive_epsilon_high`."
    )
    return "watch" if last < ENTROPY_LEFT * first else "fine", value, threshold, advice


def _text(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    shares = {
        name: share
        for name, metric in (("repetitive", "rollout/repetition_share"), ("garbled", "rollout/garbled_share"))
        if (share := _recent_mean(rows, metric)) is not None
    }
    if not shares:
        return None
    level = _rising(max(shares.values()), UNSOUND_WATCH, UNSOUND_BAD)
    value = "completions " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    advice = (
        "Read completions (`log_completions`). Lower `learning_rate` or `max_completion_length`, and check that the reward does not pay "
        "for length."
    )
    return level, value, f"up to {UNSOUND_WATCH:.0%}", advice


def _zero_spread(rows: Sequence, settings: Mapping[str, Any]) -> Judged | None:
    share = _recent_mean(rows, "frac_reward_zero_std", least=4)
    if share is None:
        return None
    level = _rising(share, ZERO_SPREAD_WATCH, ZERO_SPREAD_BAD)
    advice = (
        "All completions of such a prompt earn the same, so it teaches nothing. Take problems of another difficulty, a finer "
        "reward, or a larger `num_generations`."
    )
    return level, f"{share:.0%} of the prompts without a spread of rewards", f"up to {ZERO_SPREAD_WATCH:.0%}", advice


RULES = {
    "learning": _learning,
    "mismatch": _mismatch,
    "dropped": _dropped,
    "flips": _flips,
    "effective": _effective,
    "entropy": _entropy,
    "text": _text,
    "zero_spread": _zero_spread,
}
"""Function of each rule."""


def _values(rows: Sequence[Mapping[str, float | None]], metric: str) -> list[float]:
    return [value for row in rows if (value := row.get(metric)) is not None and math.isfinite(value)]


def _recent(rows: Sequence[Mapping[str, float | None]], metric: str) -> list[float]:
    """Return the last quarter of the values, or the last four if that is more."""
    values = _values(rows, metric)
    return values[-max(4, len(values) // 4) :]


def _recent_mean(rows: Sequence[Mapping[str, float | None]], metric: str, least: int = 1) -> float | None:
    values = _recent(rows, metric)
    return statistics.fmean(values) if len(values) >= least else None


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    quarter = len(values) // 4
    return values[:quarter], values[-quarter:]


def _rising(value: float, fine: float, bad: float) -> str:
    return "fine" if value <= fine else "watch" if value <= bad else "bad"


def _short(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.2g}"
