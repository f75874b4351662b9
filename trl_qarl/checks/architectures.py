"""Problems of a model with vLLM, found from its modules before an engine is started; weights are not read."""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from importlib.util import find_spec
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from ..checkpoint.export import has_own_code, save_configuration
from ..checkpoint.layout import iter_checkpoint_layers, problem_of_mixture
from ..engines.spec import added_fields
from ..models import Always, family_of, has_one_window
from ..quantization.inventory import Inventory, rotary_embeddings
from ..quantization.names import has_tower, shares_head
from ..quantization.schemes import QuantScheme
from ..replacing import replaced
from ..wire.describe import Rotation, rotation_differences, rotations_in_tables
from ..wire.protocol import EACH, tensors_of_experts


_LONGEST_ERROR = 300
_ATTENTION = frozenset(["full_attention", "sliding_attention", "chunked_attention"])


def problems_with_vllm(
    model: nn.Module, dtype: torch.dtype | None, on_cpu: bool, schemes: Mapping[str, QuantScheme]
) -> Iterator[str]:
    """Yield the reasons why an engine in `dtype`, `None` if it is not known yet, cannot run `model`, which may be on
    the meta device, and whose layers get these `schemes`, by name."""
    inventory, name = Inventory.of(model), type(model).__name__
    family, config = family_of(name), inventory.model.config
    if problem := problem_of_mixture(inventory, schemes):
        yield problem
    values = {field: value for field, value in family.vllm_values.items() if getattr(config, field) != value}
    if values:
        theirs, ours = (", ".join(f"{field}={of[field]}" for field in values) for of in (values, config.to_dict()))
        yield f"{name} with {ours}: vLLM 0.31's class always has {theirs}. Train a model with these values, or use_vllm=False"
    text = config.get_text_config()
    always = {field: make.value for field, make in family.vllm_fields.items() if isinstance(make, Always)}
    if ignored := [field for field, value in always.items() if getattr(text, field, None) not in (None, value)]:
        theirs, ours = (", ".join(f"{field}={of[field]}" for field in ignored) for of in (text.to_dict(), always))
        yield f"{name} with {theirs}: transformers' class always has {ours}, and vLLM's what the file says. Correct the file"
    kinds = {*(getattr(text, "layer_types", None) or ())}
    if len(kinds) > 1 and has_one_window(text.model_type):
        yield (
            f"{name} with layers of the kinds {sorted(kinds)}: all layers of vLLM 0.31's class have the same sliding window, or none. Train a "
            "model with one kind of layers, or use_vllm=False"
        )
    # Only pictures attend to later tokens with "vision".
    if getattr(text, "use_bidirectional_attention", None) is True:
        yield (
            f"{name} with use_bidirectional_attention=True: tokens attend to later ones, and in vLLM to earlier ones alone. Train a model "
            "without it, or use_vllm=False"
        )
    if getattr(config, "mamba_rms_norm", False) and getattr(config, "mamba_norm_before_gate", False):
        yield f"{name} with mamba_norm_before_gate=True: vLLM 0.31 always applies the gate first. Train a model with False, or use_vllm=False"
    wants = family.shares_head
    if wants is not None and (shares := shares_head(inventory.model)) is not wants:
        yield (
            f"{name} with tie_word_embeddings={shares}: vLLM 0.31 {'always' if wants else 'never'} shares the weight of embedding and "
            "output head in its class, whatever the configuration says"
        )
    if joined := _joined_in_checkpoints(inventory.model):
        yield f"checkpoints of {name} join layers, such as `{joined}` with others, and so does vLLM's class"
    if (problem := family.problem_of_float32) and dtype is torch.float32:
        yield f"{name} in float32: {problem}. Set bf16=True"
    if any(getattr(module, "running_mean", None) is not None for module in model.modules()):
        yield f"{name} has batch norms (Emu3's tower), whose running statistics a weight sync of vLLM 0.31 leaves as they were"
    if on_cpu:
        yield from _problems_on_cpu(inventory, dtype, schemes)


