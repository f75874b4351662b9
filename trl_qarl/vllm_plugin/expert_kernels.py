"""
Experts of mixtures in vLLM on a CPU: the learner's product for low-bit experts, and a complete reload of unquantized
experts.

| experts | vLLM on a CPU | here |
|---|---|---|
| `w4a16`, `w8a16` | none; with AMX a kernel that rounds activations to 8 bits, whatever the checkpoint says | the learner's product |
| `w4a8-int8`, `w8a8`, `fp8` with scales per group or channel and token | none, or with AMX another arithmetic | the learner's product |
| `mxfp4a16` of gpt-oss, in the form of its releases | with AMX a kernel in bfloat16 | the learner's product |
| not quantized | `cpu_fused_moe`, whose weights vLLM 0.31 and 0.32 repack only at the first load | vLLM's, repacked each time |

Routers choose among experts by biased and by sigmoid scores too. Parameters are made by vLLM's methods, so their names, shapes and loaders are vLLM's, and nothing is repacked. In
vLLM's registry of quantization configurations, those here replace `compressed-tensors` and `gpt_oss_mxfp4`, and
differ only for experts.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from typing_extensions import override
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (
    CompressedTensorsW8A8Int8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from ..bitwise.low_bit import multiply
from ..quantization.experts import clamped_swiglu, experts_product, gated
from ..quantization.schemes import get_scheme
from ..quantization.tensors import LowBitTensor
from .linear_kernels import is_our_engine


def register_experts() -> None:
    """Register low-bit and unquantized experts with vLLM; calling it again changes nothing."""
    register_quantization_config("compressed-tensors")(QaRLCompressedTensorsConfig)
    register_quantization_config("gpt_oss_mxfp4")(QaRLMxfp4Config)
    if UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
        CustomOp.register_oot(ExpertsInOwnLayout, name=UnquantizedFusedMoEMethod.__name__)
    if not hasattr(CPURouter.__init__, "__wrapped__"):
        CPURouter.__init__ = _in_one_group(CPURouter.__init__)
        FusedMoEConfig.__post_init__ = _with_or_without_gate(FusedMoEConfig.__post_init__)


def _in_one_group(make: Callable[..., None]) -> Callable[..., None]:
    """Decorate the constructor of vLLM's router for CPUs. Without groups of experts the router leaves out the bias of
    their scores and takes no sigmoid (cpu_router.py in 0.31); one group of all experts is the same choice."""

    @wraps(make)
    def make_router(router: CPURouter, *args: Any, **kwargs: Any) -> None:
        make(router, *args, **kwargs)
        has_scores = router.custom_routing_function is None and router.scoring_func in ("softmax", "sigmoid")
        is_left_out = router.scoring_func == "sigmoid" or router.e_score_correction_bias is not None
        if is_our_engine() and has_scores and is_left_out and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    return make_router


def _with_or_without_gate(check: Callable[..., None]) -> Callable[..., None]:
    """Decorate vLLM's last step of making a configuration, which refuses experts without a gate on a CPU, where it has
    no kernel of its own for them (config.py in 0.31)."""

    @wraps(check)
    def __post_init__(config: FusedMoEConfig) -> None:
        try:
            check(config)
        except NotImplementedError:
            if config.is_act_and_mul or not is_our_engine():
                raise

    return __post_init__


class ExpertsInOwnLayout(UnquantizedFusedMoEMethod):
    """Unquantized experts whose weights are repacked for their kernel after each load."""

    @override
    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # vLLM skips repacking if a kernel exists already.
        self.moe_kernel = None
        super().process_weights_after_loading(layer)


class _LowBitExperts(FusedMoEMethodBase):
    """Base of the methods of low-bit experts, to be listed before vLLM's class that makes their parameters, whose
    constructor would look for a kernel and is not called."""

    scheme: str
    is_monolithic = False
    # With it vLLM's loader of gpt-oss copies an expert's codes as they are, instead of transposing them.
    weight_dtype = "mxfp4"
    _low_bit: tuple[tuple[LowBitTensor, ...], ...] | None = None

    def __init__(self, weights: Any, activations: Any, moe: Any):
        FusedMoEMethodBase.__init__(self, moe)
        # Attributes that vLLM's `create_weights` reads.
        self.weight_quant, self.input_quant = weights, activations
        self.symmetric, self.num_bits, self.strategy = weights.symmetric, weights.num_bits, weights.strategy
        self.group_size = weights.group_size or -1
        self.packed_factor = Fraction(32, weights.num_bits)
        self.static_input_scales, self.block_quant, self.weight_block_size = False, False, None

    @override
    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return nothing: no kernel of vLLM runs."""

    @override
    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        self._low_bit = None

    @override
    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input) -> torch.Tensor:
        if self._low_bit is None:
            # At the first use, because vLLM copies reloaded values into the tensors that it keeps.
            self._low_bit = self._experts_of(layer, "w13"), self._experts_of(layer, "w2")
        activation = _ACTIVATIONS[layer.activation.value]
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return experts_product(x, topk_ids, topk_weights, *self._low_bit, lambda x, w: multiply(x, *w), activation)

    def _experts_of(self, layer: RoutedExperts, matrix: str) -> list[tuple[LowBitTensor, torch.Tensor | None]]:
        tensors = {
            name.removeprefix(f"{matrix}_"): parameter.data.flatten(0, 1)
            for name, parameter in layer.named_parameters()
            if name.startswith(f"{matrix}_") and parameter.ndim == 3
        }
        # The name in gpt-oss' releases.
        tensors.setdefault("weight_packed", tensors.get("weight"))
        low_bit = LowBitTensor.from_checkpoint(tensors, get_scheme(self.scheme), self.moe.in_dtype)
        biases = getattr(layer, f"{matrix}_bias", [None] * layer.local_num_experts)
        return list(zip(low_bit.row_blocks(layer.local_num_experts), biases, strict=True))


