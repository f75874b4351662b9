"""
Forward kernels of vLLM on NVIDIA GPUs in its batch-invariant mode (`VLLM_BATCH_INVARIANT=1`), without gradients: the
operations of [`trl_qarl.bitwise.ops`]. benchmarks/alignment.md lists their differences from a CPU.

**Untested on GPUs.** The module follows the sources of vLLM 0.31 to 0.33. Tests on a CPU check the arguments and
layouts of the kernels. On a GPU each process compares the installed release before it uses the kernels
([`reason_against`]). The engine also runs [`low_bit_linear`] ([`trl_qarl.vllm_plugin.linear_kernels`]).
"""

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ..packages import installed
from ..quantization import gemm
from ..quantization.formats.registry import format_of
from ..quantization.quantize import quantize_activation
from ..quantization.schemes import INT8, QuantScheme
from .compare import first_difference
from .cpu import blocks_of_keys, rotate  # noqa: F401  (an operation of this module too)


ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    # The second model runner computes log-probs with another kernel.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Environment of an engine that the learner repeats, and of the learner, whose kernels read the first variable."""

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of models whose operations are those of [`~trl_qarl.bitwise.ops`] alone."""

BLOCK_SIZE = 16
ENGINE_ARGUMENTS: Mapping[str, Any] = {
    # A compiled graph would have its own kernels for norms and activations.
    "enforce_eager": True,
    "attention_backend": "FLASH_ATTN",
    # FlashAttention 3 takes other tiles of keys if a block is a whole tile.
    "block_size": BLOCK_SIZE,
}
"""Arguments of `vllm.LLM` for an engine that the learner repeats."""


def reason_against_installation() -> str | None:
    """Return why the kernels cannot be used, as far as known without loading vLLM, or `None`."""
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if _vllm_version() is None:
        return "vLLM is not installed"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0"
    return None


@lru_cache(maxsize=1)
def reason_against() -> str | None:
    """Return why the kernels cannot be used in this process, or `None`. Any release of vLLM is compared."""
    if reason := reason_against_installation():
        return reason
    from vllm import envs

    # The comparison must not change the environment of an engine that is started later.
    environment = dict(os.environ)
    try:
        prepare_process()
        difference = first_difference(sys.modules[__name__], torch.device("cuda"))
    finally:
        os.environ.clear()
        os.environ.update(environment)
    envs.disable_envs_cache()
    return None if difference is None else f"vLLM {_vllm_version()} is installed, and {difference}"


def describe_arithmetic(config=None) -> dict[str, Any]:
    """Return the settings that determine the bits of an engine on this GPU. `config` is vLLM's configuration of the
    engine in this process; without it, return the settings that the learner requires."""
    description = {
        "vllm": _vllm_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **ENVIRONMENT,
        **ENGINE_ARGUMENTS,
        "head_dtype": str(torch.bfloat16),
    }
    if config is None:
        return description
    from vllm import envs

    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    return description | {
        "VLLM_BATCH_INVARIANT": str(int(envs.VLLM_BATCH_INVARIANT)),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(config.use_v2_model_runner)),
        "enforce_eager": config.model_config.enforce_eager,
        "attention_backend": " + ".join(sorted(backends)),
        "block_size": config.cache_config.block_size,
        "head_dtype": str(config.model_config.head_dtype),
    }


def use_one_tiling() -> None:
    """Have every product take the same tiles of input features, because other tiles give other sums: vLLM has tables
    by the shape of a weight, and the engine's fused query, key and value have another shape than the learner's."""
    from vllm.model_executor.determinism import batch_invariant_configs as tables

    tables._TUNED_MATMUL_CONFIGS_FOR_DEVICE = None
    tables._TUNED_MATMUL_CONFIGS_RESOLVED = True


def prepare_process() -> None:
    """Set up a process before the first kernel or an engine: vLLM's kernels read `VLLM_BATCH_INVARIANT` only once."""
    from vllm import envs

    os.environ.update(ENVIRONMENT)
    envs.disable_envs_cache()
    use_one_tiling()


def covers(scheme: QuantScheme) -> bool:
    """Return whether learner and engine share the product of `scheme`."""
    return scheme.is_quantized and scheme.activation in format_of(scheme.container).repeated_on_gpus


