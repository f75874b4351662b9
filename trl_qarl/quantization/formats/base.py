"""
[`Format`]: the tensors of a low-bit weight in one container, and everything that is done with them.

A weight is a tuple of tensors, `qdata` and `scale` and the format's `operands`, in this order. Each has a row for each
row of the weight, so a part of the rows is a part of each, and stacking, sharding and moving a weight need no other
knowledge of them.

The arithmetic here is that of symmetric grids, with one scale per output channel or per group of input features:

    scale = amax(|w|) / d,  q = round(clamp(w / scale, qmin, qmax)),  w' = scale * q

with `d` half the range of the grid: 1.5 for 2 bits (codes -2..1), 3.5 for 3 (codes -4..3), 7.5 for INT4 (codes -8..7),
127.5 for INT8 (codes -128..127) and 448 for FP8 E4M3. A scale that comes out as zero (an all-zero group) is replaced
by the machine epsilon of its dtype. This is compressed-tensors' arithmetic, bit for bit
(https://github.com/vllm-project/compressed-tensors, `calculate_qparams` and `quantize`).

A grid with *signed scales* puts the largest weight on the smallest code, -2, -4 or -8 (docs/schemes.md):

    scale = w_max / qmin,  w_max the element of largest magnitude *with its sign*

Of `+a` and `-a` the negative one counts, wherever it stands, and `+a` becomes the largest code (7 for INT4). The
arithmetic is float32 (float64 for such masters), so a 16-bit master has the codes of its float32 copy. Division by a
power of two is exact: of a bf16 master with bf16 scales `w_max` is kept as it is, and the scales of 3 and 2 bits are 2
and 4 times those of 4, down to denormal numbers. Where rounding makes a scale smaller, codes are clamped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..schemes import Grid, QuantScheme


__all__ = ["Format", "KernelChoice", "Operand"]

Tensors = tuple[torch.Tensor, ...]


class Operand(NamedTuple):
    """A tensor besides codes and scales, of the shape of `scale` if it is `per_group`, else `(N, 1)`."""

    name: str
    dtype: torch.dtype
    per_group: bool


@dataclass(frozen=True)
class KernelChoice:
    """
    vLLM's kernels for a scheme on a GPU: class names of those that may run its linear layers, and a mixture's experts,
    the likeliest first. An engine takes them with these entries of vLLM's `linear_backend_per_quant` and with this
    `moe_backend`; `None` where its own choice does. `refusal` is the reason why vLLM must not run the scheme there,
    `instead` what to choose in its place.
    """

    linear: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    experts_backend: str | None = None
    refusal: str = ""
    instead: str = ""


class Format:
    """
    A container. A subclass in its own file says how codes are stored, and whatever else differs from INT8 codes as
    they are.

    *Codes* are numbers of the grid, one per weight; `qdata` holds them in memory. Methods that take `*operands` get
    the tensors in the order of the attribute.
    """

    # Tensors besides `qdata` and `scale`, and names of all in a checkpoint, without the layer's prefix.
    operands: tuple[Operand, ...] = ()
    checkpoint_names: tuple[str, ...] = ("weight", "weight_scale")
    # Type of GGUF that holds its codes as they are.
    gguf_type: str | None = None
    # Grids of activations, `None` for 16 bits, with which learner and engine share the product on a GPU, and with
    # which a mixture's experts have been compared in vLLM.
    repeated_on_gpus: tuple[Grid | None, ...] = ()
    experts_in_vllm: tuple[Grid | None, ...] = ()
    # True if transformers reads a checkpoint with such experts; the reason why no experts are quantized so.
    experts_in_transformers: bool = True
    refusal_of_experts: str | None = None
    # Compute capability from which vLLM computes with it on GPUs what the learner does.
    min_capability: tuple[int, int] = (8, 0)

    def quantize(
        self, weight: torch.Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, global_scale: float | None
    ) -> Tensors:
        """
        Return the tensors of a contiguous `weight`, `(N, K)`, as [`~trl_qarl.quantization.quantize.quantize_weight`]
        does, which calls this for blocks of rows.
        """
        grid = scheme.grid
        if scheme.scale_dtype is not None:
            scale_dtype = getattr(torch, scheme.scale_dtype)
            weight = weight.to(torch.promote_types(weight.dtype, scale_dtype))
        if grid.has_signed_scales or grid.has_zero_points:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        groups = in_groups(weight, scheme)
        scale, *operands = self.choose_scales(groups, scheme)
        scale = scale.to(scale_dtype)
        scale = torch.where(scale == 0, torch.finfo(scale_dtype).eps, scale)
        codes = self.quotients(groups, scale, *operands).clamp_(*grid.quant_range).view(weight.shape)
        if grid.type == "int":
            codes = codes.round_()
        return self.pack(codes), scale, *operands

    def choose_global_scale(self, weight: torch.Tensor) -> float | None:
        """Return the number that the scales of what an engine holds as one matrix share; `None` without one."""
        return None

    def choose_scales(self, groups: torch.Tensor, scheme: QuantScheme) -> Tensors:
        """Return scales of `groups`, `(N, groups, group_size)`, in their dtype, and the operands."""
        grid = scheme.grid
        return (_largest(groups, grid) / grid.scale_divisor,)

    def quotients(self, groups: torch.Tensor, scale: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """Return the codes of `groups` before they are clamped and rounded."""
        return groups / scale.unsqueeze(-1)

    def dequantize(
        self, dtype: torch.dtype, qdata: torch.Tensor, scale: torch.Tensor, *operands: torch.Tensor
    ) -> torch.Tensor:
        """
        Return the dense weight `(N, K)`: the exact product of scale and code, rounded once to `dtype`.

        This rounding is what Marlin and Machete apply to INT4 weights before the matrix product.
        """
        # A wider scale must not be rounded before the product.
        dense = self.unpack(qdata, scale.dtype if scale.dtype.itemsize > dtype.itemsize else dtype)
        # The group size is spelled out: no rows would leave `-1` undetermined.
        self.multiply_by_scales(dense.view(*scale.shape, dense.shape[1] // scale.shape[1]), scale, *operands)
        return dense.to(dtype)

    def multiply_by_scales(self, groups: torch.Tensor, scale: torch.Tensor, *operands: torch.Tensor) -> None:
        """Turn codes `(N, groups, group_size)` into weights, in place."""
        groups.mul_(self.scale_values(groups.dtype, scale, *operands).unsqueeze(-1))

    def scale_values(self, dtype: torch.dtype, scale: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """Return the scales as numbers, in `dtype` where they are stored in another form."""
        return scale

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return `qdata` of rounded codes `(N, K)`."""
        return codes.to(torch.int8)

    def unpack(self, qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the codes `(N, K)` in `dtype`, in memory of their own."""
        return qdata.to(dtype)

    def in_features(self, qdata: torch.Tensor) -> int:
        """Return the number of codes in a row."""
        return qdata.shape[1]

    def count_flips(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Return the number of codes that differ between two `qdata`, 0-d int64 on their device."""
        return (before.view(torch.uint8) != after.view(torch.uint8)).count_nonzero()

    def multiply(self, x: torch.Tensor, weight: Any, row_invariant: bool) -> tuple[torch.Tensor, str] | None:
        """
        Return `x @ w'.T` of `(M, K)` activations, or their codes as numbers, and a weight `(N, K)` by a kernel that
        takes the codes as they are, and its name; `None` where there is none, or where the product of the expanded
        weight is faster ([`trl_qarl.quantization.gemm`]). With `row_invariant` one kernel has to be used for any
        number of rows.
        """
        return None

    def release(self, x: torch.Tensor, weight: Any) -> None:
        """Drop what [`~Format.multiply`] keeps of `weight`, unless it multiplies `x` in a training step too."""

    def to_checkpoint(
        self, qdata: torch.Tensor, scale: torch.Tensor, *operands: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the tensors under compressed-tensors' names, without the layer's prefix."""
        return {"weight": qdata, "weight_scale": scale}

    def from_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the inverse of [`~Format.to_checkpoint`], without a copy where the layouts agree."""
        return tensors["weight"], tensors["weight_scale"]

    def kernels(self, scheme: QuantScheme, gpu: Any) -> KernelChoice:
        """Return vLLM's kernels for a scheme with this container on a GPU of compute capability 8.0 or newer."""
        raise NotImplementedError


def fits_cpu_kernels(x: torch.Tensor, weight: Any) -> bool:
    """Return whether dtypes and device are those of ATen's weight-only kernels for CPUs."""
    # ATen's float32 variants of these kernels are scalar code, and a float32 scale must not be rounded to bf16.
    return x.device.type == "cpu" and x.dtype is torch.bfloat16 and weight.scale.dtype is torch.bfloat16


def in_groups(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Return a weight `(N, K)` as `(N, groups, group_size)`; `ValueError` if no group size divides `K`."""
    rows, columns = weight.shape
    size = scheme.group_size_for(columns) or columns
    # Written out, as of no rows, such as a process' part of a small matrix, `-1` would be undetermined.
    return weight.reshape(rows, columns // size, size)


def _largest(groups: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Largest magnitude of each group, with the sign of its element where `grid` has signed scales."""
    if not grid.has_signed_scales:
        return groups.abs().amax(dim=-1)
    # Not `argmax`: which of several it finds depends on the order of the weights. `aminmax` is several times slower on
    # a CPU.
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    return torch.where(highest > -lowest, highest, lowest)
