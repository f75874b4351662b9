"""Configuration of [`QaRLTrainer`]."""

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .schemes import SCHEMES, get_scheme


__all__ = ["OBJECTIVES", "QaRLConfig"]

logger = logging.getLogger(__name__)

OBJECTIVES = ("tbpo", "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TBPO, or one of TRL's own losses by its `loss_type` name."""

_GENERATION_KWARGS_THAT_RESHAPE = frozenset(
    [
        "bad_words_ids",
        "constraints",
        "do_sample",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "penalty_alpha",
        "renormalize_logits",
        "repetition_penalty",
        "sequence_bias",
        "suppress_tokens",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "watermarking_config",
    ]
)

# Inherited options that no objective honours yet, with the reason and the fix.
_REFUSED = {
    "use_vllm": "rollouts come from the quantized modules themselves in this release, and vLLM arrives in the next one; "
    "set `use_vllm=False`",
    "use_transformers_continuous_batching": "continuous batching casts the master weights to 16 bits and returns no "
    "sampling log-probs; set it to `False`",
    "use_transformers_paged": "continuous batching casts the master weights to 16 bits and returns no sampling "
    "log-probs; set it to `False`",
    "torch_compile": "the low-bit weight is cached by the version of its master, which a compiled graph does not see; "
    "set `torch_compile=False`",
    "bf16_full_eval": "full 16-bit evaluation casts the master weights in place; `bf16=True` already evaluates in bf16",
    "fp16_full_eval": "full 16-bit evaluation casts the master weights in place; `bf16=True` already evaluates in bf16",
    "fsdp": "sharded master weights are not supported in this release; use DDP (`accelerate launch --multi_gpu`)",
    "deepspeed": "sharded master weights are not supported in this release; use DDP (`accelerate launch --multi_gpu`)",
}

# Inherited options that TBPO replaces or that have no meaning for one clipped ratio per sequence.
_REFUSED_BY_TBPO = {
    "epsilon": "TBPO's bounds are `epsilon_high`, `negative_epsilon_low` and `negative_epsilon_high`",
    "delta": "the upper bound for negative advantages is `negative_epsilon_high`",
    "importance_sampling_level": "TBPO's ratio is the geometric mean over the sequence; leave it unset",
    "sapo_temperature_neg": "it belongs to `objective='sapo'`",
    "sapo_temperature_pos": "it belongs to `objective='sapo'`",
    "vespo_k_pos": "it belongs to `objective='vespo'`",
    "vespo_lambda_pos": "it belongs to `objective='vespo'`",
    "vespo_k_neg": "it belongs to `objective='vespo'`",
    "vespo_lambda_neg": "it belongs to `objective='vespo'`",
    "off_policy_mask_threshold": "TBPO drops off-policy sequences by its band; narrow `negative_epsilon_low/high` instead",
    "top_entropy_quantile": "a token mask would change the geometric mean; use `objective='grpo'`",
    "entropy_coef": "the entropy bonus is a token-level term; use `objective='grpo'`",
    "use_adaptive_entropy": "the entropy bonus is a token-level term; use `objective='grpo'`",
    "vllm_importance_sampling_correction": "the mismatch weight is part of TBPO; its bound is `mismatch_cap`",
    "vllm_importance_sampling_mode": "TBPO's mismatch weight is the sequence's geometric mean; its bound is `mismatch_cap`",
    "vllm_importance_sampling_clip_max": "TBPO's mismatch weight is bounded by `mismatch_cap`",
    "vllm_importance_sampling_clip_min": "TBPO's mismatch weight is bounded by `mismatch_cap`",
    "vllm_importance_sampling_cap": "TBPO's mismatch weight is bounded by `mismatch_cap`",
    "top_p": "it truncates the sampling distribution, so sampling log-probs and the learner's would differ; use 1.0",
    "top_k": "it truncates the sampling distribution, so sampling log-probs and the learner's would differ; use 0",
    "min_p": "it truncates the sampling distribution, so sampling log-probs and the learner's would differ; leave it unset",
    "repetition_penalty": "it reshapes the sampling distribution, so sampling log-probs and the learner's would differ; "
    "use 1.0",
}


@dataclass
class QaRLConfig(GRPOConfig):
    # docstyle-ignore
    r"""
    Configuration class for the [`QaRLTrainer`].

    It inherits every option of [`~trl.GRPOConfig`]. Defaults that differ are those of the paper's Table 2
    (https://huggingface.co/papers/2604.07853): `optim="muon"`, `weight_decay=0.01`, and eight updates per generation
    batch (`steps_per_generation=8 * gradient_accumulation_steps` unless one of `steps_per_generation` and
    `generation_batch_size` is given). The table's batch sizes and lengths (512 completions in mini-batches of 64, 2,048
    and 16,384 tokens) depend on the hardware and stay at TRL's values.

    An inherited option that is not honoured raises a `ValueError` that names the fix.

    Parameters:
        scheme (`str`, *optional*, defaults to `"w4a16"`):
            Quantization scheme of rollout and learner: `"w4a16"`, `"w8a16"`, `"w8a8"`, `"fp8"`, or `"bf16"` for the
            unquantized baseline.
        group_size (`int`, *optional*):
            Group size for `"w4a16"`: 32, 64 or 128. Defaults to 128; layers it does not divide get the next smaller one.
        exclude_modules (`list[str]` or `str`, *optional*):
            Linear layers to keep in high precision, as in PEFT: names or last components, or a regular expression.
        objective (`str`, *optional*, defaults to `"tbpo"`):
            `"tbpo"`, or one of TRL's losses (`"grpo"`, `"dapo"`, `"dr_grpo"`, ...). Replaces `loss_type`.
        negative_epsilon_low (`float`, *optional*, defaults to `3e-4`):
            TBPO: for negative advantages, the ratio counts from `1 - negative_epsilon_low` ...
        negative_epsilon_high (`float`, *optional*, defaults to `7e-4`):
            ... to `1 + negative_epsilon_high`; outside, the sequence contributes no gradient.
        mismatch_cap (`float`, *optional*, defaults to `2.0`):
            TBPO: bound `c > 1` of the mismatch weight, which stays in `[1/c, c]`.
        epsilon_high (`float`, *optional*):
            TBPO: for positive advantages, the ratio counts up to `1 + epsilon_high`; defaults to `4e-4`. For TRL's
            losses the meaning and default are TRL's.
        epsilon (`float`, *optional*):
            For TRL's losses, defaults to TRL's `0.2`. TBPO does not use it.
        importance_sampling_level (`str`, *optional*):
            For TRL's losses, defaults to TRL's `"token"`; `"sequence"` with `objective="grpo"` is GSPO.
        loss_type (`str`, *optional*):
            Set by `objective`.
        optim (`str`, *optional*, defaults to `"muon"`):
            `"muon"` for `torch.optim.Muon` on the hidden matrices and AdamW on everything else, or any optimizer name
            of [`~transformers.TrainingArguments`].
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS

    scheme: str = field(
        default="w4a16",
        metadata={
            "help": "Quantization scheme of rollout and learner. 'bf16' is the unquantized baseline.",
            "choices": list(SCHEMES),
        },
    )
    group_size: int | None = field(
        default=None,
        metadata={
            "help": "Group size for 'w4a16': 32, 64 or 128. Defaults to 128; layers it does not divide get the next "
            "smaller one."
        },
    )
    exclude_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Linear layers to keep in high precision: names or last components of names (from Python, a string "
            "is a regular expression over the whole name)."
        },
    )
    objective: str = field(
        default="tbpo",
        metadata={
            "help": "Objective: 'tbpo' or one of TRL's losses. Replaces `loss_type`.",
            "choices": list(OBJECTIVES),
        },
    )
    negative_epsilon_low: float = field(
        default=3e-4,
        metadata={"help": "TBPO: lower offset of the trust band for negative advantages."},
    )
    negative_epsilon_high: float = field(
        default=7e-4,
        metadata={"help": "TBPO: upper offset of the trust band for negative advantages."},
    )
    mismatch_cap: float = field(
        default=2.0,
        metadata={"help": "TBPO: bound c > 1 of the mismatch weight, which stays in [1/c, c]."},
    )
    epsilon: float | None = field(
        default=None,
        metadata={"help": "Clip offset of TRL's losses, 0.2 unless given. TBPO does not use it."},
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "TBPO: upper offset of the trust band for positive advantages, 4e-4 unless given. For TRL's losses, "
            "as in TRL."
        },
    )
    importance_sampling_level: str | None = field(
        default=None,
        metadata={"help": "For TRL's losses: 'token' (default) or 'sequence' (GSPO). TBPO is always sequence-level."},
    )
    loss_type: str | None = field(
        default=None,
        metadata={"help": "Set by `objective`; give that one instead."},
    )
    optim: str = field(
        default="muon",
        metadata={
            "help": "'muon' (torch.optim.Muon on hidden matrices, AdamW on the rest) or an optimizer name of "
            "transformers, such as 'adamw_torch'."
        },
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay."})

    def __post_init__(self):
        self._check_scheme()
        self._check_objective()
        self._check_refused()
        if self.steps_per_generation is None and self.generation_batch_size is None:
            self.steps_per_generation = 8 * self.gradient_accumulation_steps
        if self.fp16:
            logger.warning(
                "fp16=True: the paper saw fp16 with dynamic loss scaling underflow to NaN under quantized training "
                "(arXiv 2604.07853). Prefer bf16=True."
            )
        # transformers knows no such optimizer name; the trainer builds it.
        is_muon = self.optim == "muon"
        if is_muon:
            self.optim = "adamw_torch"
        super().__post_init__()
        if is_muon:
            self.optim = "muon"
        # Some options switch on others, as `torch_compile_backend` does with `torch_compile`.
        _check_refused_by_all(self)

    def _check_scheme(self) -> None:
        get_scheme(self.scheme, self.group_size)
        if self.exclude_modules and self.scheme == "bf16":
            raise ValueError(
                f"exclude_modules={self.exclude_modules!r} was given, but scheme 'bf16' quantizes nothing. Remove it."
            )

    def _check_objective(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"Unknown objective {self.objective!r}. Choose one of {list(OBJECTIVES)}.")
        if self.loss_type not in (None, self.objective):
            raise ValueError(
                f"loss_type={self.loss_type!r} contradicts objective={self.objective!r}. Remove `loss_type`; "
                "`objective` takes the same names."
            )
        self.loss_type = self.objective
        if self.objective != "tbpo":
            self.epsilon = 0.2 if self.epsilon is None else self.epsilon
            self.importance_sampling_level = self.importance_sampling_level or "token"
            if self.importance_sampling_level not in ("token", "sequence"):
                raise ValueError(
                    f"importance_sampling_level={self.importance_sampling_level!r} is unknown. Choose 'token' or "
                    "'sequence'."
                )
            for name in ("negative_epsilon_low", "negative_epsilon_high", "mismatch_cap"):
                if getattr(self, name) != _default(QaRLConfig, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} belongs to objective='tbpo', but objective={self.objective!r}. "
                        "Remove it or change the objective."
                    )
            return
        self.epsilon_high = 4e-4 if self.epsilon_high is None else self.epsilon_high
        for name, upper in (
            ("epsilon_high", None),
            ("negative_epsilon_high", None),
            ("negative_epsilon_low", 1.0),
        ):
            value = getattr(self, name)
            if not value >= 0 or (upper is not None and value > upper):
                bound = "at least 0" if upper is None else f"between 0 and {upper:g}"
                raise ValueError(f"{name}={value!r} must be {bound}: it is an offset from a ratio of 1.")
        if not self.mismatch_cap > 1:
            raise ValueError(
                f"mismatch_cap={self.mismatch_cap!r} must be greater than 1: the weight is bounded to [1/c, c]. The "
                "paper uses 2."
            )

    def _check_refused(self) -> None:
        _check_refused_by_all(self)
        if "quantization_config" in _as_dict(self.model_init_kwargs):
            raise ValueError(
                "model_init_kwargs contains a `quantization_config`: the master weights must stay in high precision. "
                "Remove it; `scheme` quantizes the forward."
            )
        if self.objective != "tbpo":
            return
        for name, why in _REFUSED_BY_TBPO.items():
            default = None if name in ("epsilon", "importance_sampling_level") else _default(GRPOConfig, name)
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} is not honoured by objective='tbpo': {why}.")
        reshaping = sorted(_GENERATION_KWARGS_THAT_RESHAPE & _as_dict(self.generation_kwargs).keys())
        if reshaping:
            raise ValueError(
                f"generation_kwargs contains {reshaping}, which change the sampling distribution, so sampling log-probs "
                "and the learner's would differ under objective='tbpo'. Remove them."
            )


def _check_refused_by_all(config: QaRLConfig) -> None:
    for name, why in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"{name}={getattr(config, name)!r} is not supported: {why}.")


def _default(config_class: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(config_class) if f.name == name)


def _as_dict(value: dict | str | None) -> dict:
    # From the command line, dictionaries arrive as JSON text and are parsed by the base class later.
    if isinstance(value, str):
        import json

        return json.loads(value) if value.strip().startswith("{") else {}
    return value or {}
