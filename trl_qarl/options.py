"""
Options of quantization, objective, learner and engine as plain dataclasses, independent of TRL. The configuration of a
trainer inherits from those that it supports, like [`QaRLConfig`].
"""

import re
from dataclasses import dataclass, field, fields
from inspect import cleandoc
from types import MappingProxyType
from typing import Any

from .quantization.plan import QuantPlan, get_plan


CHOICES: dict[str, tuple[str, ...]] = {
    "numerics": ("fast", "engine", "exact"),
    "lora_mode": ("adapter", "merged"),
    "gradient_dtype": ("float32", "bfloat16"),
}
"""Allowed values of options."""

MUONS = ("muon", "muon_8bit")
"""Names of `optim` that transformers does not know."""


def optimizer_name(args: Any) -> str:
    """Return `optim` as text: transformers replaces a name by a member of its enumeration."""
    return str(getattr(args.optim, "value", args.optim))


def _one_of(name: str, default: str | None) -> Any:
    return field(default=default, metadata={"choices": list(CHOICES[name])})


def describe_options(cls: type) -> type:
    """
    Copy the text of each option that a dataclass declares from its docstring to `help` in the field's metadata, for
    the command line. Backticks and the brackets of links are removed, percent signs are doubled for argparse.
    """
    texts = {}
    # An entry is indented by four columns, its text by eight.
    entry = r"^ {4}(\w[\w, ]*) \(.*\):((?:\n {8}.*)+)"
    for names, text in re.findall(entry, cleandoc(cls.__doc__ or ""), re.MULTILINE):
        plain = re.sub(r"\[?`~?([^`]*)`\]?", r"\1", " ".join(text.split()))
        texts |= dict.fromkeys(names.split(", "), plain.replace("%", "%%"))
    for option in fields(cls):
        if option.name in cls.__annotations__:
            option.metadata = MappingProxyType({**option.metadata, "help": texts.get(option.name, "")})
    return cls


def own_options(cls: type, inherited: type) -> list[str]:
    """Return the options that `cls` adds to its base class `inherited`, or redefines, first those of other bases."""
    bases = [base for base in cls.__mro__ if not issubclass(inherited, base)]
    declared = [name for base in (*bases[1:], cls) for name in vars(base).get("__annotations__", {})]
    known = {option.name for option in fields(cls)}
    return [name for name in declared if name in known]


@describe_options
@dataclass
class QuantOptions:
    """
    Format of the policy's weights, and arithmetic of the learner.

    Parameters:
        scheme (`str` or `dict`, *optional*, defaults to `"w4a16"`):
            Quantization scheme of rollout and learner: `"w4a16"`, `"w8a16"`, `"w8a8"`, `"fp8"`, `"w4a8"`,
            `"w4a8-int8"`, `"mxfp4a16"`, `"nvfp4a16"`, `"w3a16"` or `"w2a16"` (3 or 2 bits, stored as INT4), or
            `"bf16"` for the unquantized baseline. Alternatively a mapping from patterns of layers' names to schemes,
            as in torchao's `FqnToConfig`: whole names, then `"re:..."` in order, then `"_default"`; a value is a
            scheme's name, `{"scheme": "w4a16", "group_size": 32}`, or `None` for high precision.
        group_size (`int`, *optional*):
            Group size for `"w4a16"`, `"w3a16"`, `"w2a16"` and `"w4a8-int8"`: 32, 64 or 128. Defaults to 128; layers
            that it does not divide get the next smaller one.
        precisions (`list[int]` or `dict[int, int]`, *optional*):
            Alternating bits of the low-bit weights, for `"w4a16"` and `"w3a16"`: `[4, 3]` generates, scores and
            learns one batch at 4 bits and the next at 3, `{0: 4, 60: 3}` begins at 4 bits and continues with 3 from
            update 60. The engine does not change. Evaluation and export use the bits of `scheme`.
        quantize_learner (`bool`, *optional*, defaults to `True`):
            Whether the learner and its reference model run the low-bit weights of `scheme`, like the rollout, which is
            QaRL. With `False` they run the high-precision master weights: quantized rollout training.
        exclude_modules (`list[str]` or `str`, *optional*):
            Linear layers to keep in high precision: names, last components of names, or `"re:"` and a regular
            expression over the whole name, such as `"re:model[.]layers[.](0|1)[.].*"` for the first two decoder
            layers. Experts of a mixture that are named here are kept as well, without vLLM: there is no low-bit export
            then.
        lora_mode (`str`, *optional*, defaults to `"adapter"`):
            Form of the policy with a PEFT adapter: `"adapter"`, the frozen low-bit base with the adapter next to it in
            high precision; `"merged"`, the low-bit form of base and adapter together.
        numerics (`str`, *optional*):
            Arithmetic of the learner in rollouts without vLLM, scoring and loss. `"engine"` uses vLLM's own kernels
            for every operation, so that rollout and learner give a token the same log-prob, bit for bit (CPUs with
            AVX512, bf16, vLLM; most dense families and some mixtures; written for NVIDIA GPUs, where it is untested).
            Rollouts without vLLM do not need it to be installed. `"fast"` computes as transformers does, with another
            rounding. If the log-prob of a sampled token is not the learner's, `"engine"` logs the token of the first
            such batch, and with `vllm_mode="colocate"` the first layer that differs; `"exact"` is the same arithmetic
            and raises, and is refused where equal bits cannot be promised, as on GPUs. Defaults to `"engine"` for
            rollouts in vLLM on a CPU that meets these conditions, else to `"fast"`; the log has the choice and its
            reason.
    """

    scheme: dict[str, Any] | str | None = "w4a16"
    group_size: int | None = None
    precisions: list[int] | str | dict[int, int] | None = None
    quantize_learner: bool = True
    exclude_modules: list[str] | None = None
    lora_mode: str = _one_of("lora_mode", "adapter")
    numerics: str | None = _one_of("numerics", None)

    @property
    def is_quantized(self) -> bool:
        """True if any layer runs low-bit weights, and for an invalid scheme, so that others are reported with it."""
        try:
            return self.plan.is_quantized
        except ValueError:
            return True

    @property
    def plan(self) -> QuantPlan:
        """The scheme of each layer. Raises `ValueError` for an unknown scheme."""
        return get_plan(self.scheme, self.group_size)


