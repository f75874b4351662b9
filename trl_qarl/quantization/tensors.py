"""
A low-bit weight as a tensor subclass of torchao, with the numbers of compressed-tensors.

A [`LowBitTensor`] is the cache of a quantized layer, the frozen weight of a converted `nn.Linear`, and the unit of
publication and export. torchao's `TorchAOBaseTensor` provides `detach`, `clone` and flattening; operations that
neither it nor this module defines raise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import TorchAOBaseTensor
from typing_extensions import override

from .formats.base import Format
from .formats.int4_packed import fp8_gemm_weight
from .formats.registry import format_of
from .gemm import drop_copies, low_bit_linear
from .quantize import dequantize_activation, quantize_weight
from .schemes import Container, Grid, QuantScheme, get_scheme


_Operands = TypeVar("_Operands")


class LowBitTensor(TorchAOBaseTensor):
    """
    A quantized weight `(N, K)` that takes no gradient.

    `F.linear` multiplies by it with the products of [`~trl_qarl.quantization.gemm`], with gradients to input and bias.
    `.to` moves it; a floating dtype changes only `orig_dtype`, not codes or scales. `copy_` takes another low-bit
    tensor of the same scheme and shape.

    `torch.equal` of two low-bit tensors compares scheme, dtype, codes and scales; with a dense tensor, dense values.

    - `qdata`: codes in the layout of the scheme's container ([`trl_qarl.quantization.formats`]).
    - `scale`: `(N, K / group_size)` or `(N, 1)`.
    - `global_scale`: divisor of the scales, float32 `(N, 1)` of one value; `None` for containers without one.
    - `orig_dtype`: dtype of the master, and the `dtype` of this tensor.
    - `gathered_shape`: shape of a sharded master whose codes and scales FSDP2 has gathered, and the `shape` of this
      tensor. FSDP2 frees them after use and fills them again, so nothing derived from them is cached.
    """

    tensor_data_names = ["qdata", "scale"]
    tensor_attribute_names = ["scheme", "orig_dtype", "gathered_shape"]
    optional_tensor_data_names = ["global_scale"]

    qdata: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    scheme: QuantScheme
    orig_dtype: torch.dtype
    gathered_shape: tuple[int, ...] | None
    _kept: dict[Callable[[Any], Any], Any]

    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        scheme: QuantScheme,
        orig_dtype: torch.dtype,
        gathered_shape: tuple[int, ...] | None = None,
        global_scale: torch.Tensor | None = None,
    ):
        shape = gathered_shape or (qdata.shape[0], format_of(scheme.container).in_features(qdata))
        new = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=orig_dtype, device=qdata.device)
        new.qdata, new.scale, new.global_scale = qdata, scale, global_scale
        new.scheme, new.orig_dtype, new.gathered_shape = scheme, orig_dtype, gathered_shape
        new._kept = {}
        return new

    @classmethod
    def from_hp(
        cls,
        weight: torch.Tensor,
        scheme: QuantScheme,
        scale_dtype: torch.dtype,
        global_scale: float | None = None,
        scale: torch.Tensor | None = None,
    ) -> "LowBitTensor":
        """Quantize a master weight; errors are those of [`~trl_qarl.quantization.quantize.quantize_weight`]."""
        return cls.from_parts(quantize_weight(weight, scheme, scale_dtype, global_scale, scale), scheme, weight.dtype)

    @classmethod
    def from_parts(
        cls,
        parts: Iterable[torch.Tensor],
        scheme: QuantScheme,
        orig_dtype: torch.dtype,
        gathered_shape: tuple[int, ...] | None = None,
    ) -> "LowBitTensor":
        """Return the inverse of [`~LowBitTensor.parts`]."""
        codes, scale, *global_scale = parts
        return cls(codes, scale, scheme, orig_dtype, gathered_shape, *global_scale)

    @property
    def format(self) -> Format:
        """Format of its tensors."""
        return format_of(self.scheme.container)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return codes, scales and, if there is one, the global scale; each has a row for each row of the weight."""
        parts = self.qdata, self.scale
        return parts if self.global_scale is None else (*parts, self.global_scale)

    def differs_only_in_codes(self, other: "LowBitTensor") -> bool:
        """Return whether everything except the codes is equal."""
        if any(getattr(self, name) != getattr(other, name) for name in ("scheme", "shape", "dtype")):
            return False
        pairs = zip(self.parts()[1:], other.parts()[1:], strict=True)
        # FP8 scales as bytes: PyTorch does not compare FP8 numbers.
        return all(torch.equal(*(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in pair)) for pair in pairs)

    def take(self, rows: Any) -> "LowBitTensor":
        """Return the rows of an index tensor or a slice."""
        return self.from_parts((part[rows] for part in self.parts()), self.scheme, self.orig_dtype)

    def codes(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the codes `(N, K)` in `dtype`."""
        return self.format.unpack(self.qdata, dtype)

    def scale_values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the scales as numbers in `dtype`, of the shape of `scale`."""
        return self.format.scale_values(dtype, *self.parts()[1:]).to(dtype)

    @classmethod
    def stack(cls, matrices: "Sequence[LowBitTensor]") -> "LowBitTensor":
        """Return the rows of all `matrices`, which have one scheme and width, in order."""
        if len(matrices) == 1:
            return matrices[0]
        parts = map(torch.cat, zip(*(m.parts() for m in matrices), strict=True))
        return cls.from_parts(parts, matrices[0].scheme, matrices[0].orig_dtype)

    @property
    def group_size(self) -> int | None:
        """Input features that share a scale; `None` for one scale per output channel."""
        return None if self.scheme.group_size is None else self.shape[-1] // self.scale.shape[1]

    @property
    def shared_scale(self) -> float | None:
        """The global scale as a number."""
        return None if self.global_scale is None else self.global_scale[0].item()

    @override
    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the dense weight in `output_dtype` or `orig_dtype`: scale times code."""
        return self.format.dequantize(output_dtype or self.orig_dtype, *self.parts())

    def gemm_weight(self) -> "LowBitTensor":
        """Return the operand of the engine's product: this tensor, or for `w4a8` FP8 codes with float32 scales."""
        return self.cached(_fp8_tensor) if self.scheme.has_fp8_scales else self

    def cached(self, make: Callable[["LowBitTensor"], _Operands]) -> _Operands:
        """Return `make(self)`, such as a kernel's operands, computed once, or at each call if codes are gathered."""
        if make in self._kept:
            return self._kept[make]
        # Tensors made in inference mode could not take part in training later.
        with torch.inference_mode(False), torch.no_grad():
            operands = make(self)
        if self.gathered_shape is None:
            self._kept[make] = operands
        return operands

    def has_cached(self, make: Callable[["LowBitTensor"], Any]) -> bool:
        """Return whether the result of `make` is kept."""
        return make in self._kept

    def drop(self, make: Callable[["LowBitTensor"], Any]) -> None:
        """Drop the result of `make` from [`~LowBitTensor.cached`]."""
        self._kept.pop(make, None)

    def row_blocks(self, num_blocks: int) -> "tuple[LowBitTensor, ...]":
        """Return equal blocks of the rows as views, such as the matrices of experts. Each call returns the same
        objects, because kernels cache operands in them."""
        return (self,) if num_blocks == 1 and self.dim() == 2 else self.cached(_RowBlocks(num_blocks))

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors under compressed-tensors' checkpoint names, without the layer's prefix."""
        return self.format.to_checkpoint(*self.parts())

    @classmethod
    def from_checkpoint(
        cls, tensors: Mapping[str, torch.Tensor], scheme: QuantScheme, orig_dtype: torch.dtype
    ) -> "LowBitTensor":
        """Return the inverse of [`~LowBitTensor.checkpoint_tensors`]."""
        return cls.from_parts(format_of(scheme.container).from_checkpoint(tensors), scheme, orig_dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        return f"LowBitTensor({tuple(self.shape)}, {self.scheme.name}{group}, {self.orig_dtype}, {self.device})"


class _RowBlocks(NamedTuple):
    num_blocks: int

    def __call__(self, weight: LowBitTensor) -> tuple[LowBitTensor, ...]:
        # A shard without rows has no blocks.
        num_rows = len(weight.qdata) // max(self.num_blocks, 1)
        parts = (tensor.split(num_rows) if num_rows else () for tensor in weight.parts())
        shape = (num_rows, weight.shape[-1]) if weight.gathered_shape is not None else None
        return tuple(
            LowBitTensor.from_parts(block, weight.scheme, weight.orig_dtype, shape)
            for block in zip(*parts, strict=True)
        )


def _fp8_tensor(weight: LowBitTensor) -> LowBitTensor:
    return LowBitTensor(*fp8_gemm_weight(weight.qdata, weight.scale), get_scheme("fp8"), weight.orig_dtype)


# A tracer would take codes and kernels apart, and a compiler might round activations in another order.
@torch.compiler.disable
def straight_through_linear(
    x: torch.Tensor,
    weight: LowBitTensor,
    bias: torch.Tensor | None,
    master: torch.Tensor | None = None,
    product: Callable[..., tuple[Any, ...]] = low_bit_linear,
) -> torch.Tensor:
    """Return `x @ w'.T + bias` for `x` of any leading dimensions; under autocast in its dtype, like `nn.Linear`.
    Gradients go to `x`, `bias` and `master` where requested, as if neither weight nor activations were rounded.
    `product` has the signature and result of [`~trl_qarl.quantization.gemm.low_bit_linear`]."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1])
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, master, bias))
    if needs_grad:
        weight.format.release(rows, weight)
        y = _StraightThroughLinear.apply(rows, master, bias, weight, product)
        drop_copies(weight)
    else:
        y = product(rows, weight, bias)[0]
    return y.view(*x.shape[:-1], y.shape[-1])


