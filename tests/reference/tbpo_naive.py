"""TBPO by loops over Python floats: value, and gradient by hand. Paper: https://huggingface.co/papers/2604.07853."""

import math


def naive_log_ratio(logps, reference_logps, mask):
    """Mean over one completion's tokens of `logps - reference_logps`; a NaN reference adds 0 but counts as a token."""
    total, length = 0.0, 0
    for logp, reference, m in zip(logps, reference_logps, mask, strict=True):
        if m == 0:
            continue
        length += 1
        if not math.isnan(reference):
            total += logp - reference
    return total / length if length > 0 else 0.0


def naive_tbpo(
    logps,
    old_logps,
    sampling_logps,
    advantages,
    mask,
    positive_epsilon_high,
    negative_epsilon_low,
    negative_epsilon_high,
    mismatch_cap,
):
    """
    All tensors as nested lists. Returns the loss, its gradient with respect to `logps` as a nested list, and for each
    sequence its ratio, NaN if it is empty, and its region, a part of the band.
    """
    batch_size = len(logps)
    loss, gradient, ratios, regions = 0.0, [], [], []
    for i in range(batch_size):
        advantage = advantages[i]
        length = sum(1 for m in mask[i] if m != 0)
        log_ratio = naive_log_ratio(logps[i], old_logps[i], mask[i])
        ratio = math.exp(log_ratio)

        log_weight = naive_log_ratio(old_logps[i], sampling_logps[i], mask[i])
        weight = math.exp(min(max(log_weight, -math.log(mismatch_cap)), math.log(mismatch_cap)))

        if length == 0:
            region, clipped = "empty", 0.0
        elif advantage == 0.0:
            region, clipped = "zero advantage", 0.0
        elif advantage > 0 and ratio > 1 + positive_epsilon_high:
            region, clipped = "positive high", 1 + positive_epsilon_high
        elif advantage < 0 and ratio < 1 - negative_epsilon_low:
            region, clipped = "negative low", 1 - negative_epsilon_low
        elif advantage < 0 and ratio > 1 + negative_epsilon_high:
            region, clipped = "negative high", 1 + negative_epsilon_high
        else:
            region, clipped = ("positive inside" if advantage > 0 else "negative inside"), ratio

        loss -= weight * clipped * advantage / batch_size
        row = []
        for t in range(len(logps[i])):
            if region.endswith("inside") and mask[i][t] != 0 and not math.isnan(old_logps[i][t]):
                # d ratio / d logp_t = ratio / L
                row.append(-weight * advantage * ratio / length / batch_size)
            else:
                row.append(0.0)
        gradient.append(row)
        ratios.append(ratio if length else math.nan)
        regions.append(region)
    return loss, gradient, ratios, regions
