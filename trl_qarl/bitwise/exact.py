"""Check that learner and sampler give every sampled token the same log-prob, and search for the first difference."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..forward import Batch
from ..quantization.names import base_model
from ..quantization.storage import is_sharded
from ..wire.describe import differences
from . import cuda, low_bit
from .modules import Router, operation_of
from .ops import token_log_probs


logger = logging.getLogger(__name__)


class Exactness:
    """Reaction to a sampled token whose log-prob differs between the engine and a learner with engine numerics: raises
    if exactness `is_required`, else logs the first such batch. After `has_differed`, the sampler's log-probs no longer
    replace the learner's."""

    def __init__(self, is_required: bool):
        self.is_required, self.has_differed = is_required, False

    def check(
        self, output: dict[str, Any], batch: Batch, model: nn.Module, accelerator: Any, llm=None, score=None
    ) -> None:
        """Compare the log-probs of a generation batch bit for bit on every process. `output` is TRL's batch, `batch`
        the same as a [`~trl_qarl.forward.Batch`]; `llm` and `score` are those of [`describe_difference`]. If exactness
        is required, `RuntimeError` names the token that differs."""
        largest, *_ = largest_difference(*batch.rollout)
        overall = accelerator.gather(torch.tensor([largest], device=accelerator.device)).max().item()
        if overall == 0.0 or self.has_differed:
            return
        where = describe_difference(output, batch.mask, accelerator.unwrap_model(model), llm, score)
        message = f"the largest mismatch is {overall:.3g} and not 0: {where}."
        if self.is_required:
            raise RuntimeError(f"numerics='exact': {message} Set numerics='engine' to train in spite of it.")
        logger.warning(
            "numerics='engine': %s From the next batch on, each rollout is scored by an additional forward.", message
        )
        self.has_differed = True


def check_arithmetic(engine: Mapping[str, Any], on_gpu: bool = False, adapter_rank: int | None = None) -> None:
    """Raise `ValueError`, naming both values of each difference, unless the engine has the kernels of this process.
    The entry `"arithmetic"` of `engine` is [`~trl_qarl.bitwise.low_bit.describe_arithmetic`] of the engine, or its
    counterpart in [`trl_qarl.bitwise.cuda`]. `adapter_rank` is the rank to which the learner pads adapters next to
    its layers."""
    # The learner never splits sums over threads, despite the environment of this process.
    ours = cuda.describe_arithmetic() if on_gpu else low_bit.describe_arithmetic() | {"VLLM_CPU_ATTN_SPLIT_KV": 0}
    theirs = engine.get("arithmetic") or {}
    if adapter_rank is not None:
        ours, theirs = ours | {"max_lora_rank": adapter_rank}, theirs | {"max_lora_rank": engine["lora"]["max_rank"]}
    if lines := differences("  ", ours, theirs, ours):
        raise ValueError(
            "numerics='exact': the engine's arithmetic is not the learner's:\n"
            + "\n".join(lines)
            + "\nStart the server with "
            "`trl-qarl vllm-serve --numerics engine`, with the same releases of vLLM and trl_qarl on the same kind of "
            "processor, or use numerics='engine' or 'fast'."
        )


