"""The check that learner and sampler give every sampled token the same log-prob, and the search for where they
part."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..forward import Batch
from ..quantization.names import base_model
from ..quantization.storage import is_sharded
from . import cuda, low_bit
from .modules import Router, operation_of
from .ops import token_log_probs


__all__ = [
    "Exactness",
    "check_arithmetic",
    "choose_versions",
    "describe_difference",
    "first_difference",
    "largest_difference",
]


logger = logging.getLogger(__name__)


class Exactness:
    """
    The reaction to a sampled token whose log-prob differs between the engine and a learner with engine numerics.
    `"require"` raises, `"warn"` logs each batch; `None` requires it of engine numerics that were asked for, and logs
    the first such batch of others. Once it `has_differed`, log-probs of the sampler no longer stand for the learner's.
    """

    def __init__(self, exact: str | None, is_asked_for: bool):
        self.is_required = exact == "require" or (exact is None and is_asked_for)
        self._warns_once, self.has_differed = exact is None, False

    def check(
        self,
        output: dict[str, Any],
        batch: Batch,
        model: nn.Module,
        accelerator: Any,
        llm: Any = None,
        score: Callable | None = None,
    ) -> None:
        """
        Compare the log-probs of a generation batch, as TRL makes it and as [`~trl_qarl.forward.Batch`], on every
        process, bit for bit; `llm` and `score` are those of [`describe_difference`]. Where exactness is required
        `RuntimeError` names the token that differs.
        """
        largest, *_ = largest_difference(*batch.rollout)
        overall = accelerator.gather(torch.tensor([largest], device=accelerator.device)).max().item()
        if overall == 0.0 or (self.has_differed and self._warns_once):
            return
        where = describe_difference(output, batch.mask, accelerator.unwrap_model(model), llm, score)
        message = f"numerics='engine': the largest mismatch is {overall:.3g} and not 0: {where}."
        if self.is_required:
            raise RuntimeError(f"{message} exact='warn' trains on it nevertheless.")
        if not self.has_differed:
            message += " From the next batch on a forward of its own scores each rollout."
        logger.warning(message)
        self.has_differed = True


def check_arithmetic(engine: Mapping[str, Any], on_gpu: bool = False, adapter_rank: int | None = None) -> None:
    """
    Raise `ValueError`, naming both values of everything that differs, unless the engine computes with the kernels that
    this process has. Under `"arithmetic"` it says of itself what [`~trl_qarl.numerics.low_bit.describe_arithmetic`] or
    that of [`trl_qarl.numerics.cuda`] does. `adapter_rank` is the one to which the learner fills up adapters next to
    its layers.
    """
    # Splitting sums over threads is never reproduced here, whatever the environment of this process says.
    ours = cuda.describe_arithmetic() if on_gpu else low_bit.describe_arithmetic() | {"VLLM_CPU_ATTN_SPLIT_KV": 0}
    theirs = engine.get("arithmetic") or {}
    if adapter_rank is not None:
        ours, theirs = ours | {"max_lora_rank": adapter_rank}, theirs | {"max_lora_rank": engine["lora"]["max_rank"]}
    lines = [
        f"{name}: learner {ours[name]}, engine {theirs.get(name)}" for name in ours if theirs.get(name) != ours[name]
    ]
    if lines:
        raise ValueError(
            "numerics='engine': the engine's arithmetic is not the learner's:\n  "
            + "\n  ".join(lines)
            + "\nStart the server with `trl-qarl vllm-serve --numerics engine`, with the same releases of vLLM and trl_qarl on the same "
            "kind of processor, or use numerics='fast' or exact='warn'."
        )


def largest_difference(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> tuple[float, int, int]:
    """
    Return the largest `|old - sampling|` over the tokens of `mask`, all `(B, T)`, and its row and column. NaN, a
    log-prob that is not known, counts as infinite.
    """
    difference = (old_per_token_logps - sampling_per_token_logps).abs().nan_to_num(nan=torch.inf)
    difference = difference.masked_fill(~mask.bool(), 0.0)
    index = int(difference.argmax())
    return difference.flatten()[index].item(), *divmod(index, difference.shape[1])


def choose_versions(
    by_version: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Find which weights have drawn each token of completions in which weights changed: the first, not before those of
    the token before, whose log-prob is the sampler's. Where there are none it is the closest, which is not equal.

    `by_version`, `(V, B, T)`, has the log-probs of the tokens by each of the weights, in the order in which they were
    published; `mask`, `(B, T)`, is true for the tokens that count. The result is the log-probs `(B, T)` by the weights
    of each token, and their place `(B, T)` in `by_version`.
    """
    difference = (by_version - sampling_per_token_logps).abs().nan_to_num(nan=torch.inf)
    all_places = torch.arange(len(by_version), device=mask.device)[:, None]
    current = torch.zeros_like(mask[:, 0], dtype=torch.long)
    places = []
    for column in range(mask.shape[1]):
        closest = difference[:, :, column].masked_fill(all_places < current, torch.inf).argmin(dim=0)
        current = torch.where(mask[:, column], closest, current)
        places.append(current)
    chosen = torch.stack(places, dim=1)
    return by_version.gather(0, chosen[None])[0], chosen


