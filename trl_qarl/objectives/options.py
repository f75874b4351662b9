"""TRL's options of a loss: their defaults, and the options that some objectives do not use."""

from collections.abc import Iterator, Sequence
from typing import Any


UNSET = (
    "epsilon",
    "importance_sampling_level",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)
"""Options whose default is `None` here instead of TRL's, to recognize values that were given."""

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TRL's values of `loss_type`."""

RESHAPES_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")

OF_ONE_LOSS = (
    *("sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)

OF_TRLS_LOSS = ("delta", "off_policy_mask_threshold", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy")

BOUNDS_OF_MISMATCH = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)


def trl_default(name: str) -> Any:
    """Return the default of TRL's own configuration."""
    from trl import GRPOConfig

    return getattr(GRPOConfig, name)


def clip_offsets(config: Any) -> tuple[float, float]:
    """Return the offsets of TRL's clip below and above a ratio of 1; the second defaults to the first."""
    return config.epsilon, config.epsilon if config.epsilon_high is None else config.epsilon_high


def neutral_values(name: str) -> list[Any]:
    """Return the values of an option of TRL's that have no effect."""
    default = None if name in UNSET else trl_default(name)
    return [default, 0.0] if name == "min_p" else [default]


def refuse_changed(config: Any, names: Sequence[str], why: str) -> Iterator[str]:
    """Yield a problem for each of TRL's options `names` that was changed, for an objective that does not use it."""
    for name in names:
        if getattr(config, name) not in neutral_values(name):
            yield f"{name}={getattr(config, name)!r} is not honoured: objective={config.objective!r} {why}."
