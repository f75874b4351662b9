"""Methods of a worker that trainers call in addition to vLLM's own for weight updates."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import vllm
from vllm import ir
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.transformers_utils.processor import cached_processor_from_config

from .._version import __version__
from ..bitwise import cuda
from ..bitwise.low_bit import describe_arithmetic
from ..wire.describe import PICTURE_OPTIONS, describe_model, describe_pictures, describe_tokenizer
from .engine_tensors import kernels_in_use, windows
from .lora import describe_lora, serve_adapter


# vLLM reloads a layer into copies in checkpoint format, except for biases, which Marlin permutes and pads in new
# memory. Set on import, which is vLLM's only step before it makes the model that reaches this package in engines of a
# trainer alone: a plugin's registration reaches every engine, and an extension may override no method of the worker.
meta.SKIP_TENSORS.discard("bias")
# gpt-oss' and MiMo-V2's loaders copy them into the parameter, without the loader that a reload watches.
for _sinks in ("sinks", "attention_sink_bias"):
    meta.SKIP_LOAD_TENSORS.add(_sinks)
    meta.SKIP_TENSORS.add(_sinks)


def _with_zeros(materialize: Callable[..., None]) -> Callable[..., None]:
    """Decorate vLLM's step that gives a layer memory before it is reloaded. A loader fills only a part of gpt-oss'
    experts in MXFP4, whose kernels have them padded, and the rest would be what the memory held before."""

    @wraps(materialize)
    def materialize_layer(layer: torch.nn.Module, info: Any) -> None:
        materialize(layer, info)
        if isinstance(getattr(layer, "quant_method", None), GptOssMxfp4MoEMethod):
            for parameter in layer.parameters(recurse=False):
                parameter.untyped_storage().fill_(0)

    return materialize_layer


if not hasattr(layerwise.materialize_layer, "__wrapped__"):
    layerwise.materialize_layer = _with_zeros(layerwise.materialize_layer)


logger = logging.getLogger(__name__)


def replying(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """
    Decorate a method of a worker to return its result, or the text of its error, in a reply with the number of the
    call, for [`~trl_qarl.wire.protocol.values_of`].

    It may not raise: vLLM's `collective_rpc` stops at the first rank that fails and leaves the replies of the others
    in their queues, where the next call would find them (vllm#57846).
    """

    @wraps(method)
    def reply(self, *args: Any, call: str = "", **kwargs: Any) -> dict[str, Any]:
        answer = {"call": call, "replica": self.vllm_config.parallel_config.data_parallel_index}
        try:
            return answer | {"value": method(self, *args, **kwargs)}
        except RuntimeError as error:
            return answer | {"refused": str(error)}
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return answer | {"refused": f"{method.__name__} failed: {type(error).__name__}: {error}"}

    return reply


class WorkerExtension:
    """Methods for `--worker-extension-cls`, called by `/collective_rpc` or `LLM.collective_rpc`."""

    @replying
    def qarl_describe(self) -> dict[str, Any]:
        """Return the engine's settings, which are compared with the learner's before the first publication."""
        config = self.vllm_config
        hf_config = config.model_config.hf_text_config
        quantizations = (getattr(c, "quantization_config", None) for c in (config.model_config.hf_config, hf_config))
        quantization = dict(next(filter(None, quantizations), {}))
        if quantization.get("quant_method") == "gpt_oss_mxfp4":
            # vLLM's name of the method of gpt-oss' releases.
            quantization["quant_method"] = "mxfp4"
        tokenizer = cached_tokenizer_from_config(config.model_config)
        return {
            "trl_qarl": __version__,
            "quantization_config": quantization,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "max_model_len": config.model_config.max_model_len,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "device": str(self.device),
            "gpu": self._describe_gpu(),
            "backend": config.weight_transfer_config.backend,
            "published": len(self.weight_transfer_engine.published),
            "kernels": kernels_in_use(self.model_runner.model),
            "model": describe_model(hf_config),
            "rotations": self.weight_transfer_engine.rotations,
            "windows": windows(self.model_runner.model),
            "pictures": self._describe_pictures(),
            "tokenizer": None if tokenizer is None else describe_tokenizer(tokenizer),
            "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
            # More than 1 only for mixtures, whose replicas work together; other replicas count only themselves.
            "data_parallel_size": config.parallel_config.data_parallel_size,
            "replica": config.parallel_config.data_parallel_index,
            "enable_expert_parallel": config.parallel_config.enable_expert_parallel,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "is_speculative": config.speculative_config is not None,
            "lora": describe_lora(self.model_runner.model, config.lora_config),
            "arithmetic": self._describe_arithmetic(),
            "use_w4a8": any(getattr(layer, "use_w4a8", False) for layer in self.model_runner.model.modules()),
        }

    def _describe_gpu(self) -> dict[str, Any] | None:
        """Return the arguments of [`~trl_qarl.engines.gpu_kernels.Gpu`]; `None` on a CPU."""
        if self.device.type == "cpu":
            return None
        capability = current_platform.get_device_capability()
        return {
            "capability": [capability.major, capability.minor],
            "name": current_platform.get_device_name(),
            "vllm": vllm.__version__,
        }

    def _describe_pictures(self) -> dict[str, Any]:
        config = self.vllm_config.model_config
        if config.multimodal_config is None:
            return {}
        options = {
            name: getattr(config.multimodal_config, name, None) or value for name, value in PICTURE_OPTIONS.items()
        }
        try:
            processor = cached_processor_from_config(config)
        except Exception:
            # vLLM makes it in another way (InternVL). Pictures of such classes are refused.
            processor = None
        return describe_pictures(config.hf_config, getattr(processor, "image_processor", None), options)

    def _describe_arithmetic(self) -> dict[str, Any]:
        if self.device.type != "cpu":
            return cuda.describe_arithmetic(self.vllm_config)
        # It imports a module that vLLM has only for CPUs.
        from .cpu_attention import describe_attention

        norms = ir.ops.fused_add_rms_norm.get_priority()[0]
        return describe_arithmetic() | {"attention": describe_attention(self.model_runner), "norms": norms}

    @replying
    def qarl_begin(self) -> list[str]:
        """Abandon an earlier trainer's unfinished update, and return the names of tensors that changed since the last
        publication."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.abandon()
        return self.weight_transfer_engine.changed()

    @replying
    def qarl_clear_cache(self) -> None:
        """Set keys and values to 0: attention on a CPU multiplies unused slots by 0, which does not remove NaN."""
        for cache in self.model_runner.kv_caches:
            # A layer with several kinds of states has a tensor for each.
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()

    @replying
    def qarl_finish(self, fingerprints: dict[str, str]) -> None:
        """Compare a complete publication with its fingerprints, and put its adapter into place. vLLM's
        `finish_weight_update`, which comes next, then finds nothing to refuse."""
        engine = self.weight_transfer_engine
        with set_current_vllm_config(self.vllm_config):
            engine.audit(fingerprints, serve_adapter(self.model_runner, engine.adapter))
