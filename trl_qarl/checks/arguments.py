"""Checks of the trainer's arguments, which are not part of a configuration."""

import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl.rewards
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin

from ..adapters.tensors import is_adapter_folder
from ..checkpoint.files import check_writable
from ..checkpoint.load import is_low_bit, method_of, skeleton
from ..engines.pictures import problem_of_class
from ..models import family_of
from ..objectives.registry import get_objective
from ..quantization.fixed_scales import fixed_scales
from ..quantization.inventory import Inventory
from ..quantization.names import architecture, base_model, is_adapted, is_peft_model
from ..quantization.schemes import QuantScheme
from ..quantization.storage import num_elements
from .adapter import (
    is_nf4,
    problems_of_adapter,
    problems_of_options,
    problems_of_quantized_base,
    problems_of_start,
)
from .batches import fit_generation_batch, problems_of_dataset
from .configuration import check_optimizer, low_precision_masters
from .launch import Launch, problems_of_ignored_sharding, problems_of_launch
from .names import is_no_folder
from .resume import problems_before_loading


logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROMPTS = (
    "A prompt is a text, or a list of messages with `role` and `content`, and not empty. Remove such rows: "
    "`dataset.filter(lambda row: row['prompt'])`."
)
_WITH_HEAD = "Give a model with a head for scores (`AutoModelForSequenceClassification`)."
_PICTURE_COLUMNS = {"image", "images"}


