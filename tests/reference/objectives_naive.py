"""
The objectives that the QaRL paper (https://huggingface.co/papers/2604.07853) compares, by loops over Python floats:
loss, and gradient by hand. Dual clip is written as in https://arxiv.org/abs/1912.09729, equation 5.
"""

import math


TEMPERATURES = (1.0, 1.25)
"""Temperatures of SAPO for positive and other advantages; exact in float32, the dtype in TRL."""


def naive_mismatch_ratio(old_logps, sampling_logps, mask, mode, clip_min=None, clip_max=None):
    """One ratio per token (`token_*`) or per completion (`sequence_*`), as lists of lists."""
    level, bound = mode.split("_")
    rows = []
    for old_row, sampling_row, mask_row in zip(old_logps, sampling_logps, mask, strict=True):
        logs = []
        for old, sampling, m in zip(old_row, sampling_row, mask_row, strict=True):
            logs.append(old - sampling if m != 0 and not math.isnan(sampling) else 0.0)
        row = []
        for log in [sum(logs)] if level == "sequence" else logs:
            ratio = math.exp(log)
            below = clip_min is not None and ratio < clip_min
            above = clip_max is not None and ratio > clip_max
            if bound == "mask":
                ratio = 0.0 if below or above else ratio
            elif below:
                ratio = clip_min
            elif above:
                ratio = clip_max
            row.append(ratio)
        rows.append(row)
    return rows


def _clipped(ratio, advantage, low, high, second_clip):
    """Surrogate of one ratio and its derivative by the ratio."""
    plain, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    slope = advantage if plain <= clipped else 0.0
    value = min(plain, clipped)
    if advantage < 0 and second_clip is not None and second_clip * advantage > value:
        return second_clip * advantage, 0.0
    return value, slope


def naive_binary_kl(p, q):
    p, q = (min(max(value, 1e-6), 1 - 1e-6) for value in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _naive_term(name, now, old, sampling, advantage, geometric, bounds):
    """One token's share of the objective and its derivative by `now`."""
    is_known = not math.isnan(sampling)
    weight = math.exp(old - sampling) if is_known else 1.0
    ratio = math.exp(now - old)
    if name == "sapo":
        # https://arxiv.org/abs/2511.20347, without a weight of the mismatch.
        temperature = TEMPERATURES[0] if advantage > 0 else TEMPERATURES[1]
        gate = 1 / (1 + math.exp(-temperature * (ratio - 1)))
        return 4 / temperature * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage
    second_clip = bounds["delta"] if name == "dual-clip" else None
    value, slope = _clipped(ratio, advantage, 1 - bounds["epsilon"], 1 + bounds["epsilon_high"], second_clip)
    if name not in ("icepop", "kpop", "geo-mask", "acr", "bypass", "dppo-tv"):
        kept = min(weight, bounds["clip_max"])
        return kept * value, kept * slope * ratio
    if name == "icepop":
        kept = weight if bounds["icepop"][0] <= weight <= bounds["icepop"][1] else 0.0
        return kept * value, kept * slope * ratio
    if name == "kpop":
        p, q = math.exp(old), math.exp(sampling) if is_known else math.exp(old)
        kept = weight if max(naive_binary_kl(p, q), naive_binary_kl(q, p)) <= bounds["kpop"] else 0.0
        return kept * value, kept * slope * ratio
    if name == "geo-mask":
        kept = bounds["geo-mask"][0] <= geometric <= bounds["geo-mask"][1]
        return (value, slope * ratio) if kept else (0.0, 0.0)
    if name == "acr":
        high = (1 + bounds["epsilon_high"]) / (min(weight, bounds["clip_max"]) / weight)
        value, slope = _clipped(ratio, advantage, 1 - bounds["epsilon"], high, None)
        kept = min(weight, bounds["clip_max"])
        return kept * value, kept * slope * ratio
    if not is_known:
        return 0.0, 0.0
    if name == "bypass":
        ratio = math.exp(now - sampling)
        value, slope = _clipped(ratio, advantage, 1 - bounds["epsilon"], 1 + bounds["epsilon_high"], None)
        return value, slope * ratio
    change = math.exp(now) - math.exp(sampling)
    if (advantage > 0 and change > bounds["dppo-tv"]) or (advantage < 0 and change < -bounds["dppo-tv"]):
        return 0.0, 0.0
    # The ratio is a constant there, so that the derivative is that of log p alone.
    ratio = min(math.exp(now - sampling), 20.0)
    return ratio * advantage * now, ratio * advantage


def naive_objective(name, logps, old_logps, sampling_logps, advantages, mask, **bounds):
    """Tensors are nested lists. Returns the loss and its gradient by `logps`, a nested list; bounds by their names."""
    batch_size, num_tokens = len(logps), len(logps[0])
    weights = naive_mismatch_ratio(old_logps, sampling_logps, mask, "sequence_mask", None, bounds["clip_max"])
    loss, gradient = 0.0, [[0.0] * num_tokens for _ in range(batch_size)]
    for i in range(batch_size):
        tokens = [t for t in range(num_tokens) if mask[i][t] != 0]
        advantage = advantages[i]
        if not tokens or (name == "positive-only" and advantage <= 0):
            continue
        if name in ("gspo", "mis-gspo"):
            ratio = math.exp(sum(logps[i][t] - old_logps[i][t] for t in tokens) / len(tokens))
            value, slope = _clipped(ratio, advantage, 1 - bounds["epsilon"], 1 + bounds["epsilon_high"], None)
            weight = weights[i][0] if name == "mis-gspo" else 1.0
            loss -= weight * value / batch_size
            for t in tokens:
                gradient[i][t] = -weight * slope * ratio / len(tokens) / batch_size
            continue
        known = [old_logps[i][t] - sampling_logps[i][t] for t in tokens if not math.isnan(sampling_logps[i][t])]
        geometric = math.exp(sum(known) / len(tokens))
        for t in tokens:
            token = (logps[i][t], old_logps[i][t], sampling_logps[i][t], advantage)
            value, slope = _naive_term(name, *token, geometric, bounds)
            loss -= value / len(tokens) / batch_size
            gradient[i][t] = -slope / len(tokens) / batch_size
    return loss, gradient
