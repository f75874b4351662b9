"""
Linear kernels for vLLM on a CPU: the learner's own products, where vLLM's cannot run or cannot be reloaded.

| scheme | vLLM's kernel | taken from here when |
|---|---|---|
| INT4 or INT8 and `a16` | `CPUWNA16LinearKernel`: AVX512 code for bf16 and fp16, INT4 only, four times slower than bf16 | always; in other engines float32, no AVX512, INT8 weights, odd shapes |
| `w4a8-int8` | the same, which leaves activations unrounded | always |
| `mxfp4a16`, `nvfp4a16` | none | always |
| `w8a8` | `CPUInt8ScaledMMLinearKernel`: oneDNN | always: NaN after the first reload, saturates without VNNI |
| `fp8` | `aten::_scaled_mm` | always: with AMX it is oneDNN's reference code, 100 times slower |
| not quantized, bf16 | oneDNN | with AVX512: another arithmetic for a single row, with AMX above 32 rows ([`trl_qarl.numerics.cpu`]) |

They are chosen only in an engine that receives its weights through [`trl_qarl.vllm_plugin.weight_transfer`]. The first
three rows are for any engine, as vLLM has nothing there: it serves an export in float32, or in FP4. Calling
[`~trl_qarl.numerics.low_bit.multiply`] on a [`LowBitTensor`] of the checkpoint's tensors makes rollout and
learner the same arithmetic; the tensors are used as they arrive, so a reload has no layout to get wrong. A layer has
one kernel, whatever the number of rows: prefill and decode of the engine give the same bits.
"""

from vllm.model_executor.kernels import linear
from vllm.platforms.interface import PlatformEnum

from ..numerics.cpu import dispatch_row_invariant
from .linear_kernels import (
    QaRLFp8Kernel,
    QaRLInt8Kernel,
    QaRLMxFp4Kernel,
    QaRLNvFp4Kernel,
    QaRLWeightOnlyKernel,
    is_our_engine,
    put_first,
)


__all__ = ["register_kernels", "use_in_engine"]


def register_kernels() -> None:
    """Put the kernels first in vLLM's lists for CPUs; calling it again changes nothing."""
    put_first(PlatformEnum.CPU, mp=QaRLWeightOnlyKernel, int8=QaRLInt8Kernel, fp8=QaRLFp8Kernel, mxfp4=QaRLMxFp4Kernel)
    # vLLM forces this class for NVFP4 weights with 16-bit activations, and looks its name up when it does.
    linear.MarlinNvFp4LinearKernel = QaRLNvFp4Kernel
    use_in_engine(is_our_engine)


def use_in_engine(is_ours) -> None:
    """
    Have vLLM engines for which `is_ours()` run their unquantized linear layers, output head included, through
    [`~trl_qarl.numerics.cpu.PackedLinear`]; calling it again changes nothing.

    vLLM has a registry only for quantized kernels. Its method for unquantized layers looks this function up in its
    module each time weights have been loaded.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if not getattr(original, "is_row_invariant", False):
        utils.dispatch_cpu_unquantized_gemm = dispatch_row_invariant(original, is_ours)
