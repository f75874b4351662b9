"""
Linear kernels for vLLM with the learner's products, where vLLM's kernels cannot run, be reloaded or be repeated.

| scheme | vLLM's kernel on a CPU | taken from here when |
|---|---|---|
| INT4 or INT8 and `a16` | `CPUWNA16LinearKernel`: AVX512 code for bf16 and fp16, INT4 only, four times slower than bf16 | always; in other engines float32, no AVX512, INT8 weights, odd shapes |
| `w4a8-int8` | the same, which leaves activations unrounded | always |
| `mxfp4a16`, `nvfp4a16` | none | always |
| `w8a8` | `CPUInt8ScaledMMLinearKernel`: oneDNN | always: NaN after the first reload, saturates without VNNI |
| `fp8` | `aten::_scaled_mm` | always: with AMX it is oneDNN's reference code, 100 times slower |
| not quantized, bf16 | oneDNN | with AVX512: another arithmetic for a single row, with AMX above 32 rows ([`trl_qarl.bitwise.cpu`]) |

They are chosen only in an engine that receives its weights through [`trl_qarl.vllm_plugin.weight_transfer`]; those of
the first three rows also serve exports in float32 or FP4 in any engine, because vLLM has no kernel for them, and INT8
codes on processors without VNNI, on which oneDNN's sums saturate. Where a learner may repeat the engine, a layer has
one kernel for any number of rows, so prefill and decode give the same bits; elsewhere it has the fastest.

On a GPU they are chosen only in an engine that also runs eagerly with `VLLM_BATCH_INVARIANT=1`, so that a learner
repeats it bit for bit (`numerics="engine"`). vLLM 0.31 has no such product of INT4 weights (Marlin), and the tiling of
its product of FP8 codes depends on the number of rows; vLLM 0.33 expands INT4 weights as well. Untested on GPUs, see
[`trl_qarl.bitwise.cuda`].
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel, MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers import utils
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from ..bitwise import cuda
from ..bitwise.cpu import dispatch_row_invariant
from ..bitwise.low_bit import multiplication
from ..quantization.schemes import INT4_PACKED, get_scheme
from ..quantization.tensors import LowBitTensor
from ..wire.protocol import FILE_BACKEND, NCCL_BACKEND


def register_kernels(platform: PlatformEnum) -> None:
    """Put the kernels for `platform` first in vLLM's lists; calling it again changes nothing."""
    kernels: dict[str, type] = {"": RepeatableInt4Kernel, "INT8_": RepeatableInt8Kernel, "FP8_": RepeatableFp8Kernel}
    if platform is PlatformEnum.CPU:
        kernels = {"": QaRLWeightOnlyKernel, "INT8_": QaRLInt8Kernel, "FP8_": QaRLFp8Kernel, "MXFP4_": QaRLMxFp4Kernel}
    for kind, kernel in kernels.items():
        # vLLM takes the first that fits, and its own kernel claims shapes that it cannot run.
        table = getattr(linear, f"_POSSIBLE_{kind}KERNELS").setdefault(platform, [])
        if kernel not in table:
            table.insert(0, kernel)
    if platform is PlatformEnum.CUDA:
        return
    # vLLM always takes the class with this name for NVFP4 weights with 16-bit activations.
    linear.MarlinNvFp4LinearKernel = QaRLNvFp4Kernel
    # vLLM has a registry only for quantized kernels. Its method for unquantized layers, including the output head,
    # looks up this function in its module after each load.
    original = utils.dispatch_cpu_unquantized_gemm
    if not getattr(original, "is_row_invariant", False):
        utils.dispatch_cpu_unquantized_gemm = dispatch_row_invariant(original, is_our_engine)


def is_our_engine(*backends: str, config: VllmConfig | None = None) -> bool:
    """Return whether the engine of `config`, by default the one being built, receives its weights from this package
    through one of `backends` (by default, files)."""
    config = config or get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend in (backends or (FILE_BACKEND,))


