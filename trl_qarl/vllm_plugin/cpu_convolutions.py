"""
Weights of causal convolutions on a CPU.

On CPUs with bf16 instructions vLLM 0.31 packs them (`dispatch_cpu_unquantized_gemm` in `layers/utils.py`) for a kernel
that takes bfloat16 and a width of 4, and otherwise stops. Layers of Mamba 2 in float32, LFM2 with its width of 3, and
those of [`trl_qarl.vllm_plugin.cpu_scans`] compute by PyTorch operations, which need no packed weights.
"""

from functools import wraps

import torch


def register_convolutions() -> None:
    """Have vLLM leave the weights that its kernel cannot take; calling it again changes nothing."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if hasattr(dispatch, "leaves_convolutions"):
        return

    @wraps(dispatch)
    def dispatch_others(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        is_convolution = weight.ndim == 3 and weight.shape[1] == 1
        is_packed = weight.dtype is torch.bfloat16 and weight.shape[2:] == (4,)
        if not is_convolution or (is_packed and not hasattr(layer, "is_read_as_loaded")):
            dispatch(layer, remove_weight)

    dispatch_others.leaves_convolutions = True  # pyrefly: ignore[missing-attribute]
    utils.dispatch_cpu_unquantized_gemm = dispatch_others
