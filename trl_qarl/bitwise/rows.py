"""
Attention over the row of a [`~trl_qarl.token_row.Layout`] in transformers' own arithmetic.

Segments are computed by the attention that the model is configured with:

- `sdpa`: [`joined_attention`]. With a window that is shorter than a sequence, and for what FlashAttention does not
  take, segments get their keys, those of a shared prompt once for each completion: on a CPU one after the other, on a
  GPU in one call with lengths.
- `flash_attention_2`, `flash_attention_3`: with their keys, in one call with lengths.

Importing this module replaces these functions in transformers' registry by ones that do the same without a layout.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from ..quantization.names import base_model, has_tower
from ..token_row import Layout
from .flash import joined_attention, starts_of
from .modules import ATTENTION


KINDS = {"full_attention", "sliding_attention"}
"""Types of layers, in configurations, that attend to tokens alone."""


def reason_to_pad(model: nn.Module, device: torch.device | None = None) -> str | None:
    """Return why `model`, or its form on the meta device, cannot take the row of a layout on `device`, by default its
    own, or `None` if it can. From then on transformers' attention functions take layouts."""
    _extend_attention()
    model = base_model(model)
    config = model.config
    if config._attn_implementation == ATTENTION:
        return None
    if has_tower(model):
        return "it takes pictures"
    if getattr(model, "_is_stateful", False) or not KINDS.issuperset(getattr(config, "layer_types", None) or ()):
        return "it has recurrent or other layers that are not plain attention"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "its attention has sinks"
    function = AttentionInterface().get(config._attn_implementation)
    if not (model._supports_attention_backend and getattr(function, "takes_layouts", False)):
        return f"its attention ({config._attn_implementation}) takes no lengths"
    if (device or model.device).type == "cuda" and config._attn_implementation == "sdpa":
        return _reason_against_lengths()
    return None


@functools.lru_cache(maxsize=1)
def _reason_against_lengths() -> str | None:
    """Return why torch's FlashAttention with lengths cannot be used on this GPU, or `None` if it agrees with
    `sdpa`."""
    generator = torch.Generator().manual_seed(0)
    row = [torch.randn(1, heads, 40, 64, generator=generator).bfloat16().cuda() for heads in (4, 2, 2)]
    places = torch.tensor([*range(20), *range(20), *range(20, 40)]).cuda()
    query, *keys = row
    keys = [each.index_select(-2, places) for each in keys]
    try:
        for window in (None, 8):
            arguments = query, *keys, (20, 20), (20, 40), 0.125, window
            expected = _by_segments(*arguments)
            outputs = [_by_lengths(*arguments)]
            if window is None:
                flat = (each[0].transpose(0, 1) for each in row)
                outputs.append(joined_attention(*flat, (20, 20), ((slice(20, 40), slice(0, 20)),), 0.125)[None])
            difference = max((each - expected).abs().max().item() for each in outputs)
            if not difference < 0.05:
                return f"torch's attention with lengths differs from `sdpa` by {difference:.2g} on this GPU"
    except (RuntimeError, NotImplementedError) as error:
        return f"torch's attention with lengths cannot be called on this GPU ({error})"
    return None


def _in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors in the dtype in which autocast would call attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(each.to(torch.get_autocast_dtype(device)) for each in tensors)


class _Gather(torch.autograd.Function):
    """Tokens at `places` of `x`, `(..., N, head_dim)`; gradients of a token that is taken several times are added in
    float32."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.length = x.shape[-2]
        return x.index_select(-2, places)

    @staticmethod
    def backward(ctx, grad):
        [places] = ctx.saved_tensors
        shape = *grad.shape[:-2], ctx.length, grad.shape[-1]
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(shape, dtype=dtype, device=grad.device)
        return total.index_add_(-2, places, grad.to(dtype)).to(grad.dtype), None


def _by_segments(query, key, value, query_lengths, key_lengths, scale, window, dropout=0.0) -> torch.Tensor:
    """Return the attention `(1, N, heads, head_dim)` of one segment after the other."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
    outputs = []
    for q, k, v in zip(
        query.split(query_lengths, dim=2),
        *(x.split(key_lengths, dim=2) for x in (key, value)),
        strict=True,
    ):
        length, num_keys = q.shape[2], k.shape[2]
        is_plain = length == num_keys and (window is None or num_keys <= window)
        mask = None if is_plain else _mask(length, num_keys, window, q.device)
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask, dropout, is_plain, scale=scale))
    # AFMoE takes a view of it.
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _mask(length: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return `(length, num_keys)`, true where one of the last `length` positions sees a key."""
    places = torch.arange(num_keys, device=device)
    distance = places[num_keys - length :, None] - places
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _by_lengths(query, key, value, query_lengths, key_lengths, scale, window) -> torch.Tensor:
    """Return the attention `(1, N, heads, head_dim)` of all segments in one call of FlashAttention."""
    starts, longest = starts_of((query_lengths, key_lengths), query.device)
    tensors = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    sizes = (-1 if window is None else window - 1, 0)
    output = varlen_attn(*tensors, *starts, *longest, scale=scale, window_size=sizes, enable_gqa=True)
    return output[None]


def _with_layouts(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' attention function `name`, which can be called with a layout."""

    @functools.wraps(original)
    def attend(module, query, key, value, attention_mask, *args, layout: Layout | None = None, **kwargs):
        if layout is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        unknown = [each for each in ("position_bias", "s_aux") if kwargs.get(each) is not None]
        if args or unknown:
            raise NotImplementedError(f"{type(module).__name__} calls attention with {unknown or 'other arguments'}.")
        layout.calls.append(name)
        segments = layout.segments
        scale, window, dropout = (kwargs.get(each) for each in ("scaling", "sliding_window", "dropout"))
        if name == "sdpa":
            query, key, value = _in_autocast_dtype(query, key, value)
        takes_flash = query.shape[-1] == value.shape[-1] <= 256 and not dropout
        takes_flash &= not query.is_cuda or query.dtype in (torch.bfloat16, torch.float16)
        if name == "sdpa" and takes_flash and (window is None or window >= max(segments.key_lengths)):
            rows = (x[0].transpose(0, 1) for x in (query, key, value))
            return joined_attention(*rows, segments.query_lengths, segments.runs, scale)[None].contiguous(), None
        if segments.keys is not None:
            key, value = (_Gather.apply(x, segments.keys) for x in (key, value))
        lengths = segments.query_lengths, segments.key_lengths
        if name != "sdpa":
            starts, longest = starts_of(lengths, query.device)
            names = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
            given = kwargs | dict(zip(names, (*starts, *longest), strict=True))
            return original(module, query, key, value, None, **given)
        arguments = query, key, value, *lengths, scale, window
        if query.is_cuda and takes_flash:
            return _by_lengths(*arguments), None
        return _by_segments(*arguments, dropout or 0.0), None

    attend.takes_layouts = True
    return attend


@functools.lru_cache(maxsize=1)
def _extend_attention() -> None:
    for name in ("sdpa", "flash_attention_2", "flash_attention_3"):
        AttentionInterface.register(name, _with_layouts(name, AttentionInterface()[name]))