def describe_difference(
    output: dict[str, Any],
    mask: torch.Tensor,
    model: nn.Module,
    llm: Any | None = None,
    score: Callable[[list[list[int]]], list[list[dict[int, float]]]] | None = None,
) -> str:
    """
    Return which token of a generation batch differs most, and the first layer, or else the first token, that differs
    when the engine is given the whole sequence. `mask`, `(B, T)`, has the completion tokens that count; `llm` is the
    engine, if it runs in this process; `score` asks another engine for the log-probs of sequences at temperature 1, as
    `log_probs` of [`~trl_qarl.rollout.engine.Engine`] does.
    """
    old, sampling = output["old_per_token_logps"], output["sampling_per_token_logps"]
    largest, row, column = largest_difference(old, sampling, mask)
    text = (
        f"learner and sampler give token {column} of completion {row} (id {output['completion_ids'][row, column].item()}) "
        f"log-probs {old[row, column].item():.6f} and {sampling[row, column].item():.6f}"
    )
    # With sharded masters, all processes have to compute together.
    if largest == 0 or is_sharded(model):
        return text
    prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
    completion = output["completion_ids"][row, : column + 1].tolist()
    if llm is None:
        return text if score is None else f"{text}; {_ask_again(model, score, prompt + completion, len(prompt))}"
    difference = first_difference(model, llm, prompt + completion[:-1])
    if difference is None:
        return (
            f"{text}; over the same tokens at once all layers agree, so the engine's decoding differs from its prefill"
        )
    return f"{text}; {difference}"


@torch.no_grad()
def _ask_again(model: nn.Module, score, ids: list[int], num_prompt: int) -> str:
    """Return what an engine out of reach says when it computes a sequence at once."""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    ours = token_log_probs(logits, tokens[0, 1:]).tolist()
    theirs = [entry[token] for entry, token in zip(score([ids])[0], ids[1:], strict=True)]
    differing = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b]
    if not differing:
        return "over the same tokens at once, at temperature 1, it agrees on all, so its decoding differs from its prefill"
    index = differing[0]
    place = f"token {index} of the prompt" if index < num_prompt else f"token {index - num_prompt} of the completion"
    return (
        f"over the same tokens at once, at temperature 1, {len(differing)} of {len(ours)} differ, the first is {place} (learner "
        f"{ours[index - 1]:.6f}, engine {theirs[index - 1]:.6f}); vllm_mode='colocate' would name the layer"
    )


@torch.no_grad()
def first_difference(model: nn.Module, llm: Any, ids: list[int]) -> str | None:
    """
    Return which of the learner's modules, of embedding, decoder layers and final norm, is the first whose output for
    `ids`, tokens of one sequence, is not that of the engine in this process, and of a mixture which token its router
    sends to other experts, if there is one. `None` if all agree.
    """
    from vllm import SamplingParams

    model = base_model(model)
    names = ["embed_tokens", *(f"layers.{i}" for i in range(model.config.num_hidden_layers)), "norm"]
    base = model.base_model
    with _outputs(base, names) as learner:
        base(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    llm.reset_prefix_cache()
    [engine_base] = llm.apply_model(lambda engine: engine.model)
    with _outputs(engine_base, names) as engine:
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1), use_tqdm=False)
    name = next((name for name in names if not _is_equal(learner[name], engine[name])), None)
    if name is None:
        return None
    text = f"{name!r} is the first layer whose output differs"
    ours, theirs = (outputs.get(f"router of {name}") for outputs in (learner, engine))
    if ours is None or theirs is None or _is_equal(ours, theirs):
        return text
    token = int((ours[: len(theirs)] != theirs[: len(ours)]).any(dim=1).nonzero()[0])
    return f"{text}: token {token} goes to experts {ours[token].tolist()} in the learner, {theirs[token].tolist()} in the engine"


@contextmanager
def _outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """
    While open, the first output of each named module is kept, `(tokens, hidden_size)` float32, and under
    `"router of "` and the name of a layer the experts `(tokens, k)` that its router chooses.
    """
    outputs: dict[str, torch.Tensor] = {}

    def keep(name):
        def hook(module, args, output):
            hidden, *residual = output if isinstance(output, tuple) else (output,)
            if name.startswith("layers") and residual:
                # The engine leaves the sum to the next norm; the learner passes it on unrounded.
                hidden = hidden.float() + residual[0].float()
            outputs.setdefault(name, hidden.float().reshape(-1, hidden.shape[-1]))

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
            for module in model.get_submodule(name).modules():
                _watch_router(stack, module, outputs, f"router of {name}")
        yield outputs


def _watch_router(stack: ExitStack, module: nn.Module, outputs: dict[str, torch.Tensor], key: str) -> None:
    """Keep the experts that `module` chooses, if it is a router of the learner or has one of vLLM's, until `stack` is
    closed."""

    def keep(ids):
        outputs.setdefault(key, ids.long())

    router = getattr(module, "router", None)
    if hasattr(router, "set_capture_fn"):
        router.set_capture_fn(keep)
        stack.callback(router.set_capture_fn, None)
    elif isinstance(operation_of(module), Router):
        stack.callback(module.register_forward_hook(lambda module, args, output: keep(output[2])).remove)


def _is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours, theirs[: len(ours)])
