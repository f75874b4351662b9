"""Mamba, Falcon Mamba and Jamba."""

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.models import jamba, mamba
from vllm.model_executor.models.interfaces import SupportsLoRA


JambaForCausalLM = jamba.JambaForCausalLM


@MambaMixer.register_oot
class LowBitMambaMixer(MambaMixer):
    """vLLM's layer of Mamba 1, which makes its linear layers without the scheme of a checkpoint (mamba_mixer.py)."""

    def __init__(self, hidden_size: int, *args: Any, use_bias: bool, prefix: str = "", **kwargs: Any):
        super().__init__(hidden_size, *args, use_bias=use_bias, prefix=prefix, **kwargs)
        width, scheme = self.intermediate_size, get_current_vllm_config().quant_config
        # Others quantize what a checkpoint has in high precision.
        options = {"bias": use_bias, "quant_config": scheme if isinstance(scheme, CompressedTensorsConfig) else None}
        self.in_proj = MergedColumnParallelLinear(hidden_size, [width] * 2, prefix=f"{prefix}.in_proj", **options)
        self.out_proj = RowParallelLinear(width, hidden_size, prefix=f"{prefix}.out_proj", **options)
        # Gives `out_proj` contiguous rows, which low-bit kernels require too.
        self.is_lora_enabled = True


class MambaForCausalLM(mamba.MambaForCausalLM, SupportsLoRA):
    """vLLM's class, without what an adapter needs to know."""

    packed_modules_mapping = {"in_proj": ["in_proj"]}
    embedding_modules = {"embeddings": "input_embeddings", "lm_head": "output_embeddings"}


def _make_jambas_mixer(*args: Any, prefix: str, **kwargs: Any) -> MambaMixer:
    """Make a layer with the name that it has in checkpoints, which may leave parts of it in high precision."""
    return MambaMixer(*args, prefix=f"{prefix.removesuffix('mixer')}mamba", **kwargs)


jamba.MambaMixer = _make_jambas_mixer
