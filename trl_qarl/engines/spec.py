"""Specification of an engine, in this process or in a server. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..models import fields_for_vllm
from ..wire.protocol import NORMS, WORKER_EXTENSION
from .gpu_kernels import Gpu, kernel_arguments


@dataclass(frozen=True)
class EngineSpec:
    """
    The model of an engine, a Hub id or directory, and the settings that must match the learner's.

    `quantization_config` is that of [`~trl_qarl.checkpoint.layout.quantization_config`], and `None` for an unquantized
    engine; `dtype` is that of everything else. `lora` and `pictures` are arguments of `vllm.LLM` for an adapter next
    to the layers, and for pictures. On a GPU `numerics="engine"` gives a slower engine with arithmetic that a learner
    can repeat ([`trl_qarl.bitwise.cuda`]); on a CPU this holds for every engine. With `is_export` weights and scheme
    are read from the directory instead of being sent. `fields` are added to its configuration ([`added_fields`]).
    """

    model: str
    quantization_config: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    lora: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Any] = field(default_factory=dict)
    numerics: str = "fast"
    is_export: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model, dtype) -> "EngineSpec":
        """Return the specification for `model`, a learner prepared by [`prepare_model`], in `dtype`. On a GPU the
        numerics are those that are attached to `model`."""
        from ..adapters.tensors import lora_arguments
        from ..bitwise.attach import has_engine_numerics
        from ..checkpoint.layout import quantization_config
        from ..quantization.inventory import Inventory
        from .pictures import engine_arguments

        return cls(
            model.name_or_path,
            quantization_config(Inventory.of(model)) or None,
            str(dtype).removeprefix("torch."),
            lora_arguments(model),
            engine_arguments(model),
            "engine" if model.device.type == "cuda" and has_engine_numerics(model) else "fast",
            fields=added_fields(model),
        )

    def arguments(self, on_cpu: bool, gpu: Gpu | None = None) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`, which are options of its server too. Errors are those of
        [`kernel_arguments`]."""
        arguments: dict[str, Any] = {
            "model": self.model,
            # By default vLLM would run a float32 export in 16 bits.
            "dtype": self.dtype,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            **kernel_arguments(self.quantization_config, self.dtype, on_cpu, gpu),
            **self.lora,
            **self.pictures,
        }
        if not self.is_export:
            arguments["load_format"] = "dummy"
            scheme = {"quantization_config": self.quantization_config} if self.quantization_config else {}
            if overrides := scheme | dict(self.fields):
                arguments["hf_overrides"] = overrides
        if on_cpu:
            # Compiling takes minutes there, and a compiled graph would not call the learner's kernels.
            arguments["enforce_eager"] = True
            arguments["ir_op_priority"] = {"rms_norm": [NORMS], "fused_add_rms_norm": [NORMS]}
        elif self.numerics == "engine":
            from ..bitwise import cuda

            arguments |= cuda.ENGINE_ARGUMENTS
        return arguments


def added_fields(model: Any) -> dict[str, Any]:
    """Return what vLLM's class reads of a configuration, and transformers' does not have."""
    from ..quantization.names import architecture, has_tower

    fields = fields_for_vllm(architecture(model), model.config.get_text_config())
    return {"text_config": fields} if fields and has_tower(model) else fields