class LowBitKernel:
    """Base of all kernels, to be listed before vLLM's base class. Tensors are used in checkpoint format, without
    repacking at a reload."""

    serves_any_engine = False
    codes_name: str | None = None
    """Name of the parameter with the codes, if vLLM leaves them as loaded."""
    # Returns why layers of a configuration cannot run here, or `None`.
    _reason_against: Callable[[Any], str | None]
    # Returns the weight of a layer, made from its tensors, for activations in a dtype.
    _make_low_bit: Callable[[torch.nn.Module, torch.dtype], LowBitTensor]
    _multiplication = staticmethod(multiplication)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        reason = cls._reason_against_engine() or cls._reason_against(c)
        return reason is None, reason

    @classmethod
    def _reason_against_engine(cls) -> str | None:
        """Return why the engine that is being built does not take this kernel, or `None`."""
        return None if cls.serves_any_engine or is_our_engine() else "weights do not come from trl_qarl"

    def codes_as_loaded(self, layer: torch.nn.Module) -> torch.Tensor:
        """Return the codes of a layer with the rows of a checkpoint."""
        return getattr(layer, self.codes_name).data

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._product: Callable[..., torch.Tensor] | None = None

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._product is None:
            # At the first use, because vLLM copies reloaded values into the tensors that it keeps.
            self._product = self._multiplication(self._make_low_bit(layer, x.dtype), x.dtype)
        return self._product(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)


_WEIGHT_ONLY = {scalar_types.uint4b8: "w4a16", scalar_types.uint8b128: "w8a16"}
"""Schemes by vLLM's weight types."""


class QaRLWeightOnlyKernel(LowBitKernel, MPLinearKernel):
    """INT4 and INT8 weights with 16- or 32-bit activations, and INT4 weights with INT8 activations."""

    serves_any_engine = True
    codes_name = "weight_packed"
    # Reason for this kernel, and remedy for a checkpoint that it cannot read.
    _reason, _remedy = "vLLM has no kernel on this CPU", "Serve the checkpoint with `--dtype bfloat16`."

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def _reason_against(cls, c: MPLinearLayerConfig) -> str | None:
        if c.weight_type not in _WEIGHT_ONLY or c.zero_points:
            return f"weight type {c.weight_type} is neither INT8 nor INT4 without zero points"
        if (
            not is_our_engine()
            and not _has_activations("int")
            and c.weight_type == scalar_types.uint4b8
            and c.act_type in (torch.bfloat16, torch.float16)
            and torch.cpu._is_avx512_supported()
            and CPUWNA16LinearKernel.can_implement(c)[0]
        ):
            return "vLLM's own kernel runs here"
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        if self.w_q_name != "weight_packed" or getattr(layer, "weight_g_idx", None) is not None:
            raise ValueError(
                f"{self._reason} for {self.config.weight_type} weights with {self.config.act_type} "
                "activations, and the kernel of trl_qarl reads only pack-quantized compressed-tensors checkpoints without "
                f"activation reordering. {self._remedy}"
            )
        self._scheme = get_scheme(_WEIGHT_ONLY[self.config.weight_type])
        # vLLM's only hint at quantized activations, intended for another kernel.
        if hasattr(layer, "_humming_input_quant_config"):
            kind = self.config.weight_type
            if self._scheme.container != INT4_PACKED:
                raise ValueError(f"No kernel on a CPU multiplies {kind} weights by INT8 activations.")
            self._scheme = get_scheme("w4a8-int8")

    def _make_low_bit(self, layer, dtype):
        # A coarser grid in the same container has the same product.
        tensors = {name: getattr(layer, name).data for name in (self.w_q_name, self.w_s_name)}
        return LowBitTensor.from_checkpoint(tensors, self._scheme, tensors["weight_scale"].dtype)


class _Fp4Kernel(LowBitKernel):
    """FP4 weights with 16- or 32-bit activations."""

    serves_any_engine = True

    @classmethod
    def _reason_against(cls, c: MxFp4LinearLayerConfig | NvFp4LinearLayerConfig) -> str | None:
        # vLLM requests low-bit activations with MXFP4 in any case, so the checkpoint's entry counts.
        reason = "the checkpoint has 4-bit activations, which this kernel does not support"
        return reason if _has_activations("float") else None


class QaRLMxFp4Kernel(_Fp4Kernel, MxFp4LinearKernel):
    """MXFP4 weights."""

    def _make_low_bit(self, layer, dtype):
        return LowBitTensor(layer.weight.data, layer.weight_scale.data, get_scheme("mxfp4a16"), dtype)


