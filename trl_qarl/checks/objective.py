"""What is wrong with `objective` and the options of its loss: each function yields its problems and changes nothing."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from trl import GRPOConfig

from ..objectives.presets import OBJECTIVES, OWN_OPTIONS, PRESETS
from .refused import BOUNDS_OF_MISMATCH, OF_ONE_LOSS, OF_TRLS_LOSS, REFUSED_BY_TBPO, RESHAPES_SAMPLING, UNSET


__all__ = ["check_objective", "check_ratios", "default", "refused_by_tbpo"]

# Beside TRL's own defaults.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"min_p": (0.0,)}


def check_objective(config) -> Iterator[str]:
    """Contradictions of what was given with `objective`, before it sets anything."""
    if config.objective not in OBJECTIVES:
        yield f"Unknown objective {config.objective!r}. Choose one of {list(OBJECTIVES)}."
        return
    loss_type = "grpo" if config.objective in PRESETS else config.objective
    if config.objective != "tbpo" and config.loss_type not in (None, loss_type):
        yield (
            f"loss_type={config.loss_type!r} contradicts objective={config.objective!r}. Remove `loss_type`; "
            "`objective` takes the same names."
        )
    if config.objective in PRESETS:
        for name, value in PRESETS[config.objective].options.items():
            if getattr(config, name) not in (None, value):
                yield (
                    f"{name}={getattr(config, name)!r} contradicts objective={config.objective!r}, which is {name}={value!r}. "
                    "Remove it, or use objective='grpo', which takes every option of TRL's."
                )
    for name in ("epsilon", "epsilon_high"):
        if config.objective == "dppo-tv" and getattr(config, name) is not None:
            yield (
                f"{name}={getattr(config, name)!r} is not honoured: objective='dppo-tv' bounds the change of a token's "
                "probability, by `divergence_threshold`, and not its ratio."
            )


def check_ratios(config) -> Iterator[str]:
    """Options of the loss, once `objective` has set its own."""
    yield from _check_own_options(config)
    if config.objective in PRESETS:
        yield from _check_preset(config)
    if config.objective == "tbpo":
        yield from _check_band(config)
    elif config.objective in OBJECTIVES:
        yield from _check_loss_of_trl(config)


def _check_band(config) -> Iterator[str]:
    for name, upper in (
        ("positive_epsilon_high", None),
        ("negative_epsilon_high", None),
        ("negative_epsilon_low", 1.0),
    ):
        value = getattr(config, name)
        if not value >= 0 or (upper is not None and value > upper):
            bound = "at least 0" if upper is None else f"between 0 and {upper:g}"
            yield f"{name}={value!r} must be {bound}: it is an offset from a ratio of 1."
    if not config.mismatch_cap > 1:
        yield (
            f"mismatch_cap={config.mismatch_cap!r} must be greater than 1: the weight is bounded to [1/c, c]. The "
            "paper uses 2."
        )


def _check_loss_of_trl(config) -> Iterator[str]:
    if config.importance_sampling_level not in ("token", "sequence"):
        yield (
            f"importance_sampling_level={config.importance_sampling_level!r} is unknown. Choose 'token' or 'sequence'."
        )
    for name in ("positive_epsilon_high", "negative_epsilon_low", "negative_epsilon_high", "mismatch_cap"):
        if getattr(config, name) != default(type(config), name):
            yield (
                f"{name}={getattr(config, name)!r} belongs to objective='tbpo', but objective={config.objective!r}. "
                "Remove it or change the objective."
            )


def _check_own_options(config) -> Iterator[str]:
    """Options of presets that TRL does not have."""
    own = PRESETS[config.objective].defaults if config.objective in PRESETS else {}
    for name in OWN_OPTIONS:
        if name not in own and getattr(config, name) is not None:
            users = [objective for objective, preset in PRESETS.items() if name in preset.defaults]
            yield (
                f"{name}={getattr(config, name)!r} belongs to {' and '.join(f'objective={user!r}' for user in users)}, but "
                f"objective={config.objective!r}. Remove it or change the objective."
            )
    low, high, threshold = (getattr(config, name) if name in own else None for name in OWN_OPTIONS)
    if low is not None and not 0 < low < 1 < high:
        yield (
            f"mismatch_low={low!r}, mismatch_high={high!r} must be bounds of a ratio around 1: 0 < mismatch_low < 1 < "
            "mismatch_high."
        )
    if threshold is not None and not threshold > 0:
        yield f"divergence_threshold={threshold!r} must be greater than 0: at 0 nothing would be left to train on."
    if config.objective == "dppo-tv" and threshold is not None and threshold >= 1:
        yield f"divergence_threshold={threshold!r} bounds a change of probability, which is below 1. Choose such as 0.2."


def _check_preset(config) -> Iterator[str]:
    preset = PRESETS[config.objective]
    if not preset.corrects_mismatch:
        refused, why = BOUNDS_OF_MISMATCH, "does not correct the mismatch; `mis-gspo` and `grpo-tis` do"
        if preset.is_ours:
            why = "has a rule of its own for the mismatch" + "".join(f", `{name}`" for name in preset.defaults)
        if config.objective == "acr":
            refused = [name for name in refused if name != "vllm_importance_sampling_clip_max"]
        yield from _refuse_changed(config, refused, why)
    if config.objective in ("dppo-tv", "acr"):
        yield from _refuse_changed(config, OF_TRLS_LOSS, "does not use it: it is not a loss of TRL's")
    if (preset.corrects_mismatch or preset.is_ours) and not config.use_vllm:
        yield from _refuse_changed(
            config,
            RESHAPES_SAMPLING,
            "weighs by the sampling log-probs, which would not be those of the distribution that was sampled from; "
            "leave it at its default",
        )
    yield from _refuse_changed(config, OF_ONE_LOSS, "does not use it; it belongs to TRL's loss of that name")
    if config.objective == "dual-clip":
        epsilon_high = next(value for value in (config.epsilon_high, config.epsilon, 0.2) if value is not None)
        if not config.delta >= 1 + epsilon_high:
            yield (
                f"delta={config.delta!r} is below 1 + epsilon_high={1 + epsilon_high:g}: the second clip of "
                "objective='dual-clip' must lie outside the first. Raise `delta`; the default is 3."
            )
    if preset.is_on_policy and config.num_iterations != 1:
        yield (
            f"num_iterations={config.num_iterations!r} contradicts objective={config.objective!r}, which makes one update "
            "per generation batch. Set it to 1."
        )


def _refuse_changed(config, names: Sequence[str], why: str) -> Iterator[str]:
    for name in names:
        usual = None if name in UNSET else default(GRPOConfig, name)
        if getattr(config, name) not in (usual, *_NEUTRAL.get(name, ())):
            yield f"{name}={getattr(config, name)!r} is not honoured: objective={config.objective!r} {why}."


def refused_by_tbpo(config) -> Iterator[tuple[str, str]]:
    """Options as they were given that have no meaning for TBPO, and why."""
    if config.loss_type not in (None, "tbpo"):
        yield f"loss_type={config.loss_type!r}", "TBPO replaces TRL's losses; `objective` takes the same names"
    for name, why in REFUSED_BY_TBPO.items():
        allowed = [default(GRPOConfig, name), *_NEUTRAL.get(name, ())]
        if name in UNSET:
            # TRL's own defaults do not say that a correction was asked for, unlike a clip offset.
            allowed = [None, *allowed] if name.startswith("vllm") else [None]
        # vLLM takes these for no objective.
        is_refused_already = config.use_vllm and name in RESHAPES_SAMPLING
        if getattr(config, name) not in allowed and not is_refused_already:
            yield f"{name}={getattr(config, name)!r}", why


def default(config_class: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(config_class) if f.name == name)
