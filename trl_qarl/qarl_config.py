"""Configuration of [`QaRLTrainer`]."""

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .objectives import OBJECTIVES, PRESETS
from .schemes import ALIGNMENTS, SCHEMES, get_scheme
from .vllm_kernels import LEARNER_KERNELS


__all__ = ["QaRLConfig"]

logger = logging.getLogger(__name__)

_GENERATION_KWARGS_THAT_RESHAPE = frozenset(
    [
        "bad_words_ids",
        "begin_suppress_tokens",
        "constraints",
        "diversity_penalty",
        "do_sample",
        "dola_layers",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "penalty_alpha",
        "prompt_lookup_num_tokens",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
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

# Of vLLM's SamplingParams: what reshapes the distribution, and what the trainer sets.
_VLLM_SAMPLING_KWARGS = frozenset(
    [
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_tokens",
        "n",
        "presence_penalty",
        "structured_outputs",
    ]
)

# Inherited options that no objective honours yet, with the reason and the fix.
_REFUSED = {
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
    "parallelism_config": "master weights and sequences split over processes are not supported in this release; use DDP "
    "(`accelerate launch --multi_gpu`)",
    "neftune_noise_alpha": "noise on the embeddings makes rollout, scoring and loss see different policies; leave it unset",
    "label_smoothing_factor": "the loss of sampled completions has no labels to smooth; leave it at 0",
    "enable_jit_checkpoint": "it can save between backward and optimizer step, and the resumed run would skip that step's "
    "completions; save with `save_steps`",
}

_MODEL_INIT_KWARGS_REFUSED = {
    "quantization_config": "the masters must stay in high precision; `scheme` quantizes the forward",
    **dict.fromkeys(
        ("tp_plan", "tp_size", "distributed_config"),
        "master weights split over processes are not supported in this release; use DDP (`accelerate launch "
        "--multi_gpu`)",
    ),
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

_RESHAPES_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")
_OF_ONE_LOSS = tuple(name for name in _REFUSED_BY_TBPO if name.startswith(("sapo_", "vespo_")))
_BOUNDS_OF_MISMATCH = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)

# Options whose default is `None` here, so that a value that was given is told from one that was not, and TRL's default.
_UNSET = (
    "epsilon",
    "importance_sampling_level",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)


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
            Quantization scheme of rollout and learner: `"w4a16"`, `"w8a16"`, `"w8a8"`, `"fp8"`, `"w4a8"`, or `"bf16"` for the
            unquantized baseline.
        group_size (`int`, *optional*):
            Group size for `"w4a16"`: 32, 64 or 128. Defaults to 128; layers it does not divide get the next smaller one.
        alignment (`str`, *optional*, defaults to `"aligned"`):
            Who runs the low-bit weights of `scheme`. `"aligned"` is QaRL: rollout and learner. `"rollout-only"` is quantized
            rollout training: the learner and its reference model run the high-precision masters. `"none"` runs everything
            as `scheme="bf16"` does; `scheme`, `group_size`, `exclude_modules` and `learner_kernel` then only name the runs
            that it is a baseline for.
        exclude_modules (`list[str]` or `str`, *optional*):
            Linear layers to keep in high precision, as in PEFT: names or last components, or a regular expression.
        learner_kernel (`str`, *optional*, defaults to `"auto"`):
            Whose low-bit products the learner uses: `"torch"`, `"vllm"` (the engine's own, where it can be borrowed), or
            `"auto"` for the better measured one, which is `"torch"` so far.
        objective (`str`, *optional*, defaults to `"tbpo"`):
            `"tbpo"`; one of the paper's comparison, `"grpo-tis"`, `"gspo"`, `"mis-gspo"`, `"positive-only"`,
            `"on-policy"`, `"dual-clip"`, which set TRL's options; or one of TRL's losses (`"grpo"`, `"dapo"`, `"sapo"`,
            ...). Replaces `loss_type`.
        negative_epsilon_low (`float`, *optional*, defaults to `3e-4`):
            TBPO: for negative advantages, the ratio counts from `1 - negative_epsilon_low` ...
        negative_epsilon_high (`float`, *optional*, defaults to `7e-4`):
            ... to `1 + negative_epsilon_high`; outside, the sequence contributes no gradient.
        mismatch_cap (`float`, *optional*, defaults to `2.0`):
            TBPO: bound `c > 1` of the mismatch weight, which stays in `[1/c, c]`.
        epsilon_high (`float`, *optional*):
            TBPO: for positive advantages, the ratio counts up to `1 + epsilon_high`; defaults to `4e-4`. For TRL's
            losses the meaning and default are TRL's; the GSPO objectives default to `4e-4`.
        epsilon (`float`, *optional*):
            For TRL's losses, defaults to TRL's `0.2`, and to `3e-4` for the GSPO objectives. TBPO does not use it.
        importance_sampling_level (`str`, *optional*):
            For TRL's losses, defaults to TRL's `"token"`. The GSPO objectives set it to `"sequence"`.
        vllm_importance_sampling_correction (`bool`, *optional*):
            For TRL's losses, defaults to TRL's `True`. The objectives of the paper's comparison set it.
        vllm_importance_sampling_mode (`str`, *optional*):
            For TRL's losses, defaults to TRL's `"sequence_mask"`. The objectives of the paper's comparison set it.
        loss_type (`str`, *optional*):
            Set by `objective`.
        mismatch_probe_steps (`int`, *optional*, defaults to `0`):
            Every how many updates the mismatch is also measured over the whole vocabulary, on a few sequences of the rollout:
            `mismatch/probe_kl` and `mismatch/probe_top1_agreement`. 0 never does.
        vllm_server_autostart (`bool`, *optional*, defaults to `False`):
            Start the server of `vllm_mode="server"` as a child process, and end it with training.
        vllm_request_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds that the server has to answer a request that does not generate, such as to take a chunk of weights. After
            that it counts as lost.
        vllm_generation_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that the server has to generate a batch of completions.
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
    alignment: str = field(
        default="aligned",
        metadata={
            "help": "Who runs the low-bit weights: 'aligned' (rollout and learner), 'rollout-only' (the learner runs its "
            "high-precision masters), or 'none' (everything runs as with scheme 'bf16').",
            "choices": list(ALIGNMENTS),
        },
    )
    exclude_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Linear layers to keep in high precision: names or last components of names (from Python, a string "
            "is a regular expression over the whole name)."
        },
    )
    learner_kernel: str = field(
        default="auto",
        metadata={
            "help": "Whose low-bit products the learner uses: 'torch', 'vllm' (the engine's own, where it can be borrowed), "
            "or 'auto' for the better measured one.",
            "choices": list(LEARNER_KERNELS),
        },
    )
    objective: str = field(
        default="tbpo",
        metadata={
            "help": "Objective: 'tbpo', one of the paper's comparison ('grpo-tis', 'gspo', 'mis-gspo', 'positive-only', "
            "'on-policy', 'dual-clip') or one of TRL's losses. Replaces `loss_type`.",
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
        metadata={
            "help": "Clip offset of TRL's losses, 0.2 unless given (GSPO objectives: 3e-4). TBPO does not use it."
        },
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
    vllm_importance_sampling_correction: bool | None = field(
        default=None,
        metadata={
            "help": "For TRL's losses: whether vLLM rollouts are corrected for their mismatch, true unless given. The other "
            "objectives decide it themselves."
        },
    )
    vllm_importance_sampling_mode: str | None = field(
        default=None,
        metadata={
            "help": "For TRL's losses: how vLLM rollouts are corrected, 'sequence_mask' unless given. The other objectives "
            "decide it themselves."
        },
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
    mismatch_probe_steps: int = field(
        default=0,
        metadata={
            "help": "Every how many updates the mismatch is also measured over the whole vocabulary, on a few sequences of "
            "the rollout. 0 never does."
        },
    )
    vllm_server_autostart: bool = field(
        default=False,
        metadata={
            "help": "Start the vLLM server of `vllm_mode='server'` as a child process, and end it with training. Its log "
            "is vllm_server.log in the output directory."
        },
    )
    vllm_request_timeout: float = field(
        default=300.0,
        metadata={
            "help": "Seconds that the vLLM server has to answer a request that does not generate, such as to take a chunk of "
            "weights. After that it counts as lost."
        },
    )
    vllm_generation_timeout: float = field(
        default=1800.0,
        metadata={"help": "Seconds that the vLLM server has to generate a batch of completions."},
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay."})

    def __post_init__(self):
        self._check_scheme()
        self._check_objective()
        self._check_refused()
        self._check_probe()
        self._check_vllm()
        is_on_policy = self.objective in PRESETS and PRESETS[self.objective].is_on_policy
        if is_on_policy:
            self._one_update_per_batch()
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
        if is_on_policy:
            self._check_one_update_per_batch()
        # Some options switch on others, as `torch_compile_backend` does with `torch_compile`.
        _check_refused_by_all(self)

    def _check_scheme(self) -> None:
        get_scheme(self.scheme, self.group_size)
        if self.alignment not in ALIGNMENTS:
            raise ValueError(f"alignment={self.alignment!r} is unknown. Choose one of {list(ALIGNMENTS)}.")
        if self.alignment == "rollout-only" and self.scheme == "bf16":
            raise ValueError(
                "alignment='rollout-only' with scheme='bf16': there is no low-bit weight for the rollout to run. Choose a "
                "quantized scheme, or alignment='none'."
            )
        if self.learner_kernel not in LEARNER_KERNELS:
            raise ValueError(
                f"learner_kernel={self.learner_kernel!r} is unknown. Choose one of {list(LEARNER_KERNELS)}."
            )
        if self.exclude_modules and self.scheme == "bf16":
            raise ValueError(
                f"exclude_modules={self.exclude_modules!r} was given, but scheme 'bf16' quantizes nothing. Remove it."
            )

    def _check_objective(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"Unknown objective {self.objective!r}. Choose one of {list(OBJECTIVES)}.")
        loss_type = "grpo" if self.objective in PRESETS else self.objective
        if self.loss_type not in (None, loss_type):
            raise ValueError(
                f"loss_type={self.loss_type!r} contradicts objective={self.objective!r}. Remove `loss_type`; "
                "`objective` takes the same names."
            )
        self.loss_type = loss_type
        if self.objective in PRESETS:
            self._apply_preset()
        if self.objective != "tbpo":
            self._fill_unset()
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

    def _apply_preset(self) -> None:
        preset = PRESETS[self.objective]
        for name, value in preset.options.items():
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} contradicts objective={self.objective!r}, which is {name}={value!r}. "
                    "Remove it, or use objective='grpo', which takes every option of TRL's."
                )
            setattr(self, name, value)
        for name, value in preset.defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if not preset.corrects_mismatch:
            refused, why = _BOUNDS_OF_MISMATCH, "does not correct the mismatch; `mis-gspo` and `grpo-tis` do"
            self._refuse_changed(refused, why)
        else:
            self._refuse_changed(
                _RESHAPES_SAMPLING,
                "weighs by the sampling log-probs, which would not be those of the distribution that was sampled from; "
                "leave it at its default",
            )
        self._refuse_changed(_OF_ONE_LOSS, "does not use it; it belongs to TRL's loss of that name")
        if self.objective == "dual-clip":
            epsilon_high = next(value for value in (self.epsilon_high, self.epsilon, 0.2) if value is not None)
            if not self.delta >= 1 + epsilon_high:
                raise ValueError(
                    f"delta={self.delta!r} is below 1 + epsilon_high={1 + epsilon_high:g}: the second clip of "
                    "objective='dual-clip' must lie outside the first. Raise `delta`; the default is 3."
                )

    def _refuse_changed(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            default = None if name in _UNSET else _default(GRPOConfig, name)
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not honoured: objective={self.objective!r} {why}."
                )

    def _fill_unset(self) -> None:
        for name in _UNSET:
            is_unused = name == "vllm_importance_sampling_mode" and not self.vllm_importance_sampling_correction
            if getattr(self, name) is None and not is_unused:
                setattr(self, name, _default(GRPOConfig, name))

    def _one_update_per_batch(self) -> None:
        if self.num_iterations != 1:
            raise ValueError(
                f"num_iterations={self.num_iterations!r} contradicts objective={self.objective!r}, which makes one update "
                "per generation batch. Set it to 1."
            )
        if self.steps_per_generation is None and self.generation_batch_size is None:
            self.steps_per_generation = self.gradient_accumulation_steps

    def _check_one_update_per_batch(self) -> None:
        if self.steps_per_generation != self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} (generation_batch_size={self.generation_batch_size}) "
                f"contradicts objective={self.objective!r}, which makes one update per generation batch: it must equal "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}. Remove it."
            )

    def _check_probe(self) -> None:
        if self.mismatch_probe_steps < 0:
            raise ValueError(
                f"mismatch_probe_steps={self.mismatch_probe_steps} must be 0 (never) or a number of updates."
            )
        if not self.mismatch_probe_steps or not self.use_vllm or self.vllm_mode != "colocate":
            return
        for name, usual in (("vllm_enable_sleep_mode", False), ("vllm_tensor_parallel_size", 1)):
            if getattr(self, name) != usual:
                raise ValueError(
                    f"mismatch_probe_steps={self.mismatch_probe_steps} asks the engine between rollouts, which {name}="
                    f"{getattr(self, name)!r} does not allow: it sleeps, or needs all processes. Leave out one of them."
                )

    def _check_vllm(self) -> None:
        if not self.use_vllm:
            if self.vllm_server_autostart:
                raise ValueError("vllm_server_autostart=True was given, but use_vllm=False. Set `use_vllm=True`.")
            return
        if self.vllm_mode not in ("server", "colocate"):
            raise ValueError(f"vllm_mode={self.vllm_mode!r} is unknown. Choose 'server' or 'colocate'.")
        if self.vllm_server_autostart and (self.vllm_mode != "server" or self.vllm_server_base_url is not None):
            raise ValueError(
                "vllm_server_autostart=True starts a server on this machine, which contradicts "
                f"vllm_mode={self.vllm_mode!r}, vllm_server_base_url={self.vllm_server_base_url!r}. Use vllm_mode='server' "
                "and choose its port with `vllm_server_port`."
            )
        for name in ("vllm_request_timeout", "vllm_generation_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a positive number of seconds: a server that never answers would hold "
                    f"the run for good. The default is {_default(QaRLConfig, name):g}."
                )
        if self.vllm_model_impl not in ("vllm", "auto"):
            raise ValueError(
                f"vllm_model_impl={self.vllm_model_impl!r} is not supported: the audit knows the parameters of vLLM's own "
                "models. Use 'vllm'."
            )
        if self.vllm_enable_sleep_mode and self.use_cpu:
            raise ValueError(
                "vllm_enable_sleep_mode=True with use_cpu=True: vLLM has sleep mode on GPUs only. Set it to `False`."
            )
        if self.vllm_server_autostart and self.vllm_server_host not in ("0.0.0.0", "127.0.0.1", "localhost"):
            raise ValueError(
                f"vllm_server_host={self.vllm_server_host!r} with vllm_server_autostart=True: the server is started on this "
                "machine and listens on 127.0.0.1. Remove it."
            )
        reshaping = sorted(_VLLM_SAMPLING_KWARGS & _as_dict(self.generation_kwargs).keys())
        if reshaping:
            raise ValueError(
                f"generation_kwargs contains {reshaping}, which change what vLLM samples or returns, so sampling log-probs and "
                "the learner's would differ. Remove them."
            )
        if self.vllm_structured_outputs_regex is not None:
            raise ValueError(
                "vllm_structured_outputs_regex masks tokens while sampling, so sampling log-probs and the learner's would "
                "differ. Remove it."
            )
        for name, neutral in (
            ("top_p", (1.0,)),
            ("top_k", (0, -1)),
            ("min_p", (None, 0.0)),
            ("repetition_penalty", (1.0,)),
        ):
            value = getattr(self, name)
            if value not in neutral:
                raise ValueError(
                    f"{name}={value!r} with use_vllm=True: vLLM's log-probs would be those of the reshaped distribution, the "
                    f"learner's those of the whole one, and every importance weight would be biased. Use {neutral[0]!r}; "
                    "`temperature` is applied on both sides."
                )

    def _check_refused(self) -> None:
        _check_refused_by_all(self)
        for name, why in _MODEL_INIT_KWARGS_REFUSED.items():
            if _as_dict(self.model_init_kwargs).get(name) is not None:
                raise ValueError(f"model_init_kwargs[{name!r}] is not supported: {why}.")
        reshaping = sorted(_GENERATION_KWARGS_THAT_RESHAPE & _as_dict(self.generation_kwargs).keys())
        if reshaping:
            raise ValueError(
                f"generation_kwargs contains {reshaping}, which change what is sampled and from which distribution, so "
                "the recorded sampling log-probs would be wrong. Remove them; `temperature`, `top_p`, `top_k`, `min_p` "
                "and `repetition_penalty` are options of their own."
            )
        if self.optim == "muon" and self.optim_args:
            raise ValueError(
                f"optim_args={self.optim_args!r} is not honoured by optim='muon', which has the options `learning_rate`, "
                "`weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon`. Remove it or choose another `optim`."
            )
        if self.objective != "tbpo":
            return
        for name, why in _REFUSED_BY_TBPO.items():
            allowed = [_default(GRPOConfig, name)]
            if name in _UNSET:
                # TRL's own defaults do not say that a correction was asked for, unlike a clip offset.
                allowed = [None, *allowed] if name.startswith("vllm") else [None]
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not honoured by objective='tbpo': {why}.")
        for name in _UNSET:
            if name.startswith("vllm"):
                setattr(self, name, _default(GRPOConfig, name))


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
