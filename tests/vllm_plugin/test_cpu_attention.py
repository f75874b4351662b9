"""The engine's attention on a CPU, with vLLM's kernels and without an engine."""

from types import SimpleNamespace

import pytest
import torch

from trl_qarl.bitwise import cpu as kernels


pytest.importorskip("vllm.v1.attention.backends.cpu_attn", exc_type=ImportError)

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trl_qarl.vllm_plugin import register
from trl_qarl.vllm_plugin.cpu_attention import OnePassBackend, OnePassMetadataBuilder, describe_attention


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not kernels.has_engine_kernels(), reason=str(kernels.reason_against())),
]

BLOCK_SIZE = 32
NUM_BLOCKS = 90
COUNTS, LENGTHS = [1, 900, 1, 45, 16, 700], [1200, 900, 1, 1000, 40, 1024]
"""Decoding, a prefill, a first token, and chunks of prompts."""


def make_builder(is_ours=True, **fields):
    builder = object.__new__(OnePassMetadataBuilder)
    isa = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, 128)
    vars(builder).update(num_heads=4, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, window_size=-1, isa=isa)
    vars(builder).update(block_size=BLOCK_SIZE, kv_cache_dtype="auto", size=kernels.queries_in_one_pass(isa, 4, 2))
    vars(builder).update(is_cross_attention=False, is_encoder_only_attention=False, is_ours=is_ours)
    vars(builder).update(fields)
    return builder


def make_batch(counts=COUNTS, **fields):
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    # All requests have the same keys; rows are longer than any needs.
    table = torch.arange(NUM_BLOCKS, dtype=torch.int32).expand(len(counts), -1).contiguous()
    return CommonAttentionMetadata(
        **{
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
            "num_reqs": len(counts),
            "num_actual_tokens": sum(counts),
            "max_query_len": max(counts),
            "max_seq_len": max(LENGTHS),
            "block_table_tensor": table,
            "slot_mapping": torch.zeros(sum(counts), dtype=torch.int64),
            "causal": True,
        }
        | fields
    )


@pytest.fixture(autouse=True)
def no_split(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")


@pytest.mark.parametrize(
    ("fields", "counts", "batch_fields"),
    [
        ({"is_ours": False}, COUNTS, {}),
        ({}, [1] * len(COUNTS), {}),
        ({}, COUNTS, {"causal": False}),
        ({"is_cross_attention": True}, COUNTS, {}),
    ],
    ids=["other engine", "decoding", "not causal", "cross attention"],
)
def test_what_needs_no_parts_is_left_to_vllm(fields, counts, batch_fields):
    batch = make_batch(counts, **batch_fields)
    metadata = make_builder(**fields).build(0, batch)
    assert metadata.query_start_loc is batch.query_start_loc and metadata.seq_lens is batch.seq_lens
    assert metadata.block_table is batch.block_table_tensor and metadata.max_query_len == max(counts)


def test_tables_of_blocks_are_no_wider_than_the_longest_request():
    metadata = make_builder().build(0, make_batch())
    assert metadata.block_table.shape == (len(metadata.seq_lens), 38)
    assert metadata.num_actual_tokens == sum(COUNTS) == int(metadata.query_start_loc[-1])


def test_vllm_takes_it_on_cpus_and_registers_once():
    for _ in range(2):
        register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is OnePassBackend
    assert OnePassBackend.get_builder_cls() is OnePassMetadataBuilder
    # What vLLM knows it by, and what computes.
    assert OnePassBackend.get_name() == CPUAttentionBackend.get_name()
    assert OnePassBackend.get_impl_cls() is CPUAttentionBackend.get_impl_cls()


@pytest.mark.parametrize(("is_ours", "says"), [((True, True), kernels.IN_ONE_PASS), ((True, False), None)])
def test_an_engine_says_whether_all_its_layers_have_it(is_ours, says):
    groups = [[SimpleNamespace(metadata_builders=[make_builder(value)])] for value in is_ours]
    assert describe_attention(SimpleNamespace(attn_groups=groups)) == says
