"""What is wrong with a [`QaRLConfig`]: each function yields its problems, and none changes the configuration."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig

from .hub import HUB_EXPORTS, problem_of_access, problem_of_name
from .inherited_options import (
    BOUNDS_OF_MISMATCH,
    GENERATION_KWARGS_THAT_RESHAPE,
    LORA_MODES,
    MODEL_INIT_KWARGS_REFUSED,
    OF_ONE_LOSS,
    OF_TRLS_LOSS,
    REFUSED,
    REFUSED_BY_TBPO,
    RESHAPES_SAMPLING,
    UNSET,
    VLLM_SAMPLING_KWARGS,
)
from .numerics.kernels import SCHEMES as ENGINE_SCHEMES
from .objectives.presets import OBJECTIVES, OWN_OPTIONS, PRESETS
from .quantization.schemes import get_scheme


__all__ = [
    "EXACT",
    "NUMERICS",
    "as_dict",
    "check_adapters",
    "check_hub",
    "check_inherited",
    "check_numerics",
    "check_objective",
    "check_precision",
    "check_probe",
    "check_ratios",
    "check_scheme",
    "check_vllm",
    "contradicts_engine_numerics",
    "default",
    "low_precision_masters",
    "raise_problems",
    "raise_problems_of_config",
    "refused_by_all",
    "refused_by_tbpo",
]

NUMERICS = ("fast", "engine")
EXACT = ("require", "warn")

# Beside TRL's own defaults.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"min_p": (0.0,)}


def check_scheme(config) -> Iterator[str]:
    try:
        get_scheme(config.scheme, config.group_size)
    except ValueError as error:
        yield str(error)
    if config.scheme == "bf16" and not config.quantize_learner:
        yield (
            "quantize_learner=False with scheme='bf16': there is no low-bit weight for the rollout to run. Choose a "
            "quantized scheme, or leave out `quantize_learner`."
        )
    if config.exclude_modules and config.scheme == "bf16":
        yield f"exclude_modules={config.exclude_modules!r} was given, but scheme 'bf16' quantizes nothing. Remove it."


def check_numerics(config) -> Iterator[str]:
    for name, known in (("numerics", NUMERICS), ("exact", EXACT)):
        if getattr(config, name) not in (*known, None):
            yield f"{name}={getattr(config, name)!r} is unknown. Choose one of {list(known)}."
    if config.numerics == "engine":
        for option, reason in contradicts_engine_numerics(config):
            yield f"numerics='engine' contradicts {option}: {reason}, or use numerics='fast'."


def contradicts_engine_numerics(config) -> Iterator[tuple[str, str]]:
    """Options with which a learner cannot compute as the engine does, as `name=value`, and why."""
    for is_met, option, reason in (
        (
            config.use_cpu,
            "use_cpu=False",
            "the engine's operations have gradients on CPUs alone so far. Set `use_cpu=True`",
        ),
        (config.bf16 or not config.use_cpu, f"bf16={config.bf16}", "they exist in bfloat16. Set `bf16=True`"),
        (
            config.quantize_learner,
            "quantize_learner=False",
            "the learner would compute with other weights than the engine. Leave it out",
        ),
        (
            not config.is_quantized or config.scheme in ENGINE_SCHEMES,
            f"scheme={config.scheme!r}",
            f"its product has not been compared with the engine's; those of {['bf16', *ENGINE_SCHEMES]} have",
        ),
        (
            not config.cast_lm_head_to_fp32,
            "cast_lm_head_to_fp32=True",
            "the engine's output head computes in bfloat16. Remove it",
        ),
        (
            config.cache_implementation is None,
            f"cache_implementation={config.cache_implementation!r}",
            "the engine's attention reads transformers' default cache alone. Remove it",
        ),
        (
            config.vllm_tensor_parallel_size == 1 or not config.use_vllm,
            f"vllm_tensor_parallel_size={config.vllm_tensor_parallel_size}",
            "sums over several processes are rounded otherwise. Set it to 1",
        ),
    ):
        if not is_met:
            yield option, reason


def check_adapters(config) -> Iterator[str]:
    if config.lora_mode not in LORA_MODES:
        yield f"lora_mode={config.lora_mode!r} is unknown. Choose one of {list(LORA_MODES)}."


def check_precision(config) -> Iterator[str]:
    if config.fp16 and config.is_quantized:
        yield (
            f"fp16=True with scheme={config.scheme!r}: under quantized training float16 with loss scaling underflows to "
            "NaN (arXiv 2604.07853). Set `bf16=True`, or `bf16=False` for float32, and leave out `fp16`."
        )
    elif config.fp16 and config.use_cpu:
        yield (
            "fp16=True with use_cpu=True: accelerate has no float16 autocast on CPUs and computes in float32 without a "
            "word. Set `bf16=True`, or `bf16=False` for float32, and leave out `fp16`."
        )


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


def check_probe(config) -> Iterator[str]:
    if config.mismatch_probe_steps < 0:
        yield f"mismatch_probe_steps={config.mismatch_probe_steps} must be 0 (never) or a number of updates."
    if not config.mismatch_probe_steps or not config.use_vllm or config.vllm_mode != "colocate":
        return
    for name, usual in (("vllm_enable_sleep_mode", False), ("vllm_tensor_parallel_size", 1)):
        if getattr(config, name) != usual:
            yield (
                f"mismatch_probe_steps={config.mismatch_probe_steps} asks the engine between rollouts, which {name}="
                f"{getattr(config, name)!r} does not allow: it sleeps, or needs all processes. Leave out one of them."
            )


def check_vllm(config) -> Iterator[str]:
    has_own_server = config.use_vllm and config.vllm_mode == "server" and not config.vllm_server_autostart
    if config.vllm_token_file is not None and not has_own_server:
        yield (
            f"vllm_token_file={config.vllm_token_file!r} is for a server that you start yourself, but use_vllm={config.use_vllm}, "
            f"vllm_mode={config.vllm_mode!r}, vllm_server_autostart={config.vllm_server_autostart}. Remove it."
        )
    if not config.use_vllm:
        if config.vllm_server_autostart:
            yield "vllm_server_autostart=True was given, but use_vllm=False. Set `use_vllm=True`."
        return
    if config.vllm_mode not in ("server", "colocate"):
        yield f"vllm_mode={config.vllm_mode!r} is unknown. Choose 'server' or 'colocate'."
    elif config.vllm_server_autostart and (config.vllm_mode != "server" or config.vllm_server_base_url is not None):
        yield (
            "vllm_server_autostart=True starts a server on this machine, which contradicts "
            f"vllm_mode={config.vllm_mode!r}, vllm_server_base_url={config.vllm_server_base_url!r}. Use vllm_mode='server' "
            "and choose its port with `vllm_server_port`."
        )
    for name in ("vllm_request_timeout", "vllm_generation_timeout"):
        if not 0 < getattr(config, name) < math.inf:
            yield (
                f"{name}={getattr(config, name)} must be a positive number of seconds: a server that never answers would hold "
                f"the run for good. The default is {default(type(config), name):g}."
            )
    if config.vllm_model_impl not in ("vllm", "auto"):
        yield (
            f"vllm_model_impl={config.vllm_model_impl!r} is not supported: the audit knows the parameters of vLLM's own "
            "models. Use 'vllm'."
        )
    if config.vllm_enable_sleep_mode and config.use_cpu:
        yield ("vllm_enable_sleep_mode=True with use_cpu=True: vLLM has sleep mode on GPUs only. Set it to `False`.")
    if config.vllm_server_autostart and config.vllm_server_host not in ("0.0.0.0", "127.0.0.1", "localhost"):
        yield (
            f"vllm_server_host={config.vllm_server_host!r} with vllm_server_autostart=True: the server is started on this "
            "machine and listens on 127.0.0.1. Remove it."
        )
    reshaping = sorted(VLLM_SAMPLING_KWARGS & as_dict(config.generation_kwargs).keys())
    if reshaping:
        yield (
            f"generation_kwargs contains {reshaping}, which change what vLLM samples or returns, so sampling log-probs and "
            "the learner's would differ. Remove them."
        )
    if config.vllm_structured_outputs_regex is not None:
        yield (
            "vllm_structured_outputs_regex masks tokens while sampling, so sampling log-probs and the learner's would "
            "differ. Remove it."
        )
    for name, neutral in (
        ("top_p", (1.0,)),
        ("top_k", (0, -1)),
        ("min_p", (None, 0.0)),
        ("repetition_penalty", (1.0,)),
    ):
        value = getattr(config, name)
        if value not in neutral:
            yield (
                f"{name}={value!r} with use_vllm=True: vLLM's log-probs would be those of the reshaped distribution, the "
                f"learner's those of the whole one, and every importance weight would be biased. Use {neutral[0]!r}; "
                "`temperature` is applied on both sides."
            )


def check_hub(config) -> Iterator[str]:
    if config.hub_export not in HUB_EXPORTS:
        yield f"hub_export={config.hub_export!r} is unknown. Choose one of {list(HUB_EXPORTS)}."
    name = config.hub_model_id
    if name is None and config.push_to_hub:
        name = Path(config.output_dir or "trainer_output").absolute().name
    problem = name is not None and problem_of_name(name, config.hub_export)
    if problem:
        yield problem
    problem = config.push_to_hub and problem_of_access(config.hub_token)
    if problem:
        yield problem


def check_inherited(config) -> Iterator[str]:
    yield from refused_by_all(config)
    for name, why in MODEL_INIT_KWARGS_REFUSED.items():
        if as_dict(config.model_init_kwargs).get(name) is not None:
            yield f"model_init_kwargs[{name!r}] is not supported: {why}."
    reshaping = sorted(GENERATION_KWARGS_THAT_RESHAPE & as_dict(config.generation_kwargs).keys())
    if reshaping:
        yield (
            f"generation_kwargs contains {reshaping}, which change what is sampled and from which distribution, so "
            "the recorded sampling log-probs would be wrong. Remove them; `temperature`, `top_p`, `top_k`, `min_p` "
            "and `repetition_penalty` are options of their own."
        )
    if config.optim in ("lomo", "adalomo"):
        yield (
            f"optim={str(config.optim)!r} is not supported: it writes to the weights during the backward pass, while low-bit "
            "weights of the old values are in use. Use 'adamw_8bit' or 'adamw_torch_4bit', whose state is small too."
        )
    if config.optim == "muon" and config.optim_args:
        yield (
            f"optim_args={config.optim_args!r} is not honoured by optim='muon', which has the options `learning_rate`, "
            "`weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon`. Remove it or choose another `optim`."
        )


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


def refused_by_all(config) -> Iterator[str]:
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            yield f"{name}={getattr(config, name)!r} is not supported: {why}."


def raise_problems(problems: list[str]) -> None:
    """Raise one `ValueError` that lists all `problems`, if there are any."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError("\n".join([f"{len(problems)} problems:", *(f"- {problem}" for problem in problems)]))


