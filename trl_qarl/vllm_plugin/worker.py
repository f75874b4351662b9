"""Methods that trainers call in a worker, in addition to vLLM's own for weight updates."""

from typing import Any

import vllm
from vllm.model_executor.model_loader.reload import meta
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.transformers_utils.processor import cached_processor_from_config

from ..numerics import cuda
from ..numerics.low_bit import describe_arithmetic
from ..wire.describe import PICTURE_OPTIONS, describe_model, describe_pictures, describe_tokenizer
from .adapters import describe_lora, serve_adapter
from .engine_tensors import kernels_in_use


__all__ = ["WorkerExtension"]

# vLLM notes how a checkpoint has the tensors of a layer, and loads into the like of that, but of a bias into what
# runs. Marlin permutes and pads it, in new memory. Here, as vLLM imports this in each worker before there is a model.
meta.SKIP_TENSORS.discard("bias")


class WorkerExtension:
    """Methods a worker gains through `--worker-extension-cls`, called by `/collective_rpc` or `LLM.collective_rpc`."""

    def qarl_describe(self) -> dict[str, Any]:
        """Return what the engine was built for, to be compared with the learner before the first publication."""
        config = self.vllm_config
        hf_config = config.model_config.hf_text_config
        quantization = getattr(config.model_config.hf_config, "quantization_config", None) or getattr(
            hf_config, "quantization_config", None
        )
        tokenizer = cached_tokenizer_from_config(config.model_config)
        return {
            "quantization_config": quantization or {},
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "device": str(self.device),
            "gpu": self._describe_gpu(),
            "backend": config.weight_transfer_config.backend,
            "published": len(self.weight_transfer_engine.published),
            "kernels": kernels_in_use(self.model_runner.model),
            "model": describe_model(hf_config),
            "pictures": self._describe_pictures(),
            "tokenizer": None if tokenizer is None else describe_tokenizer(tokenizer),
            "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
            # More than 1 only for mixtures of experts, whose replicas work together; other replicas count only
            # themselves.
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
        """Arguments of [`~trl_qarl.rollout.gpu_kernels.Gpu`]; `None` on a CPU."""
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
        processor = cached_processor_from_config(config)
        return describe_pictures(config.hf_config, getattr(processor, "image_processor", None), options)

    def _describe_arithmetic(self) -> dict[str, Any]:
        if self.device.type != "cpu":
            return cuda.describe_arithmetic(self.vllm_config)
        # vLLM's module for CPUs; there is none elsewhere.
        from .cpu_attention import describe_attention

        return describe_arithmetic() | {"attention": describe_attention(self.model_runner)}

    def qarl_begin(self) -> list[str]:
        """Remove the unfinished update of an earlier trainer, and return the names that changed since the last
        publication."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()
        self.weight_transfer_engine.abandon()
        return self.weight_transfer_engine.changed()

    def qarl_keep_copy(self) -> str:
        """Keep published tensors from now on, in a [`PatchBook`], and return the digest of those that are here
        already."""
        engine = self.weight_transfer_engine
        return engine.copy.confirm(engine.published)

    def qarl_clear_cache(self) -> None:
        """Set keys and values to 0. Attention on a CPU multiplies those of unused slots by 0, which leaves NaN what it
        is."""
        for cache in self.model_runner.kv_caches:
            # A layer with states of several kinds has one tensor for each.
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()

    def qarl_finish(self, fingerprints: dict[str, str]) -> None:
        """Say what a complete publication consists of."""
        engine = self.weight_transfer_engine
        serve_adapter(self.model_runner, engine.activate_adapter, engine.adapter)
        engine.expect(fingerprints)
