"""Specification of an engine, in this process and in a server. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..wire.protocol import WORKER_EXTENSION
from .gpu_kernels import Gpu, kernel_arguments


__all__ = ["EngineSpec"]


@dataclass(frozen=True)
class EngineSpec:
    """
    The model of an engine, and what of it must be the learner's.

    Args:
        model (`str`):
            Hub id or directory of the model.
        quantization_config (`Mapping`, *optional*):
            From [`~trl_qarl.checkpoint.layout.quantization_config`]; `None` for an unquantized engine.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Dtype of everything that is not quantized.
        lora (`Mapping[str, Any]`, *optional*), pictures (`Mapping[str, Any]`, *optional*):
            Arguments of `vllm.LLM` for an adapter next to the layers, and for pictures; empty without.
        numerics (`str`, *optional*, defaults to `"fast"`):
            On a GPU `"engine"` gives a slower engine, whose arithmetic the learner can repeat
            ([`trl_qarl.numerics.cuda`]); on a CPU every engine is one.
        is_export (`bool`, *optional*, defaults to `False`):
            Whether weights and scheme are read from the directory, in place of being sent.
    """

    model: str
    quantization_config: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    lora: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Any] = field(default_factory=dict)
    numerics: str = "fast"
    is_export: bool = False

    @classmethod
    def of(cls, model, dtype) -> "EngineSpec":
        """Return that of `model`, a learner prepared by [`prepare_model`], in `dtype`. On a GPU its numerics are those
        that `model` has by then."""
        from ..adapters.tensors import lora_arguments
        from ..checkpoint.layout import quantization_config
        from ..numerics.attach import has_engine_numerics
        from ..quantization.inventory import Inventory
        from .pictures import engine_arguments

        return cls(
            model.name_or_path,
            quantization_config(Inventory.of(model)) or None,
            str(dtype).removeprefix("torch."),
            lora_arguments(model),
            engine_arguments(model),
            "engine" if model.device.type == "cuda" and has_engine_numerics(model) else "fast",
        )

    def arguments(self, on_cpu: bool, gpu: Gpu | None = None) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`, which are options of its server too. `on_cpu` and `gpu` are as in
        [`kernel_arguments`], and so is the `ValueError` that is raised."""
        arguments: dict[str, Any] = {
            "model": self.model,
            # Left to itself vLLM would run a float32 export in 16 bits.
            "dtype": self.dtype,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            **kernel_arguments(self.quantization_config, self.dtype, on_cpu, gpu),
            **self.lora,
            **self.pictures,
        }
        if not self.is_export:
            arguments["load_format"] = "dummy"
            if self.quantization_config:
                arguments["hf_overrides"] = {"quantization_config": self.quantization_config}
        if on_cpu:
            # Compiling takes minutes there, and the compiled graph would not see the learner's kernels.
            arguments["enforce_eager"] = True
        elif self.numerics == "engine":
            from ..numerics import cuda

            arguments |= cuda.ENGINE_ARGUMENTS
        return arguments