def largest_difference(
    old_per_token_logps: torch.Tensor, sampling_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> tuple[float, int, int]:
    """Return the largest `|old - sampling|` over the tokens of `mask`, all `(B, T)`, and its row and column. NaN, an
    unknown log-prob, counts as infinite."""
    difference = (old_per_token_logps - sampling_per_token_logps).abs().nan_to_num(nan=torch.inf)
    difference = difference.masked_fill(~mask.bool(), 0.0)
    index = int(difference.argmax())
    return difference.flatten()[index].item(), *divmod(index, difference.shape[1])


def describe_difference(
    output: dict[str, Any], mask: torch.Tensor, model: nn.Module, llm: Any = None, score: Callable | None = None
) -> str:
    """Describe the token of a generation batch that differs most, and the first layer, or else the first token, that
    differs when the engine computes the whole sequence. `mask`, `(B, T)`, is true for completion tokens; `llm` is the
    engine in this process, if any; `score` is that of another [`~trl_qarl.engines.engine.Engine`]."""
    old, sampling = output["old_per_token_logps"], output["sampling_per_token_logps"]
    largest, row, column = largest_difference(old, sampling, mask)
    if largest == 0:
        return "it is on another process, whose message names the token"
    text = (
        f"learner and sampler give token {column} of completion {row} (id {output['completion_ids'][row, column].item()}) "
        f"log-probs {old[row, column].item():.6f} and {sampling[row, column].item():.6f}"
    )
    # With sharded masters, all processes would have to compute.
    if is_sharded(model) or (llm is None and score is None):
        return text
    prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
    completion = output["completion_ids"][row, : column + 1].tolist()
    if llm is None:
        return f"{text}; {_ask_again(model, score, prompt + completion, len(prompt))}"
    difference = _first_difference(model, llm, prompt + completion[:-1])
    agreement = "over the same tokens at once all layers agree, so the engine's decoding differs from its prefill"
    return f"{text}; {difference or agreement}"


@torch.no_grad()
def _ask_again(model: nn.Module, score, ids: list[int], num_prompt: int) -> str:
    """Compare the learner with an engine in another process on a whole sequence."""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    ours = token_log_probs(logits, tokens[0, 1:]).tolist()
    # Of the first replica.
    theirs = score(ids)[: len(ours)]
    differing = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b]
    text = "over the same tokens at once, at temperature 1,"
    if not differing:
        return f"{text} it agrees on all, so its decoding differs from its prefill"
    index = differing[0]
    place = f"token {index} of the prompt" if index < num_prompt else f"token {index - num_prompt} of the completion"
    return (
        f"{text} {len(differing)} of {len(ours)} differ, the first is {place} (learner {ours[index - 1]:.6f}, engine "
        f"{theirs[index - 1]:.6f}); vllm_mode='colocate' would name the layer"
    )


@torch.no_grad()
def _first_difference(model: nn.Module, llm: Any, ids: list[int]) -> str | None:
    """Describe the first of the learner's embedding, decoder layers and final norm whose output for one sequence,
    `ids`, differs from that of the engine in this process, and for a mixture the first token that its router sends to
    other experts. Return `None` if all agree."""
    from vllm import SamplingParams

    model = base_model(model)
    names = ["embed_tokens", *(f"layers.{i}" for i in range(model.config.num_hidden_layers)), "norm"]
    base = model.base_model
    if hasattr(base.embed_tokens, "embed_scale"):
        # vLLM scales outside its embedding.
        del names[0]
    with _outputs(base, names) as learner:
        base(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    llm.reset_prefix_cache()
    [engine_base] = llm.apply_model(lambda engine: engine.model)
    with _outputs(engine_base, names) as engine:
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1), use_tqdm=False)
    name = next((n for n in names if not torch.equal(learner[n], engine[n][: len(learner[n])])), None)
    if name is None:
        return None
    text = f"{name!r} is the first layer whose output differs"
    ours, theirs = (outputs.get(f"router of {name}") for outputs in (learner, engine))
    if ours is None or theirs is None or torch.equal(ours, theirs[: len(ours)]):
        return text
    token = int((ours[: len(theirs)] != theirs[: len(ours)]).any(dim=1).nonzero()[0])
    return f"{text}: token {token} goes to experts {ours[token].tolist()} in the learner, {theirs[token].tolist()} in the engine"


@contextmanager
def _outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """While open, keep the first output of each named module, `(tokens, hidden_size)` float32, and as `"router of
    NAME"` the experts `(tokens, k)` that the router of a layer chooses."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name):
        def hook(module, args, output):
            hidden, *residual = output if isinstance(output, tuple) else (output,)
            if name.startswith("layers") and residual:
                # The engine's next norm adds the residual; the learner returns the unrounded sum.
                hidden = hidden.float() + residual[0].float()
            outputs.setdefault(name, hidden.float().reshape(-1, hidden.shape[-1]))

        return hook

    def keep_ids(name, ids):
        outputs.setdefault(f"router of {name}", ids.long())

    with ExitStack() as stack:
        for name in names:
            layer, keep_routes = model.get_submodule(name), partial(keep_ids, name)
            stack.callback(layer.register_forward_hook(keep(name)).remove)
            for module in layer.modules():
                if isinstance(operation_of(module), Router):
                    hook = module.register_forward_hook(lambda _, args, output, keep=keep_routes: keep(output[2]))
                    stack.callback(hook.remove)
                # The router of a layer in vLLM.
                elif hasattr(router := getattr(module, "router", None), "set_capture_fn"):
                    router.set_capture_fn(keep_routes)
                    stack.callback(router.set_capture_fn, None)
        yield outputs