def raise_problems_of_config(problems: list[str], not_of_tbpo: list[tuple[str, str]], objective: str) -> None:
    if len(not_of_tbpo) == 1:
        option, why = not_of_tbpo[0]
        problems = [*problems, f"{option} is not honoured by objective='tbpo': {why}."]
    elif not_of_tbpo:
        lines = [f"{len(not_of_tbpo)} options do not apply to objective='tbpo':"]
        lines += [f"- {option}: {why}." for option, why in not_of_tbpo]
        lines += [f"objective={objective!r} takes them as TRL does."]
        if problems:
            lines += ["Apart from them:", *(f"- {problem}" for problem in problems)]
        raise ValueError("\n".join(lines))
    raise_problems(problems)


def low_precision_masters(config, dtype: torch.dtype | str | None) -> str | None:
    """What is wrong with masters in `dtype`: nothing where it is float32, or known once the weights are loaded only."""
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or dtype.itemsize >= 4:
        return None
    name = str(dtype).removeprefix("torch.")
    # The distance of neighbouring values at 0.02, a usual weight.
    spacing = torch.finfo(dtype).eps * 2**-6
    text = (
        f"The masters are {name}, where a weight of 0.02 moves in steps of {spacing:.1e}: updates of learning_rate="
        f"{config.learning_rate:g} round to nothing. Load the model in float32 (TRL's default: leave out `dtype`); `bf16=True` "
        "still computes in bfloat16."
    )
    if dtype is torch.float16 and config.is_quantized:
        return f"{text} Float16 masters also become NaN within a few updates of scheme={config.scheme!r}."
    if config.allow_low_precision_masters:
        return None
    return f"{text} `allow_low_precision_masters=True` trains them nevertheless."


def default(config_class: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(config_class) if f.name == name)


def as_dict(value: dict | str | None) -> dict:
    # From the command line, dictionaries arrive as JSON text and are parsed by the base class later.
    if isinstance(value, str):
        return json.loads(value) if value.strip().startswith("{") else {}
    return value or {}