class _StraightThroughLinear(torch.autograd.Function):
    """Low-bit product forward, high-precision straight-through backward; the low-bit weight takes no gradient."""

    @staticmethod
    def forward(ctx, rows, master, bias, weight, product):
        y, seen, *_ = product(rows, weight, bias)
        ctx.weight = weight
        ctx.master_dtype = None if master is None else master.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*(seen if ctx.needs_input_grad[1] else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_rows = grad_master = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_rows = grad @ ctx.weight.gemm_weight().dequantize(grad.dtype)
        if ctx.needs_input_grad[1]:
            seen = ctx.saved_tensors
            x = seen[0] if len(seen) == 1 else dequantize_activation(*seen, grad.dtype)
            grad_master = (grad.t() @ x).to(ctx.master_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_rows, grad_master, grad_bias, None, None


@LowBitTensor.implements_torch_function(F.linear)
def _linear(func, types, args, kwargs):
    return _multiply(*args, **kwargs)


# Arguments have PyTorch's names.
def _multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, LowBitTensor) or isinstance(input, LowBitTensor):
        raise TypeError("A low-bit tensor can be the weight of `F.linear` only. Use `dequantize()` elsewhere.")
    if weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "A low-bit weight takes no gradient, but it has requires_grad=True. Train its master "
            "(`prepare_model`), or freeze it: `weight.requires_grad_(False)`."
        )
    return straight_through_linear(input, weight, bias)