@describe_options
@dataclass
class ObjectiveOptions:
    """
    Objective, and bounds of its loss.

    Parameters:
        loss_type (`str`, *optional*, defaults to `"tbpo"`):
            `"tbpo"`; one of TRL's losses with TRL's own options (`"grpo"`, `"dapo"`, `"sapo"`, ...); or
            `"module:Class"`, an [`~trl_qarl.objectives.objective.Objective`] of your own.
        objective_kwargs (`dict`, *optional*):
            Arguments of the class in `loss_type="module:Class"`.
        positive_epsilon_high (`float`, *optional*, defaults to `4e-4`):
            TBPO: for positive advantages, the ratio counts up to `1 + positive_epsilon_high`.
        negative_epsilon_low (`float`, *optional*, defaults to `3e-4`):
            TBPO: for negative advantages, the ratio counts from `1 - negative_epsilon_low`; below, the sequence
            contributes no gradient.
        negative_epsilon_high (`float`, *optional*, defaults to `7e-4`):
            TBPO: for negative advantages, the ratio counts up to `1 + negative_epsilon_high`; above, the sequence
            contributes no gradient.
        mismatch_cap (`float`, *optional*, defaults to `2.0`):
            TBPO: bound `c > 1` of the mismatch weight, which stays in `[1/c, c]`.
    """

    loss_type: str = "tbpo"
    objective_kwargs: dict[str, Any] | str | None = None
    positive_epsilon_high: float = 4e-4
    negative_epsilon_low: float = 3e-4
    negative_epsilon_high: float = 7e-4
    mismatch_cap: float = 2.0


@describe_options
@dataclass
class LearnerOptions:
    """
    Division of a generation batch among the learner's updates and forwards.

    Parameters:
        keep_groups (`bool`, *optional*):
            Keep the completions of a prompt together in an update, as far as its size allows, so that the learner
            computes their prompt once. With `False` all completions are shuffled, as in TRL. Defaults to `True` if an
            update has the completions of at least two prompts.
        max_tokens_per_forward (`int`, *optional*):
            Bound of the tokens that the learner computes at once, for one process. A micro-batch with more tokens is
            divided, between prompts where possible, and computed again in the backward pass, so that memory holds the
            activations of one part; its loss does not change. By default a micro-batch is computed as a whole.
    """

    keep_groups: bool | None = None
    max_tokens_per_forward: int | None = None


@describe_options
@dataclass
class EngineOptions:
    """
    Engine of the rollouts: batches drawn ahead, its server, and the policy's place on the Hub.

    Parameters:
        rollout_ahead (`int`, *optional*, defaults to `0`):
            With 1, a vLLM server draws the next generation batch while the learner trains on the previous one. The
            weights that draw a batch are older by the updates of one batch; they are kept for the old log-probs.
        vllm_server_autostart (`bool`, *optional*, defaults to `False`):
            Start the server of `vllm_mode="server"` as a child process, and end it with training. Its log is
            `vllm_server.log` in the output directory.
        vllm_token_file (`str`, *optional*):
            File with the secret that opens the session of a server on another host: a copy of its `--token_file`,
            which only you can read. Defaults to the file that the server names, on the same host.
    """

    rollout_ahead: int = 0
    vllm_server_autostart: bool = False
    vllm_token_file: str | None = None
