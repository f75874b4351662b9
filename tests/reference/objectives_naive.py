"""The objectives of `examples/objectives.py` by loops over Python floats: loss, and gradient by hand."""

import math


EPSILON, EPSILON_HIGH = 0.2, 0.28
OPTIONS = {"IcePop": {"low": 0.7, "high": 1.5}, "ACR": {"cap": 1.5}, "DPPO": {"threshold": 0.02}}


def _clipped(ratio, advantage, high):
    """Surrogate of one ratio and its derivative by the ratio."""
    plain, clipped = ratio * advantage, min(max(ratio, 1 - EPSILON), high) * advantage
    return min(plain, clipped), advantage if plain <= clipped else 0.0


def _term(name, now, old, sampling, advantage):
    """One token's share of the objective and its derivative by `now`."""
    is_known, options = not math.isnan(sampling), OPTIONS[name]
    ratio, weight = math.exp(now - old), math.exp(old - sampling) if is_known else 1.0
    if name == "IcePop":
        value, slope = _clipped(ratio, advantage, 1 + EPSILON_HIGH)
        kept = weight if options["low"] <= weight <= options["high"] else 0.0
        return kept * value, kept * slope * ratio
    if name == "ACR":
        kept = min(weight, options["cap"])
        value, slope = _clipped(ratio, advantage, (1 + EPSILON_HIGH) * weight / kept)
        return kept * value, kept * slope * ratio
    change = math.exp(now) - math.exp(sampling) if is_known else 0.0
    if not is_known or change * math.copysign(1, advantage) > options["threshold"]:
        return 0.0, 0.0
    ratio = min(math.exp(now - sampling), 20.0)
    return ratio * advantage * now, ratio * advantage


def naive_objective(name, logps, old_logps, sampling_logps, advantages, mask):
    """Tensors are nested lists. Returns the loss and its gradient by `logps`, a nested list."""
    loss, gradient = 0.0, [[0.0] * len(logps[0]) for _ in logps]
    for i, advantage in enumerate(advantages):
        tokens = [t for t, m in enumerate(mask[i]) if m != 0]
        for t in tokens:
            value, slope = _term(name, logps[i][t], old_logps[i][t], sampling_logps[i][t], advantage)
            loss -= value / len(tokens) / len(logps)
            gradient[i][t] = -slope / len(tokens) / len(logps)
    return loss, gradient
