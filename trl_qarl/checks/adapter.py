"""Checks of adapters. Each function yields problems and changes nothing; PEFT is not imported."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..adapters.tensors import ADAPTER_NAME
from ..hub import ENGINE_RANKS
from ..quantization.inventory import Inventory, layers_outside_decoder
from ..quantization.names import base_model
from .refused import PATTERNS_OF_LORA, REFUSED_BY_LORA


_HONOURED = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_rslora", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "task_type"),
    # PEFT's own entries, without effect on the training.
    *("peft_type", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    "runtime_config",
)

_INITIALISATIONS = (True, False, "gaussian", "orthogonal")


def problems_of_options(args, has_adapter: bool) -> Iterator[str]:
    """Yield options of [`QaRLConfig`] that contradict an adapter, or its absence."""
    if not has_adapter:
        if args.lora_mode != "adapter":
            yield f"lora_mode={args.lora_mode!r} was given, but no adapter. Give `peft_config`, or remove it."
        return
    refused = "with a PEFT adapter is not supported"
    if args.lora_mode != "adapter" and not args.is_quantized:
        yield f"lora_mode={args.lora_mode!r} and scheme={args.scheme!r} {refused}: nothing is quantized. Remove it."
    if args.precisions is not None:
        yield f"precisions={args.precisions} {refused}: the codes of the base are fixed at one precision. Remove it."
    if args.sync_ref_model:
        yield f"sync_ref_model=True {refused}: the reference is the base without its adapter, or the adapter that was given. Remove it."


def problems_of_start(model: Any, has_adapter: bool) -> Iterator[str]:
    """Yield problems of a model from which an adapter cannot be trained."""
    if not isinstance(model, nn.Module):
        return
    if getattr(model, "_hf_peft_config_loaded", False) and not hasattr(model, "get_base_model"):
        yield "The model has an adapter that was loaded by transformers. Pass the adapter's folder, or a `PeftModel`."
    quantization_config = getattr(getattr(model, "config", None), "quantization_config", None)
    if has_adapter and quantization_config is not None and not is_nf4(quantization_config):
        yield "The model was loaded quantized, with other layers than the learner's. Give its folder, as a string."


def is_nf4(quantization_config: Any) -> bool:
    """Return whether a `quantization_config` loads a model in bitsandbytes' 4 bits."""
    if isinstance(quantization_config, dict):
        return bool(quantization_config.get("load_in_4bit"))
    return bool(getattr(quantization_config, "load_in_4bit", False))


def problems_of_quantized_base(args, quantization_config: Any, has_adapter: bool) -> Iterator[str]:
    """Yield problems of a base that is loaded quantized, which is supported only for QLoRA (bitsandbytes' 4 bits)."""
    if quantization_config is None:
        return
    if not is_nf4(quantization_config):
        yield (
            f"quantization_config={type(quantization_config).__name__} is not supported: masters stay in high precision, and "
            "below an adapter only `BitsAndBytesConfig(load_in_4bit=True)` is supported. Remove it; the scheme quantizes."
        )
        return
    given = "quantization_config with load_in_4bit=True and"
    if not has_adapter:
        yield f"{given} no adapter is not supported: 4-bit weights take no gradient. Give `peft_config`, or remove it."
    if args.is_quantized:
        yield (
            f"{given} scheme={args.scheme!r} is not supported: the layers would be quantized twice. Use scheme='bf16' for "
            "TRL's QLoRA, or remove `quantization_config`: the base of an adapter is frozen in the scheme's bits."
        )
    if args.use_vllm:
        yield f"{given} use_vllm=True is not supported: vLLM 0.31 has no layers for its bits. Use `use_vllm=False`."