def _joined_in_checkpoints(model: nn.Module) -> str | None:
    """Return the name of a weight that transformers splits from others when it loads a checkpoint."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    # Others only rename, each tensor by itself.
    splits = [each for each in conversions if isinstance(each, WeightConverter) and len(each.target_patterns) > 1]
    patterns = [pattern for each in splits for pattern in each.target_patterns]
    names = (name for name, _ in model.named_parameters())
    return next((name for name in names if any(re.search(pattern, name) for pattern in patterns)), None)


def _problems_on_cpu(
    inventory: Inventory, dtype: torch.dtype | None, schemes: Mapping[str, QuantScheme]
) -> Iterator[str]:
    name = type(inventory.model).__name__
    if any(
        not getattr(experts, "has_gate", True) for path, experts in inventory.experts.items() if path not in schemes
    ):
        yield (
            f"{name} has experts without a gate, for which vLLM has no kernel in 16 bits on a CPU (`_supports_no_act_and_mul` in "
            "cpu_moe.py). Use scheme='w4a16'"
        )
    if getattr(inventory.model.config.get_text_config(), "index_topk", None):
        yield f"{name} has sparse attention, which vLLM does not have on a CPU (`use_sparse` in platforms/cpu.py)"
    halves = {len(angles) for _, angles in rotary_embeddings(inventory.modules.values())}
    if dtype is torch.bfloat16 and (odd := sorted(half for half in halves if half % 8)):
        yield (
            f"{name} rotates {2 * odd[0]} features of each head, and vLLM's kernel for CPUs reads beyond its table in bfloat16 unless "
            "half of them is a multiple of 8. Set bf16=False"
        )


def problem_of_architecture(model: Any, has_adapter: bool = False) -> str | None:
    """Return why the installed vLLM has no implementation of a model's class, or one that takes no adapter if the
    model has one next to its layers; `None` otherwise, also without vLLM. Loads vLLM's list of classes."""
    if find_spec("vllm") is None:
        return None
    from vllm.model_executor.models.interfaces import supports_lora
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins

    # Ours registers classes.
    load_general_plugins()
    name, cls = type(model).__name__, type(model)
    known = ModelRegistry.models.get(name)
    # Of some classes it knows that its backend for transformers' own runs them.
    if known is not None and not getattr(known, "module_name", "").endswith(".models.transformers"):
        spec = find_spec(getattr(known, "module_name", "vllm"))
        folders = [Path(spec.origin).parent / kind for kind in ("nvidia", "cpu")]
        if not torch.cuda.is_available() and [folder.is_dir() for folder in folders] == [True, False]:
            return f"the installed vLLM has its class {name} for GPUs alone"
        if has_adapter and not supports_lora(known.load_model_cls()):
            return f"the installed vLLM's class {name} takes no adapters (`SupportsLoRA`). Set lora_mode='merged'"
        return None
    if has_adapter and getattr(model.config.get_text_config(), "kv_lora_rank", None):
        # vLLM's backend for transformers' classes joins other layers than its own classes.
        return f"the installed vLLM has no class {name}, and takes no adapters of its latent attention. Set lora_mode='merged'"
    if not (cls.is_backend_compatible() or cls._can_set_attn_implementation()):
        return f"the installed vLLM has no class {name}, and cannot replace the attention of transformers' own"
    head = model.get_output_embeddings()
    if getattr(model, "lm_head", None) is not head or getattr(head, "bias", None) is not None:
        return f"the installed vLLM has no class {name}, and runs transformers' own only if the output head is `lm_head`, without a bias"
    processor = PROCESSOR_MAPPING.get(type(model.config), None)
    if has_tower(model) and not hasattr(processor, "_get_num_multimodal_tokens"):
        return f"the installed vLLM has no class {name}, and runs transformers' own only if its processor counts the tokens of a picture"
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if cls._is_stateful or not _ATTENTION.issuperset(kinds):
        return f"the installed vLLM has no class {name}, and runs transformers' own only if all its layers attend"
    if "position_ids" not in signature(type(model.base_model).forward).parameters:
        return f"the installed vLLM has no class {name}, and runs transformers' own only if its body takes positions"
    if not _attends_as_vllm(model):
        return f"the installed vLLM has no class {name}, and runs transformers' own only if each layer attends once, without a mask of its own"
    return None


def problem_of_trial(model: Any, dtype: torch.dtype | None) -> str | None:
    """Return why the installed vLLM cannot make its class of a model in `dtype`, load the model's checkpoints into it,
    or computes other rotations or experts; `None` otherwise, and where this cannot be tried. The class is made from
    the configuration alone, on the meta device, and loads tensors without values."""
    # Groups of processes are those of an earlier engine, or of the training.
    if find_spec("vllm") is None or torch.distributed.is_initialized() or has_own_code(model):
        return None
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.platforms import current_platform

    # Never run on a GPU, where an error of the trial itself would refuse a model that trains.
    if not current_platform.is_cpu():
        return None
    name = type(model).__name__
    if model.device.type != "meta":
        try:
            with torch.device("meta"):
                model = type(model)(deepcopy(model.config))
        except Exception:
            # A user's class may be made in another way.
            return None
    try:
        made = _made_by_vllm(model, dtype or torch.get_default_dtype())
    except Exception as error:
        # Others need what is not here: values of tensors, files of a processor, or a kernel.
        kinds = AssertionError, AttributeError, KeyError, TypeError, ValueError
        is_of_shapes = isinstance(error, RuntimeError) and re.search(r"\b(size|shape)", str(error))
        if isinstance(error, OSError) or not (is_of_shapes or isinstance(error, kinds)):
            return None
        said = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]
        return f"the installed vLLM cannot make {name} of this configuration, or not load its checkpoints: {said}"
    act = getattr(model.config.get_text_config(), "hidden_act", None)
    acts = {getattr(each, "activation", None) for each in made.modules() if hasattr(each, "moe_config")}
    if act not in (None, "silu", "swish") and MoEActivation.SILU in acts:
        return f"{name} with hidden_act={act!r}: experts of the installed vLLM's class always compute silu"
    rotations = _rotations(model)
    found = [] if rotations is None else rotation_differences(rotations, rotations_in_tables(made.modules()))
    return f"{name} in the installed vLLM has another {found[0]}" if found else None


