"""
[`Format`]: the tensors of a low-bit weight in one container, and the operations on them.

A weight is a tuple of tensors: `qdata`, `scale` and, in containers that have one, the global scale. Each tensor has
one row for each row of the weight, so stacking, sharding and moving a weight need no further knowledge of them.

The arithmetic here has one scale per output channel or per group of input features:

    scale = amax(|w|) / d,  q = round(clamp(w / scale, qmin, qmax)),  w' = scale * q

with `d` half the range of the grid: 7.5 for INT4 (codes -8..7), 127.5 for INT8 (codes -128..127) and 448 for FP8 E4M3.
A scale that comes out as zero (an all-zero group) is replaced by the machine epsilon of its dtype. This is
compressed-tensors' arithmetic, bit for bit (https://github.com/vllm-project/compressed-tensors, `calculate_qparams`
and `quantize`).

A grid with *signed scales* puts the largest weight on the smallest code, -2, -4 or -8 (docs/schemes.md):

    scale = w_max / qmin,  w_max the element of largest magnitude *with its sign*

If a group holds `+a` and `-a`, the negative one counts and `+a` becomes the largest code (7 for INT4). The arithmetic
is float32 (float64 for float64 masters), so a 16-bit master has the codes of its float32 copy. Division by a power of
two is exact, so the scales of 3 and 2 bits are 2 and 4 times those of 4 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..schemes import Grid, QuantScheme


Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class KernelChoice:
    """
    vLLM's kernels for a scheme on a GPU.

    `linear` and `experts` are class names of the kernels that may run linear layers and experts. vLLM takes them with
    the entries `backends` of `linear_backend_per_quant`, and with `experts_backend` as `moe_backend`. `refusal` is the
    reason why vLLM must not run the scheme there, `instead` the alternative.
    """

    linear: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    backends: Mapping[str, str] = field(default_factory=dict)
    experts_backend: str | None = None
    refusal: str = ""
    instead: str = ""


class Format:
    """
    Storage and arithmetic of one container. The base class stores INT8 codes one per byte.

    *Codes* are numbers of the grid, one per weight; `qdata` holds them in memory. Methods that take `*operands` get
    the global scale, `(N, 1)`, if there is one.

    - `num_bits`: bits of a code in memory.
    - `checkpoint_names`: names of all tensors in a checkpoint, without the layer's prefix.
    - `gguf_type`: type of GGUF that holds the codes unchanged.
    - `repeated_on_gpus`: grids of activations for which learner and engine share the product on a GPU, `None` for 16
      bits.
    - `experts_in_vllm`: grids of activations for which experts have been compared in vLLM.
    - `experts_in_transformers`: true if transformers reads a checkpoint with such experts.
    - `refusal_of_experts`: the reason why no experts are quantized to the format.
    - `min_capability`: compute capability from which vLLM on GPUs computes the same as the learner.
    """

    num_bits: int = 8
    checkpoint_names: tuple[str, ...] = ("weight", "weight_scale")
    gguf_type: str | None = None
    repeated_on_gpus: tuple[Grid | None, ...] = ()
    experts_in_vllm: tuple[Grid | None, ...] = ()
    experts_in_transformers: bool = True
    refusal_of_experts: str | None = None
    min_capability: tuple[int, int] = (8, 0)

    def quantize(
        self,
        weight: torch.Tensor,
        scheme: QuantScheme,
        scale_dtype: torch.dtype,
        global_scale: float | None,
        scale: torch.Tensor | None,
    ) -> Tensors:
        """Return the tensors of a block of rows of a weight, contiguous `(N, K)`, with these scales if given."""
        grid = scheme.grid
        scale_dtype = dtype_of_scales(scheme, scale_dtype)
        if scheme.scale_dtype is not None:
            weight = weight.to(torch.promote_types(weight.dtype, scale_dtype))
        if grid.has_signed_scales:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        groups = in_groups(weight, scheme)
        scale = (self.choose_scales(groups, scheme) if scale is None else scale).to(scale_dtype)
        scale = torch.where(scale == 0, torch.finfo(scale_dtype).eps, scale)
        codes = (groups / scale.unsqueeze(-1)).clamp_(*grid.quant_range).view(weight.shape)
        if grid.type == "int":
            codes = codes.round_()
        return self.pack(codes), scale

    def choose_global_scale(self, weight: torch.Tensor) -> float | None:
        """Return the number that divides all scales of a matrix; `None` for formats without one."""
        return None

    def choose_scales(self, groups: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
        """Return scales of `groups`, `(N, groups, group_size)`, in their dtype."""
        if scheme.grid.has_signed_scales:
            # `argmax` finds any of several; `aminmax` is several times slower on a CPU.
            lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
            largest = torch.where(highest > -lowest, highest, lowest)
        else:
            # Without a copy of the magnitudes.
            largest = torch.maximum(groups.amax(dim=-1), -groups.amin(dim=-1))
        return largest / scheme.grid.scale_divisor

    def dequantize(
        self, dtype: torch.dtype, qdata: torch.Tensor, scale: torch.Tensor, *operands: torch.Tensor
    ) -> torch.Tensor:
        """Return the dense weight `(N, K)`, the product of scale and code in `dtype`; of wider scales first in their
        dtype. Marlin and Machete round INT4 weights in the same way before the matrix product."""
        # A wider scale must not be rounded before the product.
        dense = self.unpack(qdata, scale.dtype if scale.dtype.itemsize > dtype.itemsize else dtype)
        # Without rows, `-1` would be undetermined.
        groups = dense.view(*scale.shape, dense.shape[1] // scale.shape[1])
        groups.mul_(self.scale_values(groups.dtype, scale, *operands).unsqueeze(-1))
        return dense.to(dtype)

    def scale_values(self, dtype: torch.dtype, scale: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """Return the scales as numbers, in `dtype` if they are stored in another form."""
        return scale

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return `qdata` of rounded codes `(N, K)`."""
        return codes.to(torch.int8)

    def unpack(self, qdata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of the codes `(N, K)` in `dtype`."""
        return qdata.to(dtype)

    def in_features(self, qdata: torch.Tensor) -> int:
        """Return the number of codes in a row."""
        return 8 * qdata.itemsize * qdata.shape[1] // self.num_bits

    def count_flips(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Return the number of codes that differ between two `qdata`, 0-d int64 on their device."""
        return (before.view(torch.uint8) != after.view(torch.uint8)).count_nonzero()

    def multiply(self, x: torch.Tensor, weight: Any, row_invariant: bool) -> tuple[torch.Tensor, str] | None:
        """Multiply `(M, K)` activations by a weight `(N, K)` with a kernel that reads the codes. Return `x @ w'.T` and
        the kernel's name; `None` without such a kernel, or if the product of the expanded weight is faster.
        `row_invariant` asks for one kernel for any number of rows."""
        return None

    def release(self, x: torch.Tensor, weight: Any) -> None:
        """Drop the operands that [`~Format.multiply`] keeps for `weight` unless training on `x` needs them too."""

    def to_checkpoint(
        self, qdata: torch.Tensor, scale: torch.Tensor, *operands: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the tensors under compressed-tensors' names, without the layer's prefix."""
        tensors = dict(zip(self.checkpoint_names, (qdata, scale), strict=False))
        if "weight_shape" in self.checkpoint_names:
            tensors["weight_shape"] = torch.tensor([len(qdata), self.in_features(qdata)], device=qdata.device)
        return tensors

    def from_checkpoint(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the inverse of [`~Format.to_checkpoint`], without a copy if the layouts agree."""
        codes, scale, *_ = self.checkpoint_names
        return tensors[codes], tensors[scale]

    def kernels(self, scheme: QuantScheme, gpu: Any) -> KernelChoice:
        """Return vLLM's kernels for a scheme with this container on a GPU of compute capability 8.0 or newer."""
        raise NotImplementedError


def dtype_of_scales(scheme: QuantScheme, engine_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a scheme's scales where the engine runs the model in `engine_dtype`."""
    return engine_dtype if scheme.scale_dtype is None else getattr(torch, scheme.scale_dtype)


def fits_cpu_kernels(x: torch.Tensor, weight: Any) -> bool:
    """Return whether ATen's weight-only kernels for CPUs take the dtypes and the device."""
    # ATen's float32 variants of these kernels are scalar code, and a float32 scale must not be rounded to bf16.
    return x.device.type == "cpu" and x.dtype is torch.bfloat16 and weight.scale.dtype is torch.bfloat16


def in_groups(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Return a weight `(N, K)` as `(N, groups, group_size)`; `ValueError` if no group size divides `K`."""
    rows, columns = weight.shape
    size = scheme.group_size_for(columns) or columns
    # A process' part of a small matrix may have no rows, for which `-1` would be undetermined.
    return weight.reshape(rows, columns // size, size)