@LowBitTensor.implements(torch.ops.aten._to_copy.default)
def _to_copy(func, types, args, kwargs):
    self = args[0]
    to = self._get_to_kwargs(*args[1:], **kwargs)
    if not to["dtype"].is_floating_point:
        raise TypeError(f"A low-bit tensor has no {to['dtype']} form. Its codes are `qdata`.")
    parts = (t.to(to["device"], non_blocking=to.get("non_blocking", False)) for t in self.parts())
    moved = LowBitTensor.from_parts(parts, self.scheme, to["dtype"])
    return return_and_correct_aliasing(func, args, kwargs, moved)


@LowBitTensor.implements(torch.ops.aten.copy_.default)
def _copy(func, types, args, kwargs):
    self, source = args[:2]
    fits = isinstance(self, LowBitTensor) and isinstance(source, LowBitTensor)
    if not fits or (self.scheme, self.shape, self.scale.shape) != (source.scheme, source.shape, source.scale.shape):
        raise ValueError(f"copy_ takes a low-bit tensor of the same scheme and shape: {source!r} into {self!r}.")
    for part, new in zip(self.parts(), source.parts(), strict=True):
        part.copy_(new)
    self._kept.clear()
    return self


@LowBitTensor.implements(torch.ops.aten.as_strided.default)
def _as_strided(func, types, args, kwargs):
    # FSDP2 asks for the shape and strides of the sharded master or bytes; a gathered tensor has its own.
    self, size, stride = args[:3]
    if self.gathered_shape is None:
        raise NotImplementedError(
            f"A low-bit tensor {tuple(self.shape)} has no view of shape {tuple(size)}, strides {tuple(stride)}."
        )
    return self.detach()


@LowBitTensor.implements(torch.ops.aten.unbind.int)
def _unbind(func, types, args, kwargs):
    # For gathered experts, so that each takes its own gradient.
    self = args[0]
    if self.dim() != 3 or any(args[1:]):
        raise NotImplementedError(f"A low-bit tensor {tuple(self.shape)} is no stack of matrices along dimension 0.")
    return self.row_blocks(len(self))


@LowBitTensor.implements(torch.ops.aten.zeros_like.default)
def _zeros_like(func, types, args, kwargs):
    # FSDP2 reduces zeros as the gradient of a layer that took no part in the forward.
    return torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device)


@LowBitTensor.implements([torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor])
def _add(func, types, args, kwargs):
    # `+=` would take a TypeError for a missing operator.
    raise RuntimeError(
        "Nothing can be added to a low-bit weight: the sum, such as of PEFT's `merge_and_unload`, would be rounded away. Serve "
        "the adapter next to the base, or merge it into the high-precision base."
    )


@LowBitTensor.implements_torch_function([torch.equal, torch.Tensor.equal])
def _equal(func, types, args, kwargs):
    return _are_equal(*args, **kwargs)


def _are_equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    if not isinstance(input, LowBitTensor) or not isinstance(other, LowBitTensor):
        return torch.equal(_dense(input), _dense(other))
    return input.differs_only_in_codes(other) and torch.equal(*(t.qdata.view(torch.uint8) for t in (input, other)))


def _dense(value: Any) -> Any:
    return value.dequantize() if isinstance(value, LowBitTensor) else value


# On import, as torchao registers its own: `torch.load(weights_only=True)` calls nothing of this package first.
torch.serialization.add_safe_globals([LowBitTensor, QuantScheme, Grid, Container])