def problems_of_adapter(config: Any, is_served: bool = False, is_merged: bool = False) -> Iterator[str]:
    """Yield problems of a `PeftConfig` over a frozen low-bit base, served by vLLM or merged into the weights."""
    peft_type = getattr(config, "peft_type", None)
    if getattr(peft_type, "value", peft_type) != "LORA":
        yield f"peft_config={type(config).__name__} is not supported: only LoRA is. Use `peft.LoraConfig`."
        return
    usual = type(config)()
    for name, value in vars(config).items():
        is_honoured = name in _HONOURED or (is_merged and name in PATTERNS_OF_LORA)
        if name.startswith("_") or is_honoured or value in (getattr(usual, name, None), None, [], {}):
            continue
        reason = REFUSED_BY_LORA.get(name, "its effect on a low-bit base is untested; leave it out")
        yield f"peft_config: {name}={value!r} is not supported: {reason}."
    if config.init_lora_weights not in _INITIALISATIONS:
        why = f"it changes the base weights or needs their masters. Choose one of {list(_INITIALISATIONS)}"
        yield f"peft_config: init_lora_weights={config.init_lora_weights!r} is not supported: {why}."
    if config.lora_alpha == 0:
        yield "peft_config: lora_alpha=0 multiplies the adapter by 0, so nothing would be trained. Use twice the rank `r`."
    if is_served and config.r > ENGINE_RANKS[-1]:
        yield f"peft_config: r={config.r} is more than vLLM serves. Use at most {ENGINE_RANKS[-1]}, or `use_vllm=False`."
    if config.task_type not in (None, "CAUSAL_LM"):
        yield f"peft_config: task_type={str(config.task_type)!r} is not a language model. Use 'CAUSAL_LM'."


def problems_of_adapted_model(model: Any) -> Iterator[str]:
    """Yield problems of the adapters inside `model`, a `PeftModel`, except TRL's `ref`."""
    names = [name for name in model.peft_config if name != "ref"]
    if names != [ADAPTER_NAME]:
        yield f"The model has the adapters {names}, but only {ADAPTER_NAME!r} is trained. Load only that one."
        return
    if list(model.active_adapters) != [ADAPTER_NAME]:
        yield f"The active adapters are {list(model.active_adapters)}. Call `model.set_adapter({ADAPTER_NAME!r})`."
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        yield "Nothing of the model is trainable. Load the adapter with `is_trainable=True`."
    yield from _problems_of_targets(model)


def _problems_of_targets(model: Any) -> Iterator[str]:
    config = model.peft_config[ADAPTER_NAME]
    base = base_model(model)
    outside = {id(base.get_output_embeddings()), *(id(m) for m in base.modules() if isinstance(m, nn.Embedding))}
    wrapped = {name: module for name, module in base.named_modules() if hasattr(module, "base_layer")}
    inventory = Inventory.of(base)
    around = layers_outside_decoder(inventory)
    if adapted := [name for name in wrapped if name in around]:
        decoder = next(name for name, module in base.named_modules() if module is base.get_decoder())
        yield (
            f"peft_config: target_modules names {adapted[0]!r} and {len(adapted) - 1} more {around[adapted[0]]}, which vLLM "
            f"does not serve. Name only layers of the language model: target_modules={rf'{decoder}.*_proj'!r}."
        )
    for name, module in wrapped.items():
        named = f"peft_config: target_modules names {name!r}"
        if id(module) in outside or id(module.base_layer) in outside:
            yield f"{named}: log-probs are computed from its weight directly. Leave it out, or use 'all-linear'."
        elif not isinstance(module.base_layer, nn.Linear):
            why = "which is not a linear layer; in a mixture 'all-linear' includes experts and routers"
            yield f"{named}, {why}. Name linear layers, such as ['q_proj', 'v_proj']."
    if isinstance(config.target_modules, (list, set, tuple)):
        # Some may be excluded, or of layers that are not transformed.
        names = {*wrapped, *(name for name, module in inventory.modules.items() if isinstance(module, nn.Linear))}
        missing = [t for t in sorted(config.target_modules) if not any(f".{name}".endswith(f".{t}") for name in names)]
        if missing:
            layers = sorted({name.rpartition(".")[2] for name in names})
            yield f"peft_config: target_modules {missing} match no layer. The linear layers are {layers}."
