"""
Recurrences of Mamba 1 and of the gated delta rule on a CPU, by operations of PyTorch in float32.

vLLM 0.31 has Mamba 1's scan only for GPUs (`selective_scan_fwd`), and its step for CPUs takes one decay and step size
for each head, as Mamba 2 has them (csrc/cpu/mamba_cpu.cpp). OLMo's layers name functions of Triton. Both read the
weight of their convolution as loaded, not packed ([`trl_qarl.vllm_plugin.cpu_layers`]). Its kernels of the delta
rule of Qwen3.5 and Qwen3-Next take only bfloat16; in other dtypes their layers compute as OLMo's.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import functional as F


def register_scans() -> None:
    """Have vLLM's layers compute by the functions here; calling it again changes nothing."""
    from vllm.model_executor.layers.mamba import mamba_mixer
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    if mamba_mixer.selective_scan_fn is scan_selectively:
        return
    mamba_mixer.selective_scan_fn, mamba_mixer.selective_state_update = scan_selectively, step_selectively
    olmo.chunk_gated_delta_rule = olmo.fused_recurrent_gated_delta_rule = apply_delta_rule
    olmo.fused_olmo_hybrid_gdn_gating, olmo.set_triton_allocator = gate_delta_rule, lambda device: None
    for cls in (mamba_mixer.MambaMixer, olmo.OlmoHybridGatedDeltaNetAttention):
        cls.__init__ = _with_convolution_as_loaded(cls.__init__)
    layers = olmo.OlmoHybridGatedDeltaNetAttention
    gdn_attention.cpu_gdn_attention_core = _in_any_dtype(gdn_attention.cpu_gdn_attention_core, layers._forward_core)


def _with_convolution_as_loaded(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.conv1d.is_read_as_loaded = True

    return __init__


def _in_any_dtype(core: Callable[..., None], forward: Callable[..., None]) -> Callable[..., None]:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    # vLLM reads the types of its operations' arguments.
    def compute_delta_rule(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        if mixed_qkv.dtype is torch.bfloat16:
            return core(mixed_qkv, b, a, core_attn_out, layer_name)
        layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
        layer.allow_neg_eigval = False
        forward(layer, mixed_qkv, b, a, core_attn_out)

    return compute_delta_rule


def scan_selectively(
    u: torch.Tensor,
    states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return Mamba 1's outputs `(d, T)` for the T tokens of sequences, and put the last state of each in `states`.
    Tensors of tokens are `(d, T)`, with d channels, or `(n, T)`, with n states of each."""
    running = states[cache_indices].float()
    running[~has_initial_state] = 0
    tokens = (u.T, delta.T, B.T, C.T, z.T)
    outputs = _scan(_selective_step(A, D, delta_bias), running, query_start_loc, *tokens)
    states[cache_indices] = running.to(states.dtype)
    return outputs.T.to(u.dtype)


def step_selectively(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    z: torch.Tensor,
    state_batch_indices: torch.Tensor,
    dst_state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Write Mamba 1's outputs `(N, d)` for one token of each of N sequences to `out`, and their new states."""
    running = states[state_batch_indices.flatten()].float()
    tokens = [each.float() for each in (x, dt, B, C, z)]
    out.copy_(_selective_step(A, D, dt_bias)(running, *tokens))
    states[dst_state_batch_indices.flatten()] = running.to(states.dtype)


def apply_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the gated delta rule with normalized queries and keys, and the last states. With indices
    of the sequences' states, these are replaced in place."""
    running = (initial_state if ssm_state_indices is None else initial_state[ssm_state_indices]).float()

    def step(
        state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        state *= g.exp()[..., None, None]
        error = (v - (state @ k[..., None])[..., 0]) * beta[..., None]
        state.flatten(0, 1).baddbmm_(error.flatten(0, 1)[..., None], k.flatten(0, 1)[:, None])
        return (state @ q[..., None])[..., 0]

    # A head of keys may serve several of values.
    q, k = (each[0].float().repeat_interleave(v.shape[2] // each.shape[2], 1) for each in (q, k))
    q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
    outputs = _scan(step, running, cu_seqlens, q * q.shape[-1] ** -0.5, k, v[0], g[0], beta[0])
    if ssm_state_indices is not None:
        initial_state[ssm_state_indices] = running.to(initial_state.dtype)
    return outputs[None].to(v.dtype), running


def gate_delta_rule(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    allow_neg_eigval: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithms of decays, and the step sizes, of OLMo's gated delta rule."""
    decays = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decays[None], b.float().sigmoid()[None] * (2.0 if allow_neg_eigval else 1.0)


def _selective_step(A: torch.Tensor, D: torch.Tensor, bias: torch.Tensor) -> Callable[..., torch.Tensor]:
    def step(
        state: torch.Tensor, x: torch.Tensor, delta: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor
    ) -> torch.Tensor:
        delta = F.softplus(delta + bias)[..., None]
        state.mul_((delta * A).exp()).add_(delta * x[..., None] * B[:, None])
        return ((state * C[:, None]).sum(-1) + D * x) * F.silu(z)

    return step


def _scan(
    step: Callable[..., torch.Tensor], states: torch.Tensor, starts: torch.Tensor, *tokens: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of a step for the tokens of sequences that begin at `starts`, one token of all sequences at a
    time. A step, and so this function, replaces the `states` of sequences by the next ones."""
    lengths, order = starts.diff().sort(descending=True)
    starts, running = starts[:-1][order], states[order]
    tokens = tuple(each.float() for each in tokens)
    rows, outputs = [], []
    for time in range(int(lengths[0])):
        rows.append(starts[: int((lengths > time).sum())] + time)
        outputs.append(step(running[: len(rows[-1])], *(each[rows[-1]] for each in tokens)))
    states[order] = running
    return torch.cat(outputs)[torch.cat(rows).argsort()]
