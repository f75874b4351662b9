"""The learner's forward over a generation batch: its inputs, its positions, and the tokens of the loss."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .token_row import Layout, divide


FORWARD_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
"""Inputs of a generation batch that the model's forward takes in addition to tokens and masks."""


def scoring_forward(
    model: nn.Module,
    unwrapped: nn.Module,
    takes_layouts: bool = False,
    chosen: torch.Tensor | None = None,
    max_tokens: int | None = None,
    on_ignored: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """
    Return the forward that scores completions with `model`, a wrapper of `unwrapped` or the same model.

    Positions are counted from the first token that is not padding, as in a rollout. A model of pictures and text whose
    positions have several dimensions (M-RoPE) computes its own. Empty pixel tensors, which TRL passes if no row has a
    picture, are left out. With `takes_layouts` the model gets a batch as one row, a [`~trl_qarl.token_row.Layout`],
    unless none can hold it. A model whose layers do not pass the layout on to their attention computes the padded
    batch, after a call of `on_ignored`; `RuntimeError` is raised if only some do, or without it. Only sequences that
    are `chosen`, `(B,)` bool, are computed, by default all; the values of others are 0. A batch whose layout has more
    than `max_tokens` is divided, and each part is computed again in the backward pass, so that only one part's
    activations are held.
    """
    config = unwrapped.config
    text = config.get_text_config()
    has_own_positions = text is not config and "mrope_section" in (getattr(text, "rope_parameters", None) or {})
    takes_positions = not has_own_positions and "position_ids" in inspect.signature(unwrapped.forward).parameters

    def forward(**inputs):
        if takes_positions:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        if not len(inputs.get("pixel_values", [None])):
            inputs = {name: value for name, value in inputs.items() if name not in ("pixel_values", "image_grid_thw")}
        if not takes_layouts or inputs.keys() & set(FORWARD_KEYS):
            return model(**inputs)
        if chosen is not None:
            inputs["labels"] = inputs["labels"].masked_fill(~chosen[:, None], -100)
        batch = [inputs[name] for name in ("input_ids", "attention_mask", "labels")]
        parts = [slice(None)] if max_tokens is None else divide(*batch, max_tokens)
        if len(parts) == 1:
            return score_row(**inputs)
        outputs = []
        for part in parts:
            tensors = {name: v[part] if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
            outputs.append(checkpoint(score_row, use_reentrant=False, **tensors))
        names = [name for name in ("log_probs", "entropy") if outputs[0].get(name) is not None]
        return type(outputs[0])(**{name: torch.cat([output[name] for output in outputs]) for name in names})

    def score_row(**inputs):
        counts_all = inputs.get("output_router_logits") or getattr(config, "output_router_logits", False)
        layout = Layout.of(*(inputs[name] for name in ("input_ids", "attention_mask", "labels")), bool(counts_all))
        if layout is None:
            return model(**inputs)
        # A mixture's auxiliary loss weights tokens by the mask.
        row = {"input_ids": layout.input_ids, "position_ids": layout.position_ids, "attention_mask": layout.counts}
        output = model(**inputs | row | {"labels": None, "shift_labels": layout.labels, "layout": layout})
        if not layout.calls and on_ignored is not None:
            on_ignored()
            return model(**inputs)
        if len(layout.calls) != config.num_hidden_layers:
            raise RuntimeError(
                f"{len(layout.calls)} of {config.num_hidden_layers} layers of {type(unwrapped).__name__} attended to single "
                "sequences of a row of tokens. Load the model with attn_implementation='eager', for which batches are padded."
            )
        for name in ("log_probs", "entropy"):
            if (values := output.get(name)) is not None:
                output[name] = layout.unpack(values)
        return output

    return forward


def shuffle_groups(batch: dict[str, Any], size: int, first: int = 0) -> dict[str, Any]:
    """
    Return a generation batch with its groups in random order. A group is `size` sequences that follow each other, of
    which this process may have a part: its first sequence is number `first` of all processes' sequences.

    It replaces TRL's `shuffle_sequence_dict`: values are tensors, lists or `None`, and scalars stay.
    """
    count = len(next(value for value in batch.values() if value is not None))
    groups = torch.arange(first, first + count) // size
    groups = groups - groups[0]
    order = torch.randperm(int(groups[-1]) + 1)[groups].argsort(stable=True)

    def ordered(value):
        if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
            return value
        return value[order.to(value.device)] if isinstance(value, torch.Tensor) else [value[i] for i in order]

    return {name: ordered(value) for name, value in batch.items()}


def padded_logps(rows: Sequence[Sequence[float | None]], length: int) -> torch.Tensor:
    """Return the log-probs of completions, `(B, length)` float32, padded with zeros; `None` stands for NaN."""
    logps = torch.zeros(len(rows), length)
    for target, row in zip(logps, rows, strict=True):
        target[: len(row)] = torch.tensor([float("nan") if value is None else value for value in row])
    return logps


class Batch(NamedTuple):
    """
    Log-probs, advantages and mask of a generation batch, or of one of its micro-batches.

    Args:
        old_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the learner at rollout, in nats.
        sampling_per_token_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs under which the tokens were sampled; NaN where unknown.
        advantages (`torch.Tensor` of shape `(B,)`):
            One advantage per sequence.
        mask (`torch.Tensor` of shape `(B, T)`):
            Nonzero for the sampled tokens that count in the loss.
        per_token_logps (`torch.Tensor` of shape `(B, T)`, *optional*):
            Log-probs of the learner now, if they have been computed.
    """

    old_per_token_logps: torch.Tensor
    sampling_per_token_logps: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    per_token_logps: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs: dict[str, Any], per_token_logps: torch.Tensor | None = None) -> "Batch":
        """Return the batch in TRL's dictionary `inputs`."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        names = ("old_per_token_logps", "sampling_per_token_logps", "advantages")
        return cls(*(inputs[name] for name in names), mask, per_token_logps)

    @property
    def rollout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs of learner and sampler at rollout, and the mask."""
        return self.old_per_token_logps, self.sampling_per_token_logps, self.mask


@torch.no_grad()
def learner_log_probs(
    model: nn.Module, token_ids: torch.Tensor, num_scored: int, **inputs: torch.Tensor
) -> torch.Tensor:
    """
    Return the log-probs `(num_scored, V)`, float32, that `model` predicts for the last positions of `token_ids`,
    `(T,)`; `inputs` are tensors of pictures.
    """
    ids = token_ids.unsqueeze(0)
    logits = model(input_ids=ids, logits_to_keep=num_scored + 1, use_cache=False, **inputs).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)
