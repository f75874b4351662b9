"""Bounds that an objective sets to its ratios, as the histograms show them."""

from typing import Any

from .presets import is_corrected, rejects_by_product


__all__ = ["Bounds", "histogram_bounds", "sequence_bounds", "token_bounds"]

Bounds = tuple[float | None, float | None]


def histogram_bounds(config: Any) -> list[tuple[str, str, Bounds]]:
    """
    Return quantity, sign of the advantage and bounds of each histogram: tokens, and for objectives of sequence ratios
    sequences.
    """
    bounds = token_bounds(config) | (sequence_bounds(config) or {})
    return [(name, sign, pair) for name, signs in bounds.items() for sign, pair in signs.items()]


def sequence_bounds(config: Any) -> dict[str, dict[str, Bounds]] | None:
    """
    Return the bounds that the objective of a [`QaRLConfig`] sets to the sequence-level `"ratio"` and
    `"mismatch_weight"`, for `"positive"` and `"negative"` advantages; `None` for a side without bound, and for an
    objective of token ratios.
    """
    if config.objective == "tbpo":
        cap = (1 / config.mismatch_cap, config.mismatch_cap)
        negative = (1 - config.negative_epsilon_low, 1 + config.negative_epsilon_high)
        return {
            "ratio": {"positive": (None, 1 + config.positive_epsilon_high), "negative": negative},
            "mismatch_weight": {"positive": cap, "negative": cap},
        }
    if config.objective == "geo-mask":
        band = (config.mismatch_low, config.mismatch_high)
        return {
            "ratio": {"positive": (None, None), "negative": (None, None)},
            "mismatch_weight": {"positive": band, "negative": band},
        }
    if config.importance_sampling_level != "sequence":
        return None
    positive: Bounds = (None, None)
    negative: Bounds = (None, None)
    if config.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        positive, negative = (None, 1 + epsilon_high), (1 - config.epsilon, config.delta)
    elif config.loss_type == "cispo":
        positive = negative = (None, config.epsilon if config.epsilon_high is None else config.epsilon_high)
    weight: Bounds = (None, None)
    if rejects_by_product(config):
        weight = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
    return {
        "ratio": {"positive": positive, "negative": negative},
        "mismatch_weight": {"positive": weight, "negative": weight},
    }


def token_bounds(config: Any) -> dict[str, dict[str, Bounds]]:
    """
    Return the bounds that the objective of a [`QaRLConfig`] sets to each token's `"token_ratio"` and
    `"token_mismatch_weight"`, for `"positive"` and `"negative"` advantages; `None` for a side without bound, which is
    every side for an objective of sequence ratios.
    """
    positive: Bounds = (None, None)
    negative: Bounds = (None, None)
    weight: Bounds = (None, None)
    if config.objective not in ("tbpo", "dppo-tv") and config.importance_sampling_level == "token":
        epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        if config.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            positive, negative = (None, 1 + epsilon_high), (1 - config.epsilon, config.delta)
        elif config.loss_type == "cispo":
            positive = negative = (None, epsilon_high)
    if is_corrected(config) and config.vllm_importance_sampling_mode.startswith("token"):
        weight = (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max)
    if config.objective == "icepop":
        weight = (config.mismatch_low, config.mismatch_high)
    if config.objective == "acr":
        weight = (None, config.vllm_importance_sampling_clip_max)
    return {
        "token_ratio": {"positive": positive, "negative": negative},
        "token_mismatch_weight": {"positive": weight, "negative": weight},
    }