class PackedLinear:
    """[`~trl_qarl.bitwise.ops.Product`] in bfloat16. vLLM's release determines when a bias is added."""

    def __init__(self, weight: torch.Tensor):
        self._weight = weight

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        y = _batch_invariant().linear_batch_invariant(x.reshape(-1, x.shape[-1]), self._weight, bias)
        return y.view(*x.shape[:-1], len(self._weight))


def low_bit_linear(x: torch.Tensor, weight, bias: torch.Tensor | None):
    """[`~trl_qarl.quantization.gemm.low_bit_linear`] of bfloat16 `x`, `(M, K)`, with the same bits in any batch."""
    scheme = weight.scheme
    if scheme.activation is None:
        y = PackedLinear(weight.dequantize(x.dtype))(x, bias)
        return y, (x,), "INT4 expanded to bfloat16 + vllm::linear_batch_invariant"
    if scheme.activation == INT8:
        # Sums of integers are exact in any order.
        return gemm.low_bit_linear(x, weight, bias)
    codes, scale = quantize_activation(x, scheme)
    # TF32 holds E4M3 codes exactly; the sums are float32.
    product = _batch_invariant().matmul_batch_invariant(codes.float(), weight.qdata.float().t())
    y = product.mul_(scale).mul_(weight.scale.t()).to(x.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y, (codes, scale), "E4M3 codes in float32 + vllm::matmul_batch_invariant"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """[`~trl_qarl.bitwise.ops.rms_norm`] of the rounded residual stream."""
    if x.dtype is not torch.float32:
        return _batch_invariant().rms_norm_batch_invariant(x, weight, epsilon)
    import vllm._custom_ops as ops

    stream = x.to(weight.dtype).reshape(-1, x.shape[-1])
    # The kernel adds, rounds and norms; the learner has summed the stream already, so it adds zeros.
    normed = torch.zeros_like(stream)
    ops.fused_add_rms_norm(normed, stream, weight, epsilon)
    return normed.view(x.shape)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    import vllm._custom_ops  # noqa: F401  (loads the operators)

    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(y, torch.cat([gate, up], dim=-1))
    return y


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probs `(M, V)` float32 of `logits` `(M, V)` like the sampler of vLLM's first model runner."""
    logits = logits.float()
    if temperature != 1.0:
        # Division by a number would become a product with its inverse on a GPU.
        logits = logits / logits.new_full((len(logits), 1), temperature)
    return _batch_invariant().log_softmax(logits, -1)


def attention(query, key, value, segments, scale, window=None, softcap=None):
    """[`~trl_qarl.bitwise.ops.attention`] by FlashAttention, with blocks of keys and without splits."""
    if (window, softcap) != (None, None):
        raise NotImplementedError("Only vLLM's kernels for CPUs support a window of keys, or a cap of scores.")
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    seen = segments.query_lengths, segments.key_lengths, segments.places
    num_blocks, slots, places, table, query_starts, lengths = _layout(*seen, query.device)
    shape = num_blocks * BLOCK_SIZE, *key.shape[1:]
    keys, values = (x.new_zeros(shape).index_copy_(0, slots, x[places]) for x in (key, value))
    return flash_attn_varlen_func(
        q=query.contiguous(),
        k=keys.unflatten(0, (-1, BLOCK_SIZE)),
        v=values.unflatten(0, (-1, BLOCK_SIZE)),
        cu_seqlens_q=query_starts,
        max_seqlen_q=max(segments.query_lengths),
        seqused_k=lengths,
        max_seqlen_k=max(segments.key_lengths),
        softmax_scale=scale,
        causal=True,
        window_size=[-1, -1],
        block_table=table,
        fa_version=get_flash_attn_version(head_size=query.shape[-1]),
        num_splits=1,
    )


@lru_cache(maxsize=4)
def _layout(query_lengths, key_lengths, places, device) -> tuple[int, torch.Tensor, ...]:
    """Return the layout that all layers of a forward share: the number of blocks, and [`blocks_of_keys`] on the
    device."""
    slots, taken, table, *lengths = blocks_of_keys(query_lengths, key_lengths, places, BLOCK_SIZE)
    return int(table.max()) + 1, *(tensor.to(device) for tensor in (slots, taken, table, *lengths))


def _batch_invariant() -> ModuleType:
    return import_module("vllm.model_executor.determinism.batch_invariant")


def _vllm_version() -> str | None:
    return installed("vllm").get("vllm")
