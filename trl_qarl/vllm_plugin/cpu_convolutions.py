"""
Short convolutions of LFM2 on a CPU.

On CPUs with bf16 instructions vLLM 0.31 packs the weights of all convolutions for a kernel
(`dispatch_cpu_unquantized_gemm` in `layers/utils.py`), but `ShortConv.forward_native` reads them in the order of the
checkpoint, which moves log-probs by 0.4 nats in a tiny model.
"""

from functools import wraps
from typing import Any


def register_convolutions() -> None:
    """Have vLLM leave the weights of these convolutions as they are loaded; calling it again changes nothing."""
    from vllm.model_executor.layers.mamba.short_conv import ShortConv

    init = ShortConv.__init__
    if hasattr(init, "__wrapped__"):
        return

    @wraps(init)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.conv._cpu_skip_gemm_dispatch = True

    ShortConv.__init__ = __init__
