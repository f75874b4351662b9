"""
Options of quantization, objective and engine as plain dataclasses, independent of TRL. The configuration of a trainer
inherits from those that it supports, like [`QaRLConfig`].
"""

import re
from dataclasses import dataclass, field, fields
from inspect import cleandoc
from types import MappingProxyType
from typing import Any

from .quantization.plan import QuantPlan, get_plan


CHOICES: dict[str, tuple[str, ...]] = {
    "numerics": ("fast", "engine"),
    "exact": ("require", "warn"),
    "cpu_weights": ("expanded", "packed"),
    "lora_mode": ("adapter", "merged"),
    "trust_band": ("fixed", "auto"),
    "vllm_transport": ("auto", "file", "nccl", "http"),
    "old_logps": ("version", "learner", "sampler"),
}
"""Allowed values of options."""


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
    """Return the names of the options that `cls` adds to those of its base class `inherited`, or redefines, beginning
    with those of its other bases."""
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
            `"w4a8-int8"` (also with 3 and 2 bits), `"mxfp4a16"`, `"nvfp4a16"`, `"w3a16"` or `"w2a16"`
            (3 or 2 bits, stored as INT4), `"w4a16-observer"`, `"w3a16-observer"` or `"w2a16-observer"` (with
            compressed-tensors' scales), `"w4a16-asym"` and `"w8a16-asym"` (INT4 and INT8 with zero points), or
            `"bf16"` for the unquantized baseline. Alternatively a mapping from patterns of layers' names to schemes,
            as in torchao's `FqnToConfig`: whole names, then `"re:..."` in order, then `"_default"`; a value is a
            scheme's name, `{"scheme": "w4a16", "group_size": 32}`, or `None` for high precision.
        group_size (`int`, *optional*):
            Group size for `"w4a16"`: 32, 64 or 128. Defaults to 128; layers that it does not divide get the next
            smaller one.
        precisions (`list` or `dict[int, Any]`, *optional*):
            Alternating bits of the low-bit weights, for schemes with signed scales: `[4, 3]` generates, scores and
            learns one batch at 4 bits and the next at 3, `{0: 4, 60: 3}` begins at 4 bits and continues with 3 from
            update 60. A number can be replaced by numbers for patterns of layers' names,
            `{"re:.*layers[.]0[.].*": 3, "_default": 4}`. The engine does not change. Evaluation and export use the
            bits of `scheme`.
        quantize_learner (`bool`, *optional*, defaults to `True`):
            Whether the learner and its reference model run the low-bit weights of `scheme`, like the rollout, which is
            QaRL. With `False` they run the high-precision master weights: quantized rollout training.
        exclude_modules (`list[str]` or `str`, *optional*):
            Linear layers to keep in high precision: names, last components of names, or regular expressions over the
            whole name.
        high_precision_first (`int`, *optional*, defaults to `0`):
            Number of first decoder layers that stay in high precision.
        high_precision_last (`int`, *optional*, defaults to `0`):
            Number of last decoder layers that stay in high precision.
        lora_mode (`str`, *optional*, defaults to `"adapter"`):
            Form of the policy with a PEFT adapter: `"adapter"`, the frozen low-bit base with the adapter next to it in
            high precision; `"merged"`, the low-bit form of base and adapter together.
        numerics (`str`, *optional*):
            Arithmetic of the learner in rollouts without vLLM, scoring and loss. `"engine"` uses vLLM's own kernels
            for every operation, so that rollout and learner give a token the same log-prob, bit for bit (CPUs with
            AVX512, bf16, vLLM; Llama, Qwen2 and Qwen3; written for NVIDIA GPUs, where it is untested). Rollouts
            without vLLM do not need it to be installed. `"fast"` computes as transformers does, with different
            rounding. Defaults to `"engine"` for rollouts in vLLM on a CPU that meets these conditions, else to
            `"fast"`; the log has the choice and its reason.
        exact (`str`, *optional*):
            With `numerics="engine"`, response if the log-prob of a sampled token is not the learner's: `"require"`
            raises and names the token, and with `vllm_mode="colocate"` the first layer that differs; `"warn"` logs
            the same. Defaults to `"require"` if `numerics` is given; otherwise the first such batch is logged.
        cpu_weights (`str`, *optional*, defaults to `"expanded"`):
            Weights in products of engines on a CPU, and of a learner with their numerics, if activations are not INT8:
            `"expanded"` to bf16 once per weight sync and per update, which takes 2 bytes per weight in addition to
            the codes; `"packed"` codes, without that memory and up to three times slower. Give a server of your own
            the same value with `trl-qarl vllm-serve --cpu_weights`.
        allow_low_precision_masters (`bool`, *optional*, defaults to `False`):
            Allow masters in bfloat16 (or, unquantized, float16), in which most updates round to nothing.
        allow_high_precision_experts (`bool`, *optional*, defaults to `False`):
            Without vLLM, allow training a mixture whose experts are excluded, or laid out such that no scheme
            quantizes them. It has no low-bit export.
    """

    scheme: dict[str, Any] | str | None = "w4a16"
    group_size: int | None = None
    precisions: list[Any] | str | dict[int, Any] | None = None
    quantize_learner: bool = True
    exclude_modules: list[str] | None = None
    high_precision_first: int = 0
    high_precision_last: int = 0
    lora_mode: str = _one_of("lora_mode", "adapter")
    numerics: str | None = _one_of("numerics", None)
    exact: str | None = _one_of("exact", None)
    cpu_weights: str = _one_of("cpu_weights", "expanded")
    allow_low_precision_masters: bool = False
    allow_high_precision_experts: bool = False

    @property
    def is_quantized(self) -> bool:
        """True if any layer runs low-bit weights. Also true for an invalid scheme, so that all problems can be
        reported at once."""
        try:
            return self.plan.is_quantized
        except ValueError:
            return True

    @property
    def plan(self) -> QuantPlan:
        """The scheme of each layer. Raises `ValueError` for an unknown scheme."""
        return get_plan(self.scheme, self.group_size, self.high_precision_first, self.high_precision_last)


@describe_options
@dataclass
class ObjectiveOptions:
    """
    Objective, and bounds of its loss.

    Parameters:
        objective (`str`, *optional*, defaults to `"tbpo"`):
            `"tbpo"`; one of the paper's comparison, `"grpo-tis"`, `"gspo"`, `"mis-gspo"`, `"positive-only"`,
            `"on-policy"`, `"dual-clip"`, which set TRL's options; one of other projects against the mismatch,
            `"icepop"`, `"kpop"`, `"geo-mask"`, `"bypass"`, `"dppo-tv"`, `"acr"`; one of TRL's losses (`"grpo"`,
            `"dapo"`, `"sapo"`, ...); or `"module:Name"`, an [`~trl_qarl.objectives.objective.Objective`] of your own.
            Replaces `loss_type`.
        objective_kwargs (`dict`, *optional*):
            Arguments of the class in `objective="module:Name"`.
        positive_epsilon_high (`float`, *optional*, defaults to `4e-4`):
            TBPO: for positive advantages, the ratio counts up to `1 + positive_epsilon_high`.
        negative_epsilon_low (`float`, *optional*, defaults to `3e-4`):
            TBPO: for negative advantages, the ratio counts from `1 - negative_epsilon_low`; below, the sequence
            contributes no gradient.
        negative_epsilon_high (`float`, *optional*, defaults to `7e-4`):
            TBPO: for negative advantages, the ratio counts up to `1 + negative_epsilon_high`; above, the sequence
            contributes no gradient.
        trust_band (`str`, *optional*, defaults to `"fixed"`):
            TBPO: `"fixed"` uses the three bands above, `"auto"` (experimental) estimates them from the ratios of
            recent updates.
        trust_band_share (`float`, *optional*, defaults to `0.25`):
            TBPO with `trust_band="auto"`: share of completions to drop, for each sign of the advantage. Completions in
            updates on a fresh batch, with ratios of 1, are neither dropped nor counted.
        mismatch_cap (`float`, *optional*, defaults to `2.0`):
            TBPO: bound `c > 1` of the mismatch weight, which stays in `[1/c, c]`.
        mismatch_low, mismatch_high (`float`, *optional*):
            Bounds of the mismatch. Outside of them `"icepop"` drops a token (0.5 and 5) and `"geo-mask"` a completion,
            by its geometric mean (0.99 and 1.01).
        divergence_threshold (`float`, *optional*):
            Bound above which a token is dropped: for `"kpop"` of the divergence between learner and sampler (0.1
            nats), for `"dppo-tv"` of the difference between its probability and the sampler's (0.2).
    """

    objective: str = "tbpo"
    objective_kwargs: dict[str, Any] | str | None = None
    positive_epsilon_high: float = 4e-4
    negative_epsilon_low: float = 3e-4
    negative_epsilon_high: float = 7e-4
    trust_band: str = _one_of("trust_band", "fixed")
    trust_band_share: float = 0.25
    mismatch_cap: float = 2.0
    mismatch_low: float | None = None
    mismatch_high: float | None = None
    divergence_threshold: float | None = None


@describe_options
@dataclass
class EngineOptions:
    """
    Engine of the rollouts: batches drawn ahead, transport of weights, and other destinations of the policy.

    Parameters:
        rollout_ahead (`int`, *optional*, defaults to `0`):
            Number of generation batches that a vLLM server draws ahead, while the learner trains on the previous one.
            With 1 both work at the same time, and the weights of a batch are older by the updates of one batch;
            larger values are for studies.
        old_logps (`str`, *optional*, defaults to `"version"`):
            With `rollout_ahead`, log-probs in the denominator of the ratio: `"version"`, those of the weights that
            drew the batch, which are kept; `"learner"`, those of the learner when it begins with the batch;
            `"sampler"`, the engine's.
        in_flight_updates (`bool`, *optional*, defaults to `False`):
            Experimental. With `rollout_ahead` of at least 2 and `numerics="engine"`, publish weights while completions
            are drawn: the engine continues with the new ones, and never waits for the longest completion of a batch.
        mismatch_probe_steps (`int`, *optional*, defaults to `0`):
            Number of updates between measurements of the mismatch over the whole vocabulary, on a few sequences of the
            rollout: `mismatch/probe_kl` and `mismatch/probe_top1_agreement`. 0 stands for never.
        vllm_server_autostart (`bool`, *optional*, defaults to `False`):
            Start the server of `vllm_mode="server"` as a child process, and end it with training. Its log is
            `vllm_server.log` in the output directory.
        vllm_request_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds for the server to answer a request that does not generate, such as one with a chunk of weights.
            After that the server counts as lost.
        vllm_generation_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds for the server to generate a batch of completions.
        vllm_token_file (`str`, *optional*):
            File with the secret that opens the session of a server on another host: a copy of its `--token_file`,
            which only you can read. Defaults to the file that the server names, on the same host.
        vllm_transport (`str`, *optional*, defaults to `"auto"`):
            Transport of weights to a server: `"nccl"`, `"file"` through a directory that both hosts share, or
            `"http"`. Defaults to NCCL if the server was started for it, else to the directory if this host has it,
            else to HTTP; the log has the choice and its reason.
        vllm_ssl_ca_certs (`str`, *optional*):
            File with the certificates that sign a server's at https://, or its own. Defaults to those of public
            authorities.
        vllm_allow_plain_http (`bool`, *optional*, defaults to `False`):
            Allow sending weights to another host over http://, where every network in between can read and change
            them.
        vllm_delta_sync (`bool`, *optional*):
            Whether a weight sync to a server sends only the changes of each tensor since the last one. Trainer and
            server each keep a copy of the low-bit policy in host memory. Defaults to `True` only over HTTP, where it
            is faster; not possible with NCCL.
        publish_dir (`str`, *optional*):
            Folder to which the low-bit policy of each rollout is also written, as files for object storage: the first
            version whole, then changes. `trl-qarl export --from_patches` exports any version. Not with FSDP, nor for
            an adapter next to its base.
    """

    rollout_ahead: int = 0
    old_logps: str = _one_of("old_logps", "version")
    in_flight_updates: bool = False
    mismatch_probe_steps: int = 0
    vllm_server_autostart: bool = False
    vllm_request_timeout: float = 300.0
    vllm_generation_timeout: float = 1800.0
    vllm_token_file: str | None = None
    vllm_transport: str = _one_of("vllm_transport", "auto")
    vllm_ssl_ca_certs: str | None = None
    vllm_allow_plain_http: bool = False
    vllm_delta_sync: bool | None = None
    publish_dir: str | None = None