def _made_by_vllm(model: Any, dtype: torch.dtype) -> nn.Module:
    """Return vLLM's model of a learner on the meta device, with tables of rotations, after loading its tensors."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    make_table = RotaryEmbeddingBase.__init__

    def make_table_with_values(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            make_table(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_configuration(model, Path(folder), dtype)
        # vLLM registers classes of configurations, which transformers would take for the learner's from now on.
        stack.enter_context(replaced(CONFIG_MAPPING, _extra_content={**CONFIG_MAPPING._extra_content}))
        args = EngineArgs(folder, dtype=dtype, load_format="dummy", hf_overrides=added_fields(model))
        args.skip_tokenizer_init = args.enforce_eager = True
        config = args.create_engine_config()
        # Their cache would give an engine these tables.
        stack.enter_context(replaced(rotary_embedding, _ROPE_DICT={}))
        stack.enter_context(replaced(RotaryEmbeddingBase, __init__=make_table_with_values))
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(_groups_of_one(folder))
        stack.enter_context(set_default_torch_dtype(dtype))
        # Constants of its module would be on the meta device (`EPS` in vLLM's models/gemma3n.py), in engines too.
        get_model_architecture(config.model_config)
        with torch.device("meta"):
            made = initialize_model(config)
            made.load_weights(_published_tensors(model, dtype))
    return made


def _published_tensors(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model as an engine loads them. A checkpoint may hold transposed experts."""
    for name, tensor in chain.from_iterable(iter_checkpoint_layers(model, dtype, stacks_experts=True)):
        yield from tensors_of_experts(name, tensor) if EACH in name else [(name, tensor)]


def _rotations(model: nn.Module) -> list[Rotation] | None:
    """Return the rotations of a model that may be on the meta device, `None` if they cannot be computed again."""
    again = nn.Module()
    with torch.device("cpu"):
        for name, module in model.named_modules():
            if any("inv_freq" in each for each in module._buffers):
                try:
                    again.add_module(name.replace(".", "/"), type(module)(config=module.config))
                except (AttributeError, TypeError):
                    return None
    return [(factor, angles[angles != 0].tolist()) for factor, angles in rotary_embeddings(again.modules())]


@contextmanager
def _groups_of_one(folder: str) -> Iterator[None]:
    """Give vLLM process groups of this process alone, which its layers ask for ranks. Their store is in `folder`."""
    from vllm.distributed import parallel_state

    try:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def problem_of_processor(folder: str, config: Any) -> str | None:
    """Return why vLLM cannot start with a model in a `folder`, or on the Hub, whose class has a tower, or `None`."""
    # The configuration of Phi-4-multimodal is that of its text.
    has_tower = config.get_text_config() is not config or type(config) in PROCESSOR_MAPPING
    if not has_tower or not Path(folder).is_dir():
        return None
    names = "processor_config.json", "preprocessor_config.json"
    if any(Path(folder, name).is_file() for name in names):
        return None
    return (
        f"{folder} has no processor ({', '.join(names)}), which vLLM needs for a class with a tower, also for text. Save it "
        "there with `processor.save_pretrained`."
    )


def problem_of_context(model: Any, option: str, length: int | None) -> str | None:
    """Return why vLLM starts no engine with a context of this length, the value of an option, or `None`."""
    longest = _longest_of_vllm(model.config.get_text_config())
    if length is None or longest is None or length <= longest:
        return None
    return (
        f"{option}={length} with {type(model).__name__}: vLLM starts no engine with a context beyond the model's, {longest} tokens "
        f"(max_position_embeddings). Set at most {longest}, or leave it out."
    )


def _longest_of_vllm(config: Any) -> int | None:
    """Return the longest context that vLLM takes for a model, or more (`_get_and_verify_max_len`, 0.31): some of its
    factors of rotations do not count there."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") != "0":
        return None
    rotations = getattr(config, "rope_parameters", None) or {}
    factors = [each.get("factor") or 1 for each in (rotations, *rotations.values()) if isinstance(each, dict)]
    return max(int(longest * max(factors)), getattr(config, "model_max_length", None) or 0)


def _attends_as_vllm(model: nn.Module) -> bool:
    """Return whether each layer attends once in a forward, without a mask of its own: vLLM's attention for
    transformers' classes has one cache for each number of a layer, and passes no mask. A forward that depends on
    numbers, such as that of a mixture, cannot be tried."""
    seen: Counter[int | None] = Counter()
    masks = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen[getattr(module, "layer_idx", None)] += 1
        masks.append(attention_mask)
        return query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None

    AttentionInterface.register("trl_qarl_seen", attend)
    config = deepcopy(model.config)
    config._attn_implementation = "trl_qarl_seen"
    try:
        with torch.device("meta"), torch.no_grad():
            type(model)(config).eval()(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except Exception:
        # Only a forward that ran says anything, and unknown classes fail in their own ways.
        return True
    return seen == Counter(range(config.get_text_config().num_hidden_layers)) and all(mask is None for mask in masks)
