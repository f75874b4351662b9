"""Problems of a model with vLLM, found from its modules before an engine is started; weights are not read."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from ..checkpoint.layout import problem_of_mixture
from ..models import family_of, has_one_window
from ..quantization.inventory import Inventory
from ..quantization.names import has_tower
from ..quantization.schemes import QuantScheme


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
    if wants is not None and (shares := config.tie_word_embeddings) is not wants:
        yield (
            f"{name} with tie_word_embeddings={shares}: vLLM 0.31 {'always' if wants else 'never'} shares the weight of embedding and "
            "output head in its class, whatever the configuration says"
        )
    if joined := _joined_in_checkpoints(inventory.model):
        yield f"checkpoints of {name} join layers, such as `{joined}` with others, and so does vLLM's class"
    if (problem := family.problem_of_float32) and dtype is torch.float32:
        yield f"{name} in float32: {problem}. Set bf16=True"
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
    halves = {len(angles) for _, angles in inventory.rotary_embeddings}
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
    if name in ModelRegistry.get_supported_archs():
        known = ModelRegistry.models[name]
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
