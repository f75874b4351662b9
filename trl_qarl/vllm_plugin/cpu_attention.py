"""
Attention of vLLM on a CPU with the same bits in prefill and decoding, for any length, chunks and cached prefix: an
engine that receives its weights from [`trl_qarl.vllm_plugin.weight_transfer`] splits requests into parts of one pass
each ([`~trl_qarl.bitwise.cpu.one_pass_requests`]; docs/alignment.md says why). Other engines do not change.
"""

from dataclasses import replace
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadata, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..bitwise.cpu import IN_ONE_PASS, one_pass_requests, queries_in_one_pass
from .linear_kernels import is_our_engine


def register_attention() -> None:
    """Replace vLLM's attention backend for CPUs; calling it again changes nothing."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{OnePassBackend.__name__}")


def describe_attention(model_runner: Any) -> str | None:
    """Return [`~trl_qarl.bitwise.cpu.IN_ONE_PASS`] if all layers of an engine have this attention."""
    builders = [
        builder for groups in model_runner.attn_groups for group in groups for builder in group.metadata_builders
    ]
    return IN_ONE_PASS if all(getattr(builder, "is_ours", False) for builder in builders) else None


class OnePassMetadataBuilder(CPUAttentionMetadataBuilder):
    """Describes the requests of an engine step; the only difference from vLLM's backend."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_ours = is_our_engine(config=self.vllm_config)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        has_window = any(layer.sliding_window is not None for layer in layers.values())
        self.size = queries_in_one_pass(self.isa, self.num_heads, self.num_kv_heads, has_window)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> CPUAttentionMetadata:
        batch = common_attn_metadata
        # Encoders, and layers with cross-attention, see all keys.
        is_causal = batch.causal is True and not self.is_cross_attention and not self.is_encoder_only_attention
        if self.is_ours and is_causal and batch.max_query_len > self.size:
            starts, lengths, request = one_pass_requests(batch.query_start_loc, batch.seq_lens, self.size)
            # A row has room for the longest sequence; keep only the used blocks.
            table = batch.block_table_tensor[:, : -(-batch.max_seq_len // self.block_size)]
            batch = replace(
                batch,
                num_reqs=len(request),
                max_query_len=self.size,
                query_start_loc=starts,
                seq_lens=lengths,
                block_table_tensor=table[request],
            )
        return super().build(common_prefix_len, batch, fast_build)


class OnePassBackend(CPUAttentionBackend):
    """vLLM's attention for CPUs with [`OnePassMetadataBuilder`]."""

    @staticmethod
    def get_builder_cls() -> type[OnePassMetadataBuilder]:
        return OnePassMetadataBuilder
