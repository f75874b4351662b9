"""Configuration of [`QaRLTrainer`]."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import is_torch_xla_available
from trl import GRPOConfig

from .inherited_options import (
    BOUNDS_OF_MISMATCH,
    GENERATION_KWARGS_THAT_RESHAPE,
    MODEL_INIT_KWARGS_REFUSED,
    OF_ONE_LOSS,
    REFUSED,
    REFUSED_BY_TBPO,
    RESHAPES_SAMPLING,
    UNSET,
    VLLM_SAMPLING_KWARGS,
)
from .numerics.kernels import SCHEMES as ENGINE_SCHEMES
from .objectives.presets import OBJECTIVES, PRESETS
from .quantization.gemm import has_fast_bf16
from .quantization.schemes import ALIGNMENTS, SCHEMES, get_scheme


__all__ = ["QaRLConfig"]

logger = logging.getLogger(__name__)

NUMERICS = ("fast", "engine")
EXACT = ("require", "warn")

# Beside TRL's own defaults.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"min_p": (0.0,)}


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

    Without an accelerator `use_cpu` is switched on, and on a CPU `bf16` defaults to whether the processor multiplies
    bfloat16 matrices natively; a value that is given is kept.

    Inherited options that are not honoured raise one `ValueError` that names all of them and their fixes.

    Parameters:
        scheme (`str`, *optional*, defaults to `"w4a16"`):
            Quantization scheme of rollout and learner: `"w4a16"`, `"w8a16"`, `"w8a8"`, `"fp8"`, `"w4a8"`, or `"bf16"` for the
            unquantized baseline.
        group_size (`int`, *optional*):
            Group size for `"w4a16"`: 32, 64 or 128. Defaults to 128; layers it does not divide get the next smaller one.
        alignment (`str`, *optional*, defaults to `"aligned"`):
            Who runs the low-bit weights of `scheme`. `"aligned"` is QaRL: rollout and learner. `"rollout-only"` is quantized
            rollout training: the learner and its reference model run the high-precision masters. `"none"` runs everything
            as `scheme="bf16"` does; `scheme`, `group_size` and `exclude_modules` then only name the runs that it is a
            baseline for.
        exclude_modules (`list[str]` or `str`, *optional*):
            Linear layers to keep in high precision, as in PEFT: names or last components, or a regular expression.
        numerics (`str`, *optional*, defaults to `"fast"`):
            How the learner computes, in rollouts without vLLM, scoring and loss. `"engine"`: with vLLM's own kernels for
            every operation, so that rollout and learner give a token the same log-prob, bit for bit (CPUs with AVX512,
            bf16, vLLM 0.31; Llama, Qwen2 and Qwen3). `"fast"`: as transformers does, with rounding of its own.
        exact (`str`, *optional*, defaults to `"require"`):
            With `numerics="engine"`, what happens where the log-prob of any sampled token is not the learner's:
            `"require"` raises and names the token, and with `vllm_mode="colocate"` the first layer that differs; `"warn"`
            logs the same.
        objective (`str`, *optional*, defaults to `"tbpo"`):
            `"tbpo"`; one of the paper's comparison, `"grpo-tis"`, `"gspo"`, `"mis-gspo"`, `"positive-only"`,
            `"on-policy"`, `"dual-clip"`, which set TRL's options; or one of TRL's losses (`"grpo"`, `"dapo"`, `"sapo"`,
            ...). Replaces `loss_type`.
        positive_epsilon_high (`float`, *optional*, defaults to `4e-4`):
            TBPO: for positive advantages, the ratio counts up to `1 + positive_epsilon_high`.
        negative_epsilon_low (`float`, *optional*, defaults to `3e-4`):
            TBPO: for negative advantages, the ratio counts from `1 - negative_epsilon_low` ...
        negative_epsilon_high (`float`, *optional*, defaults to `7e-4`):
            ... to `1 + negative_epsilon_high`; outside, the sequence contributes no gradient.
        mismatch_cap (`float`, *optional*, defaults to `2.0`):
            TBPO: bound `c > 1` of the mismatch weight, which stays in `[1/c, c]`.
        epsilon (`float`, *optional*):
            For TRL's losses, defaults to TRL's `0.2`, and to `3e-4` for the GSPO objectives. TBPO does not use it.
        epsilon_high (`float`, *optional*):
            For TRL's losses, as in TRL; the GSPO objectives default to `4e-4`. TBPO does not use it.
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
        allow_low_precision_masters (`bool`, *optional*, defaults to `False`):
            Train masters in bfloat16 (or, unquantized, float16) nevertheless, in which most updates round to nothing.
        allow_high_precision_experts (`bool`, *optional*, defaults to `False`):
            Without vLLM, train a mixture of experts whose experts no scheme quantizes, and which has no low-bit export.
        vllm_request_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds that the server has to answer a request that does not generate, such as to take a chunk of weights. After
            that it counts as lost.
        vllm_generation_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds that the server has to generate a batch of completions.
        vllm_token_file (`str`, *optional*):
            File with the secret that opens the session of a server on another host: a copy of the server's token file.
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
    numerics: str = field(
        default="fast",
        metadata={
            "help": "How the learner computes: 'engine' (vLLM's own kernels for every operation, so that rollout and learner "
            "give a token the same log-prob, bit for bit; on CPUs) or 'fast'.",
            "choices": list(NUMERICS),
        },
    )
    exact: str = field(
        default="require",
        metadata={
            "help": "With numerics='engine', what happens where a sampled token's log-prob is not the learner's: 'require' "
            "raises, 'warn' logs.",
            "choices": list(EXACT),
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
    positive_epsilon_high: float = field(
        default=4e-4,
        metadata={"help": "TBPO: upper offset of the trust band for positive advantages."},
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
    allow_low_precision_masters: bool = field(
        default=False,
        metadata={
            "help": "Train masters in bfloat16 (or, unquantized, float16) nevertheless, in which most updates round to nothing."
        },
    )
    allow_high_precision_experts: bool = field(
        default=False,
        metadata={
            "help": "Without vLLM, train a mixture of experts whose experts no scheme quantizes, and which has no low-bit "
            "export."
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
    vllm_token_file: str | None = field(
        default=None,
        metadata={
            "help": "File with the secret that opens the session of a server on another host: a copy of its --token_file, "
            "which only you can read. By default the file that the server names, on the same host."
        },
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay."})

    def __post_init__(self):
        loss_type = self.loss_type
        self._choose_device()
        problems = [
            *self._check_scheme(),
            *self._check_numerics(),
            *self._check_precision(),
            *self._check_objective(),
            *self._check_refused(),
            *self._check_probe(),
            *self._check_vllm(),
        ]
        not_of_tbpo = [*self._refused_by_tbpo(loss_type)] if self.objective == "tbpo" else []
        _raise_config_problems(problems, not_of_tbpo, loss_type if loss_type in OBJECTIVES else "grpo")
        is_on_policy = self.objective in PRESETS and PRESETS[self.objective].is_on_policy
        if self.steps_per_generation is None and self.generation_batch_size is None:
            self.steps_per_generation = (1 if is_on_policy else 8) * self.gradient_accumulation_steps
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
        raise_problems([*_refused_by_all(self)])

    def _choose_device(self) -> None:
        has_accelerator = torch.accelerator.is_available() or is_torch_xla_available()
        is_chosen = not self.use_cpu and not has_accelerator
        if is_chosen:
            self.use_cpu = True
        if self.use_cpu and self.bf16 is None and not self.fp16:
            self.bf16 = has_fast_bf16()
        if is_chosen:
            logger.warning(
                "No accelerator was found: training on the CPU (use_cpu=True) with bf16=%s, fp16=%s.",
                self.bf16,
                self.fp16,
            )

    def _check_scheme(self) -> Iterator[str]:
        try:
            get_scheme(self.scheme, self.group_size)
        except ValueError as error:
            yield str(error)
        if self.alignment not in ALIGNMENTS:
            yield f"alignment={self.alignment!r} is unknown. Choose one of {list(ALIGNMENTS)}."
        if self.alignment == "rollout-only" and self.scheme == "bf16":
            yield (
                "alignment='rollout-only' with scheme='bf16': there is no low-bit weight for the rollout to run. Choose a "
                "quantized scheme, or alignment='none'."
            )
        if self.exclude_modules and self.scheme == "bf16":
            yield f"exclude_modules={self.exclude_modules!r} was given, but scheme 'bf16' quantizes nothing. Remove it."

    @property
    def is_quantized(self) -> bool:
        """Whether anything runs low-bit weights."""
        return self.scheme != "bf16" and self.alignment != "none"

    def _check_numerics(self) -> Iterator[str]:
        for name, known in (("numerics", NUMERICS), ("exact", EXACT)):
            if getattr(self, name) not in known:
                yield f"{name}={getattr(self, name)!r} is unknown. Choose one of {list(known)}."
        if self.numerics != "engine":
            return
        for is_met, option, reason in (
            (
                self.use_cpu,
                "use_cpu=False",
                "the engine's operations have gradients on CPUs alone so far. Set `use_cpu=True`",
            ),
            (self.bf16 or not self.use_cpu, f"bf16={self.bf16}", "they exist in bfloat16. Set `bf16=True`"),
            (
                self.alignment != "rollout-only",
                "alignment='rollout-only'",
                "the learner would compute with other weights than the engine. Use alignment='aligned'",
            ),
            (
                not self.is_quantized or self.scheme in ENGINE_SCHEMES,
                f"scheme={self.scheme!r}",
                f"its product has not been compared with the engine's; those of {['bf16', *ENGINE_SCHEMES]} have",
            ),
            (
                not self.cast_lm_head_to_fp32,
                "cast_lm_head_to_fp32=True",
                "the engine's output head computes in bfloat16. Remove it",
            ),
            (
                self.cache_implementation is None,
                f"cache_implementation={self.cache_implementation!r}",
                "the engine's attention reads transformers' default cache alone. Remove it",
            ),
            (
                self.vllm_tensor_parallel_size == 1 or not self.use_vllm,
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}",
                "sums over several processes are rounded otherwise. Set it to 1",
            ),
        ):
            if not is_met:
                yield f"numerics='engine' contradicts {option}: {reason}, or use numerics='fast'."

    def _check_precision(self) -> Iterator[str]:
        if self.fp16 and self.is_quantized:
            yield (
                f"fp16=True with scheme={self.scheme!r}: under quantized training float16 with loss scaling underflows to "
                "NaN (arXiv 2604.07853). Set `bf16=True`, or `bf16=False` for float32, and leave out `fp16`."
            )
        elif self.fp16 and self.use_cpu:
            yield (
                "fp16=True with use_cpu=True: accelerate has no float16 autocast on CPUs and computes in float32 without a "
                "word. Set `bf16=True`, or `bf16=False` for float32, and leave out `fp16`."
            )
        problem = low_precision_masters(self, _as_dict(self.model_init_kwargs).get("dtype"))
        if problem:
            yield problem

    def _check_objective(self) -> Iterator[str]:
        if self.objective not in OBJECTIVES:
            yield f"Unknown objective {self.objective!r}. Choose one of {list(OBJECTIVES)}."
            return
        loss_type = "grpo" if self.objective in PRESETS else self.objective
        if self.objective != "tbpo" and self.loss_type not in (None, loss_type):
            yield (
                f"loss_type={self.loss_type!r} contradicts objective={self.objective!r}. Remove `loss_type`; "
                "`objective` takes the same names."
            )
        self.loss_type = loss_type
        if self.objective in PRESETS:
            yield from self._apply_preset()
        if self.objective != "tbpo":
            yield from self._check_trls_loss()
            return
        for name, upper in (
            ("positive_epsilon_high", None),
            ("negative_epsilon_high", None),
            ("negative_epsilon_low", 1.0),
        ):
            value = getattr(self, name)
            if not value >= 0 or (upper is not None and value > upper):
                bound = "at least 0" if upper is None else f"between 0 and {upper:g}"
                yield f"{name}={value!r} must be {bound}: it is an offset from a ratio of 1."
        if not self.mismatch_cap > 1:
            yield (
                f"mismatch_cap={self.mismatch_cap!r} must be greater than 1: the weight is bounded to [1/c, c]. The "
                "paper uses 2."
            )

    def _check_trls_loss(self) -> Iterator[str]:
        self._fill_unset()
        if self.importance_sampling_level not in ("token", "sequence"):
            yield (
                f"importance_sampling_level={self.importance_sampling_level!r} is unknown. Choose 'token' or "
                "'sequence'."
            )
        for name in ("positive_epsilon_high", "negative_epsilon_low", "negative_epsilon_high", "mismatch_cap"):
            if getattr(self, name) != _default(QaRLConfig, name):
                yield (
                    f"{name}={getattr(self, name)!r} belongs to objective='tbpo', but objective={self.objective!r}. "
                    "Remove it or change the objective."
                )

    def _apply_preset(self) -> Iterator[str]:
        preset = PRESETS[self.objective]
        for name, value in preset.options.items():
            if getattr(self, name) not in (None, value):
                yield (
                    f"{name}={getattr(self, name)!r} contradicts objective={self.objective!r}, which is {name}={value!r}. "
                    "Remove it, or use objective='grpo', which takes every option of TRL's."
                )
            setattr(self, name, value)
        for name, value in preset.defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if not preset.corrects_mismatch:
            refused, why = BOUNDS_OF_MISMATCH, "does not correct the mismatch; `mis-gspo` and `grpo-tis` do"
            yield from self._refuse_changed(refused, why)
        elif not self.use_vllm:
            yield from self._refuse_changed(
                RESHAPES_SAMPLING,
                "weighs by the sampling log-probs, which would not be those of the distribution that was sampled from; "
                "leave it at its default",
            )
        yield from self._refuse_changed(OF_ONE_LOSS, "does not use it; it belongs to TRL's loss of that name")
        if self.objective == "dual-clip":
            epsilon_high = next(value for value in (self.epsilon_high, self.epsilon, 0.2) if value is not None)
            if not self.delta >= 1 + epsilon_high:
                yield (
                    f"delta={self.delta!r} is below 1 + epsilon_high={1 + epsilon_high:g}: the second clip of "
                    "objective='dual-clip' must lie outside the first. Raise `delta`; the default is 3."
                )
        if preset.is_on_policy and self.num_iterations != 1:
            yield (
                f"num_iterations={self.num_iterations!r} contradicts objective={self.objective!r}, which makes one update "
                "per generation batch. Set it to 1."
            )

    def _refuse_changed(self, names: tuple[str, ...], why: str) -> Iterator[str]:
        for name in names:
            default = None if name in UNSET else _default(GRPOConfig, name)
            if getattr(self, name) not in (default, *_NEUTRAL.get(name, ())):
                yield f"{name}={getattr(self, name)!r} is not honoured: objective={self.objective!r} {why}."

    def _fill_unset(self) -> None:
        for name in UNSET:
            is_unused = name == "vllm_importance_sampling_mode" and not self.vllm_importance_sampling_correction
            if getattr(self, name) is None and not is_unused:
                setattr(self, name, _default(GRPOConfig, name))

    def _check_one_update_per_batch(self) -> None:
        if self.steps_per_generation != self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation={self.steps_per_generation} (generation_batch_size={self.generation_batch_size}) "
                f"contradicts objective={self.objective!r}, which makes one update per generation batch: it must equal "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}. Remove it."
            )

    def _check_probe(self) -> Iterator[str]:
        if self.mismatch_probe_steps < 0:
            yield f"mismatch_probe_steps={self.mismatch_probe_steps} must be 0 (never) or a number of updates."
        if not self.mismatch_probe_steps or not self.use_vllm or self.vllm_mode != "colocate":
            return
        for name, usual in (("vllm_enable_sleep_mode", False), ("vllm_tensor_parallel_size", 1)):
            if getattr(self, name) != usual:
                yield (
                    f"mismatch_probe_steps={self.mismatch_probe_steps} asks the engine between rollouts, which {name}="
                    f"{getattr(self, name)!r} does not allow: it sleeps, or needs all processes. Leave out one of them."
                )

    def _check_vllm(self) -> Iterator[str]:
        has_own_server = self.use_vllm and self.vllm_mode == "server" and not self.vllm_server_autostart
        if self.vllm_token_file is not None and not has_own_server:
            yield (
                f"vllm_token_file={self.vllm_token_file!r} is for a server that you start yourself, but use_vllm={self.use_vllm}, "
                f"vllm_mode={self.vllm_mode!r}, vllm_server_autostart={self.vllm_server_autostart}. Remove it."
            )
        if not self.use_vllm:
            if self.vllm_server_autostart:
                yield "vllm_server_autostart=True was given, but use_vllm=False. Set `use_vllm=True`."
            return
        if self.vllm_mode not in ("server", "colocate"):
            yield f"vllm_mode={self.vllm_mode!r} is unknown. Choose 'server' or 'colocate'."
        elif self.vllm_server_autostart and (self.vllm_mode != "server" or self.vllm_server_base_url is not None):
            yield (
                "vllm_server_autostart=True starts a server on this machine, which contradicts "
                f"vllm_mode={self.vllm_mode!r}, vllm_server_base_url={self.vllm_server_base_url!r}. Use vllm_mode='server' "
                "and choose its port with `vllm_server_port`."
            )
        for name in ("vllm_request_timeout", "vllm_generation_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                yield (
                    f"{name}={getattr(self, name)} must be a positive number of seconds: a server that never answers would hold "
                    f"the run for good. The default is {_default(QaRLConfig, name):g}."
                )
        if self.vllm_model_impl not in ("vllm", "auto"):
            yield (
                f"vllm_model_impl={self.vllm_model_impl!r} is not supported: the audit knows the parameters of vLLM's own "
                "models. Use 'vllm'."
            )
        if self.vllm_enable_sleep_mode and self.use_cpu:
            yield (
                "vllm_enable_sleep_mode=True with use_cpu=True: vLLM has sleep mode on GPUs only. Set it to `False`."
            )
        if self.vllm_server_autostart and self.vllm_server_host not in ("0.0.0.0", "127.0.0.1", "localhost"):
            yield (
                f"vllm_server_host={self.vllm_server_host!r} with vllm_server_autostart=True: the server is started on this "
                "machine and listens on 127.0.0.1. Remove it."
            )
        reshaping = sorted(VLLM_SAMPLING_KWARGS & _as_dict(self.generation_kwargs).keys())
        if reshaping:
            yield (
                f"generation_kwargs contains {reshaping}, which change what vLLM samples or returns, so sampling log-probs and "
                "the learner's would differ. Remove them."
            )
        if self.vllm_structured_outputs_regex is not None:
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
            value = getattr(self, name)
            if value not in neutral:
                yield (
                    f"{name}={value!r} with use_vllm=True: vLLM's log-probs would be those of the reshaped distribution, the "
                    f"learner's those of the whole one, and every importance weight would be biased. Use {neutral[0]!r}; "
                    "`temperature` is applied on both sides."
                )

    def _check_refused(self) -> Iterator[str]:
        yield from _refused_by_all(self)
        for name, why in MODEL_INIT_KWARGS_REFUSED.items():
            if _as_dict(self.model_init_kwargs).get(name) is not None:
                yield f"model_init_kwargs[{name!r}] is not supported: {why}."
        generation_kwargs = _as_dict(self.generation_kwargs)
        if generation_kwargs.get("do_sample") is True:
            # What TRL sets itself; vLLM has no such option.
            self.generation_kwargs = {k: v for k, v in generation_kwargs.items() if k != "do_sample"}
        reshaping = sorted(GENERATION_KWARGS_THAT_RESHAPE & _as_dict(self.generation_kwargs).keys())
        if reshaping:
            yield (
                f"generation_kwargs contains {reshaping}, which change what is sampled and from which distribution, so "
                "the recorded sampling log-probs would be wrong. Remove them; `temperature`, `top_p`, `top_k`, `min_p` "
                "and `repetition_penalty` are options of their own."
            )
        if self.optim == "muon" and self.optim_args:
            yield (
                f"optim_args={self.optim_args!r} is not honoured by optim='muon', which has the options `learning_rate`, "
                "`weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon`. Remove it or choose another `optim`."
            )

    def _refused_by_tbpo(self, loss_type: str | None) -> Iterator[tuple[str, str]]:
        if loss_type not in (None, "tbpo"):
            yield f"loss_type={loss_type!r}", "TBPO replaces TRL's losses; `objective` takes the same names"
        for name, why in REFUSED_BY_TBPO.items():
            allowed = [_default(GRPOConfig, name), *_NEUTRAL.get(name, ())]
            if name in UNSET:
                # TRL's own defaults do not say that a correction was asked for, unlike a clip offset.
                allowed = [None, *allowed] if name.startswith("vllm") else [None]
            # vLLM takes these for no objective.
            is_refused_already = self.use_vllm and name in RESHAPES_SAMPLING
            if getattr(self, name) not in allowed and not is_refused_already:
                yield f"{name}={getattr(self, name)!r}", why
        for name in UNSET:
            if name.startswith("vllm"):
                setattr(self, name, _default(GRPOConfig, name))


def raise_problems(problems: list[str]) -> None:
    """Raise one `ValueError` that lists all `problems`, if there are any."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError("\n".join([f"{len(problems)} problems:", *(f"- {problem}" for problem in problems)]))


def low_precision_masters(config: QaRLConfig, dtype: torch.dtype | str | None) -> str | None:
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


def _raise_config_problems(problems: list[str], not_of_tbpo: list[tuple[str, str]], objective: str) -> None:
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


def _refused_by_all(config: QaRLConfig) -> Iterator[str]:
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            yield f"{name}={getattr(config, name)!r} is not supported: {why}."


def _default(config_class: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(config_class) if f.name == name)


def _as_dict(value: dict | str | None) -> dict:
    # From the command line, dictionaries arrive as JSON text and are parsed by the base class later.
    if isinstance(value, str):
        import json

        return json.loads(value) if value.strip().startswith("{") else {}
    return value or {}
