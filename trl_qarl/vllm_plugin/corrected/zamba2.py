"""Zamba 2."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import zamba2

from ...models import SHARED_BLOCK
from ...replacing import replaced


class Zamba2ForCausalLM(zamba2.Zamba2ForCausalLM):
    """vLLM's class, which gives the layers of shared blocks names that no checkpoint has (models/zamba2.py). It would
    look for low-bit ones, although a checkpoint leaves them out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        left_out = getattr(vllm_config.quant_config, "ignore", ())
        is_plain = any(SHARED_BLOCK in name.split(".") for name in left_out)
        make = zamba2.Zamba2AttentionDecoderLayer

        def make_block(*args: Any, quant_config: Any, **kwargs: Any) -> torch.nn.Module:
            return make(*args, quant_config=None if is_plain else quant_config, **kwargs)

        with replaced(zamba2, Zamba2AttentionDecoderLayer=make_block):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