_ACTIVATIONS = {
    "silu": gated(F.silu),
    "gelu": gated(F.gelu),
    "gelu_tanh": gated(partial(F.gelu, approximate="tanh")),
    "relu2_no_mul": lambda rows: F.relu(rows).square(),
    "swigluoai": clamped_swiglu,
}
"""Functions between the two products, by vLLM's names; those of transformers are the same."""

_METHODS = {
    weights_and_activations: type(name, (_LowBitExperts, base), {"scheme": scheme})
    for weights_and_activations, name, base, scheme in (
        # Codes on a coarser grid have the same product.
        ((False, 4, False), "QaRLInt4Experts", CompressedTensorsWNA16MoEMethod, "w4a16"),
        ((False, 4, True), "QaRLInt4Int8Experts", CompressedTensorsWNA16MoEMethod, "w4a8-int8"),
        ((False, 8, False), "QaRLInt8WeightExperts", CompressedTensorsWNA16MoEMethod, "w8a16"),
        ((False, 8, True), "QaRLInt8Experts", CompressedTensorsW8A8Int8MoEMethod, "w8a8"),
        ((True, 8, True), "QaRLFp8Experts", CompressedTensorsW8A8Fp8MoEMethod, "fp8"),
    )
}
"""Methods by `(weights are floating-point numbers, bits of weights, activations are quantized)`."""


class QaRLMxfp4Experts(_LowBitExperts, GptOssMxfp4MoEMethod):
    """Experts of gpt-oss in the form of its releases."""

    scheme = "mxfp4a16"

    def __init__(self, moe: FusedMoEConfig):
        FusedMoEMethodBase.__init__(self, moe)
        # Of vLLM's kernels this one takes any sizes.
        self.mxfp4_backend = Mxfp4MoeBackend.EMULATION

    @override
    def create_weights(self, layer: RoutedExperts, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        # vLLM makes them in bfloat16.
        for bias in (layer.w13_bias, layer.w2_bias):
            bias.data = bias.data.to(layer.params_dtype)


class QaRLMxfp4Config(GptOssMxfp4Config):
    """vLLM's configuration of gpt-oss' releases with other experts, also in float32."""

    @classmethod
    @override
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [*super().get_supported_act_dtypes(), torch.float32]

    @override
    def _make_moe_method(self, moe: FusedMoEConfig) -> FusedMoEMethodBase:
        return QaRLMxfp4Experts(moe) if _takes_over() else super()._make_moe_method(moe)


def _takes_over() -> bool:
    """Return whether experts get the learner's product: vLLM's own kernels for AMX serve engines without weight
    sync."""
    return is_our_engine() or not torch.cpu._is_amx_tile_supported()


class QaRLCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors with other low-bit experts."""

    @override
    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        takes_over = isinstance(layer, RoutedExperts) and _takes_over()
        method = self._method_of_experts(layer, prefix) if takes_over else None
        return super().get_quant_method(layer, prefix) if method is None else method

    def _method_of_experts(self, layer: RoutedExperts, prefix: str) -> FusedMoEMethodBase | None:
        """Return the method of `layer`, or `None` to leave the choice to vLLM. `NotImplementedError` is raised for
        experts with another computation than the product here."""
        self._add_fused_moe_to_target_scheme_map()
        projections = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in projections]
        if schemes[0] is None or any(scheme != schemes[0] for scheme in schemes):
            return None
        weights, activations = schemes[0]["weights"], schemes[0].get("input_activations")
        method = _METHODS.get((weights.type == "float", weights.num_bits, activations is not None))
        is_ours = weights.symmetric and weights.strategy in ("group", "channel") and not weights.actorder
        per_token = activations is None or (activations.dynamic is True and activations.strategy == "token")
        if method is None or not (is_ours and per_token):
            return None
        for is_met, what in (
            (layer.activation.value in _ACTIVATIONS, f"activation {layer.activation.value!r}"),
            (not layer.moe_config.has_bias or issubclass(method, CompressedTensorsWNA16MoEMethod), "biases"),
            (layer.swiglu_limit is None, "a limit of their activation"),
            (
                not layer.apply_router_weight_on_input or layer.top_k == 1,
                "several weights of the router on their input",
            ),
            (not layer.use_ep, "expert parallelism"),
        ):
            if not is_met:
                raise NotImplementedError(
                    f"Experts of {prefix!r} have {what}, which the product of low-bit experts on a CPU does not support. Serve them "
                    "on a GPU."
                )
        return method(weights, activations, layer.moe_config)