class QaRLNvFp4Kernel(_Fp4Kernel, NvFp4LinearKernel):
    """NVFP4 weights."""

    def _make_low_bit(self, layer, dtype):
        # vLLM holds the inverse of the global scale, a power of two.
        tensors = {
            "weight_packed": layer.weight.data,
            "weight_scale": layer.weight_scale.data,
            "weight_global_scale": layer.weight_global_scale.data.float().reciprocal().reshape(1),
        }
        return LowBitTensor.from_checkpoint(tensors, get_scheme("nvfp4a16"), dtype)


def _has_activations(weight_type: str) -> bool:
    """Return whether the checkpoint being loaded has low-bit activations with 4-bit "int" or "float" weights."""
    config = get_current_vllm_config_or_none()
    model_config = config and config.model_config
    described = getattr(model_config and model_config.hf_config, "quantization_config", None) or {}
    return any(
        (weights["type"], weights["num_bits"]) == (weight_type, 4) and group.get("input_activations")
        for group in described.get("config_groups", {}).values()
        if (weights := group.get("weights"))
    )


class QaRLInt8Kernel(LowBitKernel, Int8ScaledMMLinearKernel):
    """INT8 weights with dynamic per-token INT8 activations."""

    codes_name = "weight"

    @classmethod
    def _reason_against_engine(cls) -> str | None:
        # vLLM's kernel would give wrong sums.
        return super()._reason_against_engine() if torch.cpu._is_vnni_supported() else None

    @classmethod
    def _reason_against(cls, c: Int8ScaledMMLinearLayerConfig) -> str | None:
        if not c.is_channelwise or c.is_static_input_scheme or not c.input_symmetric:
            return "not symmetric with a scale per output channel and per token"
        return None

    def _make_low_bit(self, layer, dtype):
        weight, scale, *_ = self._get_layer_params(layer)
        return LowBitTensor(weight.data, scale.data, get_scheme("w8a8"), scale.dtype)


class QaRLFp8Kernel(LowBitKernel, FP8ScaledMMLinearKernel):
    """FP8 weights with dynamic per-token FP8 activations."""

    codes_name = "weight"

    @classmethod
    def _reason_against(cls, c: FP8ScaledMMLinearLayerConfig) -> str | None:
        if not c.weight_quant_key.scale.group_shape.is_per_channel():
            return "not a scale per output channel"
        if not c.activation_quant_key.scale.group_shape.is_per_token():
            return "not a scale per token"
        return None

    def codes_as_loaded(self, layer):
        # vLLM holds FP8 weights transposed.
        return layer.weight.data.t()

    def _make_low_bit(self, layer, dtype):
        _, scale, *_ = self._get_layer_params(layer)
        return LowBitTensor(self.codes_as_loaded(layer), scale.data, get_scheme("fp8"), scale.dtype)

    def apply_scaled_mm(self, **arguments) -> torch.Tensor:
        raise NotImplementedError("apply_weights does not use it")


class _Repeatable:
    """Mixin for an engine on a GPU that a learner repeats; list it before a kernel for CPUs."""

    _multiplication = staticmethod(
        lambda low_bit, dtype: lambda rows, bias: cuda.low_bit_linear(rows, low_bit, bias)[0]
    )

    @classmethod
    def _reason_against_engine(cls) -> str | None:
        config = get_current_vllm_config_or_none()
        is_eager = config is not None and config.model_config.enforce_eager
        if is_eager and envs.VLLM_BATCH_INVARIANT and is_our_engine(FILE_BACKEND, NCCL_BACKEND):
            return None
        return "no learner of trl_qarl repeats this engine"


class RepeatableInt4Kernel(_Repeatable, QaRLWeightOnlyKernel):
    """INT4 weights with bfloat16 activations."""

    _reason, _remedy = "vLLM has no kernel that a learner repeats", "Serve such a checkpoint, or use numerics='fast'."

    @classmethod
    def _reason_against(cls, c: MPLinearLayerConfig) -> str | None:
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return f"weight type {c.weight_type} is not INT4 without zero points"
        return None if c.act_type is torch.bfloat16 else f"activations are {c.act_type}, not bfloat16"


class RepeatableInt8Kernel(_Repeatable, QaRLInt8Kernel):
    """INT8 weights with dynamic per-token INT8 activations."""


class RepeatableFp8Kernel(_Repeatable, QaRLFp8Kernel):
    """FP8 weights with dynamic per-token FP8 activations."""
