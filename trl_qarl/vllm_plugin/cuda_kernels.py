"""
Linear kernels for vLLM on a GPU whose engine a learner repeats bit for bit (`numerics="engine"`): the learner's own
    products.

They are chosen only in an engine that receives its weights from here and runs eagerly with `VLLM_BATCH_INVARIANT=1`.
vLLM 0.31 has no such product of INT4 weights (Marlin), and its product of FP8 codes takes another tiling for other
numbers of rows; vLLM 0.33 expands INT4 weights as well. None of this has run on a GPU, see [`trl_qarl.numerics.cuda`].
"""

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from ..numerics import cuda
from ..wire.protocol import FILE_BACKEND, NCCL_BACKEND
from .linear_kernels import QaRLFp8Kernel, QaRLInt8Kernel, QaRLWeightOnlyKernel, is_our_engine, put_first


__all__ = ["RepeatableFp8Kernel", "RepeatableInt4Kernel", "RepeatableInt8Kernel", "is_repeatable", "register_kernels"]


def register_kernels() -> None:
    """Put the kernels first in vLLM's lists for GPUs; calling it again changes nothing."""
    put_first(PlatformEnum.CUDA, mp=RepeatableInt4Kernel, int8=RepeatableInt8Kernel, fp8=RepeatableFp8Kernel)


def is_repeatable() -> bool:
    """Return whether the engine that is being built is one that a learner repeats."""
    config = get_current_vllm_config_or_none()
    is_eager = config is not None and config.model_config.enforce_eager
    return is_eager and bool(envs.VLLM_BATCH_INVARIANT) and is_our_engine(FILE_BACKEND, NCCL_BACKEND)


class _Repeatable:
    """Mixin with the difference from the kernels for CPUs; list it before them."""

    @classmethod
    def _reason_against_engine(cls) -> str | None:
        return None if is_repeatable() else "no learner of trl_qarl repeats this engine"

    def _product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return cuda.low_bit_linear(rows, self._low_bit, bias)[0]


class RepeatableInt4Kernel(_Repeatable, QaRLWeightOnlyKernel):
    """INT4 weights with bfloat16 activations."""

    @classmethod
    def _reason_against(cls, c) -> str | None:
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return f"weight type {c.weight_type} is not symmetric INT4"
        return None if c.act_type is torch.bfloat16 else f"activations are {c.act_type}, not bfloat16"


class RepeatableInt8Kernel(_Repeatable, QaRLInt8Kernel):
    """INT8 weights with dynamic per-token INT8 activations."""


class RepeatableFp8Kernel(_Repeatable, QaRLFp8Kernel):
    """FP8 weights with dynamic per-token FP8 activations."""