def problems_of_dropout(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield a problem of dropout, or of noise in routers, that stays on although rollout, scoring and loss must see
    one policy: for objectives other than TRL's losses, and for adapters inside low-bit weights."""
    off = _dropout_to_switch_off(model, args)
    remaining = {place: rate for place, rate in _dropout(model).items() if place not in off}
    if remaining and get_objective(args) is not None:
        name, key = next(iter(remaining))
        yield (
            f"The model drops activations or adds noise ({len(remaining)} rates above 0, the first is {name}.{key}={remaining[name, key]}), so rollout, "
            f"scoring and loss would see different policies under loss_type={args.loss_type!r}. Set `disable_dropout=True`."
        )
    rates = [rate for (name, _), rate in remaining.items() if ".lora_dropout." in name]
    if rates and args.lora_mode == "merged":
        yield (
            f"lora_dropout={max(rates)} with lora_mode='merged': dropout needs the adapter's branch, which merging removes. Use "
            "lora_dropout=0, `disable_dropout=True` or lora_mode='adapter'."
        )


def switch_off_dropout(model: nn.Module, args: Any) -> None:
    """Switch off dropout that TRL's `disable_dropout` misses, noise in routers, and LoRA's dropout for objectives
    other than TRL's losses."""
    off = _dropout_to_switch_off(model, args)
    for rate in () if args.disable_dropout else set(off.values()):
        logger.warning(
            "lora_dropout=%g is switched off: under loss_type=%r rollout, scoring and loss must see the same policy. "
            "Use lora_dropout=0, or another objective.",
            rate,
            args.loss_type,
        )
    for name, key in off:
        module = model.get_submodule(name)
        if "jitter" in key:
            # Without training the rate adds no noise. It is kept, because PhiMoE also compares scores with it.
            module.eval()
            module.train = partial(_stay_in_evaluation, module)
        else:
            setattr(module, key, 0.0)


def _dropout(model: nn.Module) -> dict[tuple[str, str], float]:
    """Return the rates above 0, by module and attribute."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        # Attention has no dropout module: it passes an attribute of the layer to a function.
        if ("drop" in key or "jitter" in key or (key == "p" and isinstance(module, _DropoutNd)))
        and isinstance(value, float)
        and value > 0
    }


def _dropout_to_switch_off(model: nn.Module, args: Any) -> dict[tuple[str, str], float]:
    active = _dropout(model)
    if args.disable_dropout:
        return active
    if get_objective(args) is None:
        return {}
    # TRL's examples use dropout in LoRA. A model with its own dropout is rare, and refused.
    return {place: rate for place, rate in active.items() if ".lora_dropout." in place[0]}


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def keep_attention_cap(model: nn.Module) -> None:
    """Have a model that caps its attention's logits (Gemma 2) compute them in PyTorch operations: transformers'
    default, PyTorch's fused attention, drops the cap, which engines apply, without a word (5.17)."""
    model = base_model(model)
    config = getattr(model, "config", None)
    cap = config and getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap and config._attn_implementation == "sdpa":
        logger.info("attn_implementation='eager': 'sdpa' would drop attn_logit_softcapping=%g of this model.", cap)
        model.set_attn_implementation("eager")


def keep_mamba_layers(model: nn.Module, use_vllm: bool) -> None:
    """Have layers of Mamba 2 compute the loss as they score. In training transformers' fused kernel (`mamba_ssm`)
    reads the weight of `out_proj`, which is its masters, and does not call it (5.17); and vLLM has no limit of step
    sizes (`mamba_mixer2.py`), for which transformers takes Nemotron-H's `time_step_min`."""
    for module in base_model(model).modules():
        if hasattr(module, "time_step_limit"):
            # Without the kernel these functions return `None` too.
            sys.modules[type(module).__module__].mamba2_split_conv1d_scan_combined = lambda *args, **kwargs: None
            if use_vllm:
                module.time_step_limit = (0.0, math.inf)


def problems_of_positions(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield a problem of an engine that would compute positions unlike the learner: with LongRoPE (such as Phi-3) an
    engine chooses factors for all sequences by its context, the learner for each batch by its longest sequence; and a
    sliding window that vLLM and transformers count differently may not be left."""
    if not args.use_vllm:
        return
    name, length = architecture(model), args.vllm_max_model_length
    if family_of(name).has_longer_window:
        window = base_model(model).config.get_text_config().sliding_window
        if length is None or length > window:
            yield (
                f"vllm_max_model_length={length} with {name}: in longer sequences than its sliding_window={window} "
                "vLLM's layers see one more token than transformers', so learner and engine would be different policies. Set "
                f"vllm_max_model_length={window}, and start a server with --max-model-len {window}."
            )
    limit = _longest_of_short(model)
    if limit and (length is None or length > limit):
        yield (
            f"vllm_max_model_length={args.vllm_max_model_length} with LongRoPE: a context of more than {limit} tokens "
            "(original_max_position_embeddings) gives every sequence of the engine the factors of long ones, and the learner scores "
            f"short ones with those of short ones. Set vllm_max_model_length={limit}, and start a server with --max-model-len {limit}."
        )


def guard_positions(model: nn.Module) -> None:
    """Have a learner with LongRoPE refuse sequences that would change the factors of others in their batch."""
    for layer in _layers_with_long_rope(model):
        layer.register_forward_pre_hook(partial(_check_longest, _longest_of_short(model)), with_kwargs=True)


def warn_of_length(longest: int, prompts: Iterable[Sequence[int]], model: nn.Module, args: Any) -> int:
    """Return the number of tokens of the longest of `prompts`, or `longest` if that is more. The first time that the
    completions may leave the context of the model is logged: an engine refuses such a prompt, `generate` does not."""
    limit = getattr(base_model(model).config.get_text_config(), "max_position_embeddings", None) or float("inf")
    now = max([longest, *map(len, prompts)])
    was_within = longest == 0 or longest + args.max_completion_length <= limit
    if was_within and now + args.max_completion_length > limit:
        logger.warning(
            "A prompt of %d tokens and max_completion_length=%d are more than the model's context of %d tokens, beyond which it was not "
            "trained. Leave such prompts out, or lower max_completion_length.",
            *(now, args.max_completion_length, limit),
        )
    return now


def _layers_with_long_rope(model: nn.Module) -> list[nn.Module]:
    named = base_model(model).named_modules()
    return [m for name, m in named if name.endswith("rotary_emb") and getattr(m, "rope_type", "") == "longrope"]


def _longest_of_short(model: nn.Module) -> int | None:
    layers = _layers_with_long_rope(model)
    return layers[0].config.rope_parameters["original_max_position_embeddings"] if layers else None


def _check_longest(limit: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if (longest := int(positions.max()) + 1) > limit:
        raise ValueError(
            f"A sequence has {longest} tokens, more than original_max_position_embeddings={limit}: with LongRoPE it would give shorter "
            "sequences of its batch other positions than in their rollout. Shorten prompts or `max_completion_length`."
        )


@torch.no_grad()
def check_output_head(model: nn.Module, temperature: float) -> None:
    """Compare the log-probs of TRL's loss, which multiplies by the output head itself, with those of the model's
    logits, once, on a few tokens in high precision. `ValueError` is raised if they differ, as for a model whose own
    code changes its logits."""
    layers = [layer for layer in Inventory.of(model).layers.values() if not layer.is_frozen]
    used = {layer: layer.use_quantized_forward for layer in layers}
    was_training = model.training
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_rounded = any(p.is_floating_point() and p.itemsize < 4 for p in model.parameters())
    try:
        model.eval()
        # Nothing is quantized before the first update.
        for layer in layers:
            layer.use_quantized_forward = False
        # A base in 16 bits below an adapter in float32 needs it.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_rounded):
            fused = model(**inputs, labels=ids, fused_lm_head=True).log_probs.float()
            logits = model(**inputs, use_cache=False).logits[:, :-1]
    finally:
        model.train(was_training)
        for layer, was_used in used.items():
            layer.use_quantized_forward = was_used
    log_probs = (logits.float() / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    # Logits are rounded, and their sum in tiles. accelerate's autocast of an earlier training is part of `forward`,
    # and returns float32.
    dtype = torch.bfloat16 if hasattr(model, "_original_forward") else logits.dtype
    allowed = 4 * torch.finfo(dtype).eps * logits.abs().max().item() / temperature + 1e-3
    if (difference := (fused - log_probs).abs().max().item()) > allowed:
        raise ValueError(
            f"The log-probs of TRL's loss differ from those of {type(base_model(model)).__name__}'s logits by {difference:.3g} nats: its "
            "forward changes the output head's logits, and TRL applies only `final_logit_softcapping`, `logit_scale` and their kin of "
            "the configuration, so the loss would be that of another policy than the rollout's. Fold the change into the head's weight."
        )


def problems_of_masters(model: nn.Module, args: Any, has_adapter: bool) -> Iterator[str]:
    """Yield a problem if the masters' dtype rounds their updates away."""
    if has_adapter and getattr(base_model(model), "is_loaded_in_4bit", False):
        # Only the adapter is trained, and kept in float32.
        return
    if not has_adapter and not any(p.requires_grad for p in model.parameters()):
        yield "Nothing of the model is trainable: all its parameters have requires_grad=False. Call `model.requires_grad_()`."
    # A model that will get an adapter will be frozen.
    is_trained = is_adapted(model) or not has_adapter
    dtypes = {p.dtype for p in model.parameters() if is_trained and p.requires_grad and p.is_floating_point()}
    yield from low_precision_masters(args, min(dtypes, key=lambda dtype: dtype.itemsize, default=None))


def problems_of_fixed_scales(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield a problem if the run's group size differs from that of the checkpoint with whose scales it starts."""
    sizes = {fixed.group_size for fixed in fixed_scales(model).values() if fixed.group_size is not None}
    if args.group_size is not None and sizes - {args.group_size}:
        yield (
            f"group_size={args.group_size} was given, and the checkpoint has groups of {', '.join(map(str, sorted(sizes)))}, which "
            "training keeps. Remove it."
        )


def problems_of_experts(
    model: nn.Module, args: Any, schemes: Mapping[str, QuantScheme], skipped: Mapping[str, str]
) -> Iterator[str]:
    """Yield problems of the experts of a mixture whose layers get these `schemes`, by name; `skipped` has the reasons
    why the others stay in high precision."""
    inner, inventory = base_model(model), Inventory.of(model)
    config = inner.config.get_text_config()
    coef = args.router_aux_loss_coef
    coef = getattr(config, "router_aux_loss_coef", 0.0) if coef is None else coef
    if coef and hasattr(config, "output_router_logits") and not hasattr(config, "num_experts"):
        yield (
            f"router_aux_loss_coef={coef}: TRL reads `num_experts`, which {type(config).__name__} does not have "
            "(https://github.com/huggingface/trl/issues/5754). Set router_aux_loss_coef=0"
        )
    experts = {name: p for name, p in inventory.stacked_experts.items() if name.rpartition(".")[0] not in schemes}
    if not args.is_quantized or not experts:
        return
    reason = skipped[next(iter(experts)).rpartition(".")[0]]
    if args.push_to_hub:
        yield f"push_to_hub=True: with experts in high precision ({reason}) there is no low-bit export. Remove `push_to_hub`."
    if args.use_vllm or reason != "exclude_modules":
        share = num_elements(experts.values()) / num_elements(model.parameters())
        yield (
            f"{type(model).__name__} is a mixture of experts, and experts with {share:.0%} of the weights stay in high precision under "
            f"scheme={args.scheme!r} ({reason}). It has no low-bit export, which vLLM would need. Use scheme='bf16'; without "
            "vLLM, name the experts in `exclude_modules`, such as 'experts', to quantize only the other layers."
        )


def problems_of_division(
    args: Any, reason_to_pad: str | None, num_processes: int, has_aux_loss: bool
) -> Iterator[str]:
    """Yield the problem of `max_tokens_per_forward` with a model that pads batches for this reason, if any, with
    several processes, or with the auxiliary loss of a mixture."""
    if num_processes > 1:
        why = "processes would run different numbers of forwards"
    elif reason_to_pad is not None:
        why = f"batches of this model are padded: {reason_to_pad}"
    elif has_aux_loss:
        why = "the auxiliary loss of a mixture is one of all tokens of a micro-batch"
    else:
        return
    yield (
        f"max_tokens_per_forward={args.max_tokens_per_forward} is unsupported here: {why}. Leave it out, and lower "
        "`per_device_train_batch_size` and raise `gradient_accumulation_steps` instead."
    )


def has_pictures(*datasets: Any) -> bool:
    """Return whether a dataset, or one of several by name, has a column from which TRL reads pictures."""
    return bool(_columns_among(_PICTURE_COLUMNS, datasets))


def _columns_among(names: set[str], datasets: Iterable[Any]) -> set[str]:
    splits = [split for data in datasets for split in (data.values() if isinstance(data, dict) else [data])]
    return names & {column for split in splits for column in getattr(split, "column_names", None) or ()}


def problems_of_pictures(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield problems of rollouts with pictures, for a `model` with its adapter."""
    if not args.use_vllm:
        return
    if problem := problem_of_class(model):
        yield problem
    if args.numerics in ("engine", "exact"):
        yield (
            f"numerics={args.numerics!r} with pictures and use_vllm=True is not supported: operations of vision towers, and positions in "
            "several dimensions, may differ from the engine's bits. Remove it; log-probs of learner and engine then differ by rounding."
        )


def problems_of_prompts(dataset: Any, name: str) -> Iterator[str]:
    """Yield a problem of a dataset's format, or for its first row whose prompt is neither text nor messages. Streams
    and formats of the user's own are not read."""
    for data in dataset.values() if isinstance(dataset, dict) else [dataset]:
        for row, prompt in enumerate(_prompts_of(data)):
            if not _is_prompt(prompt):
                yield f"Row {row} of the {name} dataset has the prompt {prompt!r}. {_PROMPTS}"
                break
        else:
            if (kind := _format_of(data)) and not _holds_prompts(data):
                yield (
                    f"The {name} dataset has the format {kind!r}, in which no prompt is a text or a list of messages. Give "
                    "`dataset.with_format(None)`."
                )


def _format_of(data: Any) -> str | None:
    """Return the format of a dataset or a stream, `None` for rows as dictionaries of Python's objects, or by code of
    the user's own."""
    if isinstance(data, Dataset):
        kind = data.format["type"]
    else:
        # `datasets` has no public name for that of a stream (5.2).
        kind = getattr(getattr(data, "_formatting", None), "format_type", None)
    return None if kind in ("python", "custom") else kind


def _holds_prompts(data: Any) -> bool:
    """Return whether a row of a dataset in some format has a prompt. A stream is not read, but a table has no rows."""
    if isinstance(data, IterableDataset):
        return not data._formatting.is_table
    try:
        # As the trainer's loader does; a format may lack a package, or the column.
        return len(data) == 0 or "prompt" not in data.column_names or _is_prompt(data.__getitems__([0])[0]["prompt"])
    except Exception:
        return False


def _prompts_of(data: Any) -> Sequence[Any]:
    """Return the prompts of a dataset, as far as they can be read without code of the user's own."""
    if not isinstance(data, Dataset) or "prompt" not in data.column_names or data.format["type"] == "custom":
        return []
    return data.with_format(None).select_columns("prompt")["prompt"]


def check_columns(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ValueError` for a row of a batch without a prompt, as a stream may have whose columns only its rows
    tell."""
    for place, row in enumerate(rows):
        if "prompt" not in row:
            raise ValueError(
                f"Row {place} of a batch has no `prompt`, only {[*row]}. Rename the column that holds it."
            )


def check_prompts(prompts: Iterable[Any]) -> None:
    """Raise `ValueError` for a prompt of a batch that is neither text nor messages, as a stream may have."""
    for place, prompt in enumerate(prompts):
        if not _is_prompt(prompt):
            raise ValueError(f"Row {place} of a batch has the prompt {prompt!r}. {_PROMPTS}")


def _is_prompt(prompt: Any) -> bool:
    return (isinstance(prompt, str) or _are_messages(prompt)) and len(prompt) > 0


def _are_messages(prompt: Any) -> bool:
    # Only the text of a call of tools may be missing.
    return isinstance(prompt, list) and all(
        isinstance(each, dict) and "role" in each and (each.get("content") is not None or each.get("tool_calls"))
        for each in prompt
    )


def _problem_of_model(model: Any) -> str | None:
    """Return why `model`, loaded or by name, is no language model, or `None`. One by name is not read."""
    if isinstance(model, nn.Module):
        inner = base_model(model)
        if problem := _problem_of_class(type(inner).__name__, inner, getattr(inner, "config", None)):
            return problem
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        return (
            "The model is on the meta device, without weights. Load it with `from_pretrained`." if is_empty else None
        )
    if isinstance(model, str) and model:
        return f"The model {model!r} is not a folder." if is_no_folder(model) or Path(model).is_file() else None
    said = "empty" if model == "" else f"of type {type(model).__name__}"
    return f"`model` is {said}. Give a causal language model, or the name or the folder of one."


def _problem_of_class(name: str, model: Any, config: Any) -> str | None:
    """Return why a class of transformers, or a model, with this `config` is no causal language model, or `None`."""
    if not getattr(model, "can_generate", lambda: False)():
        return f"The model is a {name}, which generates no text. Give a causal language model."
    if getattr(config, "is_encoder_decoder", False):
        return f"The model is a {name}, whose decoder reads an encoder's output. Give a causal language model."
    return None


def problems_of_tokenizer(model: Any, processing_class: Any, name: str = "processing_class") -> Iterator[str]:
    """Yield a problem of a processing class, the argument `name`, that is none, or if none was given and the model's
    folder has no tokenizer: transformers makes one without a vocabulary."""
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin | None):
        yield (
            f"`{name}` is of type {type(processing_class).__name__}. Give a tokenizer or a processor, such as "
            "`AutoTokenizer.from_pretrained(...)`, or leave it out."
        )
        return
    if processing_class is not None:
        if name == "processing_class" and (problem := problem_of_end(processing_class)):
            yield problem
        return
    model = _base_of(model) if is_adapter_folder(model) else model
    if not (isinstance(model, str) and model and Path(model).is_dir()):
        return
    if not any((Path(model) / file).is_file() for file in _TOKENIZER_FILES):
        yield (
            f"{model} has no tokenizer ({', '.join(_TOKENIZER_FILES)}). Save it there with `tokenizer.save_pretrained`, or give it "
            f"as `{name}`."
        )


def _base_of(adapter_folder: str) -> str | None:
    """Return the name of the model that an adapter's configuration names, from which TRL takes the tokenizer."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(adapter_folder).base_model_name_or_path


def problem_of_end(processing_class: Any) -> str | None:
    """Return the problem of a tokenizer without an end token, which TRL looks for in each completion, or `None`."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "eos_token_id", None) is not None:
        return None
    return "The tokenizer has no end token, by which a completion ends. Set `tokenizer.eos_token`, and give it as `processing_class`."


def check_tokens(rows: Iterable[Sequence[int]], tokenizer: Any, vocab_size: int, placeholders: Set[int]) -> None:
    """Raise `ValueError` for a token of a prompt for which the model has no embedding; `placeholders` need none."""
    for place, row in enumerate(rows):
        if max(row, default=0) < vocab_size:
            continue
        if unknown := [token for token in row if token >= vocab_size and token not in placeholders]:
            raise ValueError(
                f"Prompt {place} of a batch has the token {tokenizer.convert_ids_to_tokens(unknown[0])!r} ({unknown[0]}), and the model has "
                f"embeddings of {vocab_size}. Call `model.resize_token_embeddings(len(tokenizer))`, or give the model's own tokenizer."
            )


def _problems_of_template(model: Any, processing_class: Any, *datasets: Any) -> Iterator[str]:
    """Yield a problem if prompts are messages, and the tokenizer, as far as it is on this machine, has no template."""
    columns = map(_prompts_of, datasets)
    if any(len(prompts) and isinstance(prompts[0], list) for prompts in columns) and not _has_template(
        model, processing_class
    ):
        yield (
            "The prompts are lists of messages, and the tokenizer has no chat template. Set `tokenizer.chat_template` and give the "
            "tokenizer as `processing_class`, or save it with the model; or give prompts that are texts."
        )


def _has_template(model: Any, processing_class: Any) -> bool:
    if processing_class is not None:
        return getattr(processing_class, "chat_template", None) is not None
    folder = Path(model) if isinstance(model, str) else Path(getattr(model, "name_or_path", ""), "config.json").parent
    described = folder / "tokenizer_config.json"
    if not described.is_file():
        return True
    files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    return any((folder / file).exists() for file in files) or "chat_template" in json.loads(described.read_text())


def _problems_of_output(args: Any, model: Any) -> Iterator[str]:
    """Yield a problem of an `output_dir` in which nothing can be written, or where the model would be written over."""
    if not args.should_save:
        return
    try:
        check_writable(args.output_dir)
    except ValueError as error:
        yield f"output_dir={error}"
    if isinstance(model, str) and Path(model).is_dir() and Path(args.output_dir).resolve() == Path(model).resolve():
        yield f"output_dir={args.output_dir!r} is the folder of the model, which would be written over. Name another folder."


def _problems_of_reward(reward: Any, processing_class: Any) -> Iterator[str]:
    """Yield problems of one of `reward_funcs`, with its tokenizer if it is a model."""
    if isinstance(reward, str):
        if problem := _problem_of_reward_model(reward):
            yield problem
        else:
            yield from problems_of_tokenizer(reward, processing_class, "reward_processing_classes")
    elif isinstance(reward, nn.Module):
        generates = getattr(reward, "can_generate", lambda: not hasattr(reward, "config"))()
        if generates:
            yield f"The reward model is a {type(reward).__name__}, which has no head for scores. {_WITH_HEAD}"
    elif not callable(reward):
        yield (
            f"`reward_funcs` has {reward!r} of type {type(reward).__name__}. Give a function, the name of a reward model or the model, "
            "or a list of these."
        )


def _problem_of_reward_model(name: str) -> str | None:
    """Return why a reward model by name gives no rewards, or `None`."""
    if callable(getattr(trl.rewards, name, None)):
        return f"The reward {name!r} is a text, which names a reward model. Give the function: `from trl.rewards import {name}`."
    if is_no_folder(name):
        return f"The reward model {name!r} is not a folder."
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        return f"The reward model {name!r} cannot be read: {error}"
    classes = config.architectures or []
    if getattr(config, "auto_map", None) or not classes or classes[0].endswith("ForSequenceClassification"):
        return None
    return f"The reward model {name!r} is a {classes[0]}, whose scores would come from a random head. {_WITH_HEAD}"


def _count(number: int) -> str:
    return "is 1 reward function" if number == 1 else f"are {number} reward functions"


def problems_of_arguments(
    policy: Any, *, model, args, train_dataset, eval_dataset, peft_config, optimizers=(None, None), **others
) -> Iterator[str]:
    """
    Yield all problems of the trainer's arguments that are known before a model is loaded or an engine started, with
    this [`~trl_qarl.trainer.policy.Policy`], and last the one that lowers our default of `steps_per_generation` in
    `args` ([`fit_generation_batch`]). Of a model that is yet to be loaded, its layers are judged on the meta device.
    """
    yield from args.problems()
    yield from _problems_of_output(args, model)
    if problem_of_model := _problem_of_model(model):
        yield problem_of_model
    has_own_adapter = is_peft_model(model) or is_adapter_folder(model)
    has_adapter = has_own_adapter or peft_config is not None
    yield from problems_of_options(args, has_adapter)
    yield from problems_of_start(model, has_adapter)
    of_adapter = [*_problems_of_adapters(args, model, peft_config, has_own_adapter)]
    yield from of_adapter
    yield from _problems_of_callables(others)
    if others.get("rollout_func") is not None and not args.quantize_learner and not args.use_vllm:
        yield (
            "`rollout_func` was given with quantize_learner=False and use_vllm=False: its completions would come from the "
            "learner's high-precision forward. Use `use_vllm=True`, or leave `rollout_func` out."
        )
    environment_factory, quantization_config = others.get("environment_factory"), others.get("quantization_config")
    if quantization_config is None:
        loaded = getattr(getattr(model, "config", None), "quantization_config", None)
        quantization_config = loaded if is_nf4(loaded) else None
    yield from problems_of_quantized_base(args, quantization_config, has_adapter)
    rewards, evaluates = others.get("reward_funcs") or [], args.eval_strategy != "no" or args.eval_on_start
    yield from problems_of_content(
        model, train_dataset, eval_dataset, rewards, others.get("processing_class"), environment_factory, evaluates
    )
    if evaluates and eval_dataset is None:
        yield "`eval_strategy` or `eval_on_start` asks for an evaluation, and there is no `eval_dataset`. Give one, or remove them."
    rewards = rewards if isinstance(rewards, list) else [rewards]
    num_rewards, tokenizers = len(rewards), others.get("reward_processing_classes")
    tokenizers = [tokenizers] if tokenizers is not None and not isinstance(tokenizers, list) else tokenizers
    if tokenizers is not None and len(tokenizers) != num_rewards:
        yield (
            f"`reward_processing_classes` has {len(tokenizers)} elements, and there {_count(num_rewards)}. Give one for each, `None` for "
            "a function."
        )
        tokenizers = None
    for reward, tokenizer in zip(rewards, tokenizers or [None] * num_rewards, strict=True):
        yield from _problems_of_reward(reward, tokenizer)
    if args.reward_weights is not None and len(args.reward_weights) != num_rewards:
        yield (
            f"reward_weights={args.reward_weights!r} has {len(args.reward_weights)} numbers, and there {_count(num_rewards)}. Give "
            "one for each."
        )
    if args.use_vllm and environment_factory is not None and has_pictures(train_dataset, eval_dataset):
        yield "`environment_factory` was given with a dataset of pictures, which is untested. Use one of the two."
    if args.rollout_ahead:
        yield from _problems_of_ahead(args, train_dataset, others)
    if args.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode and args.use_cpu:
        yield "vllm_enable_sleep_mode=True with use_cpu=True: vLLM sleeps on GPUs only. Remove `vllm_enable_sleep_mode`."
    launch = Launch.of_arguments(args)
    state = args.distributed_state
    on_cpu = state is not None and state.device.type == "cpu"
    # With a GPU only accelerate knows.
    if on_cpu and state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        yield from problems_of_ignored_sharding(Launch(), state.device.type, state.num_processes)
    yield from problems_of_launch(launch, args, has_adapter, is_nf4(quantization_config))
    config, given = None if problem_of_model else getattr(model, "config", None), args.model_init_kwargs or {}
    if problem_of_model:
        pass
    elif isinstance(model, nn.Module):
        if peft_config is None:
            yield from policy.problems(model)
    elif not has_own_adapter:
        try:
            config = _config_of(model, args)
        except (OSError, ValueError) as error:
            yield f"The model {model!r} cannot be read: {error}"
        if not has_adapter:
            # The command line adds `dtype` after the configuration has been checked.
            yield from low_precision_masters(args, given.get("dtype", given.get("torch_dtype")))
        if not of_adapter:
            yield from _problems_of_layers(policy, config, args, peft_config)
    elif (base := _base_of(model)) and is_no_folder(base):
        yield f"The base {base!r} of the adapter {model!r} is not a folder. Correct it in the adapter's configuration."
    optimizer = optimizers[0] if _is_pair(optimizers) else None
    yield from check_optimizer(args) if optimizer is None else _problems_of_optimizer(model, optimizer, peft_config)
    if not _is_pair(optimizers):
        yield f"`optimizers` is of type {type(optimizers).__name__}. Give a pair of an optimizer and a schedule, either of which may be `None`."
    yield from problems_before_loading(args, model, config, peft_config, optimizer, launch)
    yield from fit_generation_batch(args, train_dataset)


def _problems_of_callables(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each argument that is no list of callbacks, no list of tools, or cannot be called."""
    if (callbacks := given.get("callbacks")) is not None and not (
        isinstance(callbacks, list) and all(hasattr(each, "on_train_begin") for each in callbacks)
    ):
        yield f"`callbacks` is {callbacks!r}. Give a list of `TrainerCallback`s."
    if (tools := given.get("tools")) and not (isinstance(tools, list) and all(map(callable, tools))):
        yield f"`tools` is {tools!r}. Give a list of functions."
    for name in ("rollout_func", "environment_factory"):
        value = given.get(name)
        factories = value.values() if isinstance(value, dict) and name == "environment_factory" else [value]
        if value is not None and not all(map(callable, factories)):
            yield f"`{name}` is {value!r}, which cannot be called. Give a function, or a class."
        elif value is not None and name == "rollout_func" and (error := _error_of_call(value, "prompts", "trainer")):
            yield f"`rollout_func` cannot be called: {error}. It gets the prompts and the trainer."


def _is_pair(optimizers: Any) -> bool:
    return isinstance(optimizers, tuple | list) and len(optimizers) == 2


def _problems_of_optimizer(model: Any, optimizer: Any, peft_config: Any) -> Iterator[str]:
    """Yield the problem of an optimizer of the user that would update nothing of the policy."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield f"`optimizers` has {optimizer!r}, which is no optimizer. Make one with the parameters of the model, or choose `optim`."
    elif not isinstance(model, nn.Module) or peft_config is not None:
        what = "is yet to be loaded" if peft_config is None else "is yet to get the adapter of `peft_config`"
        yield (
            f"`optimizers` has an optimizer, and the model {what}: it would update other parameters. Give the loaded model, with its "
            "adapter, or choose `optim`."
        )
    elif not {id(p) for group in optimizer.param_groups for p in group["params"]} & {*map(id, model.parameters())}:
        yield "`optimizers` has an optimizer of another model's parameters. Make it with those of the model that is given."


def _problems_of_adapters(args: Any, model: Any, peft_config: Any, has_own_adapter: bool) -> Iterator[str]:
    served = {"is_served": args.use_vllm and args.lora_mode == "adapter", "is_merged": args.lora_mode == "merged"}
    if has_own_adapter and peft_config is not None:
        yield "`peft_config` was given with a model that has an adapter already. Leave one of them out."
    elif is_adapter_folder(model):
        from peft import PeftConfig

        yield from problems_of_adapter(PeftConfig.from_pretrained(str(model)), **served)
    elif has_own_adapter:
        for config in model.peft_config.values():
            yield from problems_of_adapter(config, **served)
    elif peft_config is not None:
        yield from problems_of_adapter(peft_config, **served)


def problems_of_content(
    model: Any,
    train_dataset: Any,
    eval_dataset: Any,
    reward_funcs: Any = None,
    processing_class: Any = None,
    environment_factory: Any = None,
    is_evaluated: bool = True,
) -> Iterator[str]:
    """Yield problems of datasets, of reward functions with their columns, and of the model's tokenizer, which do not
    depend on a configuration. An `eval_dataset` that a training does not read may have any columns."""
    yield from problems_of_dataset(train_dataset)
    # An environment may supply the prompts.
    if environment_factory is None:
        yield from _problems_of_columns(train_dataset, reward_funcs, "training")
        if is_evaluated:
            yield from problems_of_evaluation(eval_dataset, reward_funcs, _columns_of(train_dataset))
        for name, data in (("training", train_dataset), ("evaluation", eval_dataset)):
            yield from problems_of_prompts(data, name)
    yield from problems_of_tokenizer(model, processing_class)
    yield from _problems_of_template(model, processing_class, train_dataset, eval_dataset)
    if videos := _columns_among({"video", "videos"}, (train_dataset, eval_dataset)):
        yield (
            f"The dataset has a column {min(videos)!r}: videos are not supported, here or in TRL's trainer. Remove it, or "
            "give frames as pictures in a column 'images'."
        )


def problems_of_evaluation(dataset: Any, reward_funcs: Any, known: Sequence[str] | None = None) -> Iterator[str]:
    """Yield problems of the columns of a dataset, or of several by name, that will be evaluated; none of columns that
    are `known`, because they are those of the training dataset."""
    for data in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if isinstance(data, str):
            yield f"`eval_dataset` is the text {data!r}. Give a dataset, or a dictionary of datasets by name."
        elif _columns_of(data) != known:
            yield from _problems_of_columns(data, reward_funcs, "evaluation")


def _columns_of(data: Any) -> list[str] | None:
    """Return the columns of a dataset's rows, `None` if only its rows tell: of a stream, or with a transform of the
    user's own."""
    is_known = not isinstance(data, dict) and not (isinstance(data, Dataset) and data.format["type"] == "custom")
    return getattr(data, "column_names", None) if is_known else None


def _problems_of_columns(data: Any, reward_funcs: Any, name: str) -> Iterator[str]:
    if (columns := _columns_of(data)) is not None:
        if "prompt" not in columns:
            yield f"The {name} dataset needs a `prompt` column, got {columns}. Rename the column that holds it."
        yield from _problems_of_calls(reward_funcs, columns, name)


def _problems_of_calls(reward_funcs: Any, columns: Iterable[str], name_of_data: str) -> Iterator[str]:
    """Yield a problem for each reward function that does not take the arguments that TRL gives: its own, and one for
    each column of the dataset."""
    if taken := sorted({"prompts", "completions"}.intersection(columns)):
        yield f"The {name_of_data} dataset has the columns {taken}, which are names of a reward's own arguments. Rename them."
        return
    own = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    given = dict.fromkeys([*own, *(name for name in columns if name not in ("prompt", "completion"))])
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not callable(function) or isinstance(function, nn.Module):
            continue
        if error := _error_of_call(function, **given):
            name = getattr(function, "__name__", type(function).__name__)
            yield (
                f"The reward function {name!r} cannot be called: {error}. It gets {[*given]}, among them the columns of the "
                f"{name_of_data} dataset, by name. Give the dataset the column that it needs, and the function `**kwargs` for the others."
            )


def _error_of_call(function: Any, /, *args: Any, **kwargs: Any) -> TypeError | None:
    """Return the error of a function that does not take these arguments, as far as its signature tells."""
    with suppress(ValueError):
        # Functions in C have no signature, and a wrapper may add arguments to those of what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return error
    return None


def _problems_of_ahead(args: Any, train_dataset: Any, others: Mapping[str, Any]) -> Iterator[str]:
    said = f"rollout_ahead={args.rollout_ahead} is unsupported with"
    for name in ("tools", "environment_factory", "rollout_func"):
        if others.get(name):
            yield f"{said} `{name}`: its later turns would get newer weights. Leave out one of them."
    if isinstance(train_dataset, IterableDataset):
        yield f"{said} a streamed dataset: prompts are looked up before their turn. Load it without streaming."
    if pictures := _columns_among(_PICTURE_COLUMNS, [train_dataset]):
        yield f"{said} pictures, and the dataset has a column {min(pictures)!r}. Leave out one of them."


def _config_of(model: str, args: Any) -> Any:
    given = args.model_init_kwargs or {}
    names = ("revision", "trust_remote_code", "cache_dir", "token", "subfolder")
    return AutoConfig.from_pretrained(model, **{name: given[name] for name in names if given.get(name)})


def _problems_of_layers(policy: Any, config: Any, args: Any, peft_config: Any) -> Iterator[str]:
    """Yield problems of a model with this `config` that is yet to be loaded, and of the adapter that it will get, as
    far as they are known from its layers."""
    if config is None:
        return
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if cls is not None and (problem := _problem_of_class(cls.__name__, cls, config)):
        yield problem
        return
    if method_of(getattr(config, "quantization_config", None)) == "mxfp4" and args.use_vllm and not args.is_quantized:
        yield (
            f"scheme={args.scheme!r} with a checkpoint in MXFP4: vLLM would make its experts in MXFP4 too. Use scheme='w4a16', or save the "
            "model in high precision (`Mxfp4Config(dequantize=True)`) and start from that."
        )
    if is_low_bit(getattr(config, "quantization_config", None)):
        # Its tensors tell which layers are in low bits.
        return
    model, given = None, args.model_init_kwargs or {}
    attention = given.get("attn_implementation")
    try:
        model = skeleton(config, bool(given.get("trust_remote_code")), attention)
    except Exception as error:
        # Of other arguments loading the model gives the reason.
        if attention is not None and isinstance(error, ValueError | ImportError):
            yield f"attn_implementation={attention!r}: {error}"
    if model is None or type(model).__name__ not in (config.architectures or ()):
        return
    if peft_config is not None:
        from peft import get_peft_model

        try:
            model = get_peft_model(model, deepcopy(peft_config))
        except (ValueError, TypeError, re.error) as error:
            is_text = isinstance(getattr(peft_config, "target_modules", None), str)
            hint = " A single text is an expression over whole names, such as '.*q_proj'." if is_text else ""
            yield f"peft_config: {error}{hint}"
            return
    yield from policy.problems(model)
