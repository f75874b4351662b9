"""Rotary embeddings of an engine on a CPU."""

from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm")

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

from trl_qarl.vllm_plugin.cpu_rotations import register_rotations


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's kernel for CPUs")]


def test_queries_with_an_axis_of_heads_are_rotated_by_token(monkeypatch):
    theirs = getattr(RotaryEmbedding.forward_cpu, "__wrapped__", RotaryEmbedding.forward_cpu)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", theirs)
    register_rotations()
    angles = torch.outer(torch.arange(8.0), 10.0 ** -torch.arange(0, 4, 0.125))
    table = torch.cat([angles.cos(), angles.sin()], -1)
    rope = SimpleNamespace(head_size=64, is_neox_style=True, _match_cos_sin_cache_dtype=lambda query: table)
    query, key, positions = torch.randn(8, 4, 64), torch.randn(8, 2, 64), torch.arange(8)
    expected = theirs(rope, positions, query.flatten(1).clone(), key.flatten(1).clone())
    ours = RotaryEmbedding.forward_cpu(rope, positions, query.clone(), key.clone())
    assert all(torch.equal(each.flatten(1), rows) for each, rows in zip(ours, expected, strict=True))
    alone, _ = theirs(rope, positions, query.clone(), key.clone())
    assert not torch.equal(alone.flatten(1), expected[0])


def test_heads_with_a_dimension_of_their_own_are_rotated():
    """As latent attention gives them: the last features of each head of the queries, and one head of the keys."""
    from vllm.config import VllmConfig, set_current_vllm_config

    register_rotations()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(32, 32, 64, 1e4, False, torch.float32)
    positions, queries, keys = torch.arange(5), torch.rand(5, 4, 96)[..., 64:], torch.rand(5, 1, 80)[..., 48:]
    wanted = rotary.forward_native(positions, queries.flatten(1), keys.flatten(1))
    rotated = rotary.forward_cpu(positions, queries, keys)
    for heads, rows in zip(rotated, wanted, strict=True):
        torch.testing.assert_close(heads.flatten(1), rows)
