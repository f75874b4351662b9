"""Checks of the policy's model, and changes to it that keep its numbers those of the engine."""

import inspect
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ..bitwise.availability import dropout_rates
from ..checkpoint.export import keep_generation_config, keep_ties
from ..checkpoint.load import keep_masters_precise
from ..engines.pictures import problem_of_class
from ..models import family_of
from ..objectives.registry import get_objective
from ..quantization.fixed_scales import fixed_scales
from ..quantization.inventory import Inventory
from ..quantization.names import base_model, has_tower, is_peft_model
from ..quantization.schemes import QuantScheme
from ..quantization.storage import num_elements
from .adapter import problems_of_adapted_model
from .architectures import problem_of_context
from .configuration import low_precision_masters


logger = logging.getLogger(__name__)


def problem_of_kind(name: str, model: Any, config: Any) -> str | None:
    """Return why a class of transformers, or a model, with this `config` is no causal language model, or `None`."""
    if not getattr(model, "can_generate", lambda: False)():
        return f"The model is a {name}, which generates no text. Give a causal language model."
    if getattr(config, "is_encoder_decoder", False):
        return f"The model is a {name}, whose decoder reads an encoder's output. Give a causal language model."
    return None


def problems_of_model(model: nn.Module, args: Any, has_pictures: bool) -> Iterator[str]:
    """Yield the problems of a model, with its adapter, that the schemes of its layers do not decide. Of one on the
    meta device, dtypes are not judged."""
    base, has_adapter = base_model(model), is_peft_model(model)
    if base.device.type != "meta":
        yield from _problems_of_masters(model, args, has_adapter)
    if has_adapter:
        yield from problems_of_adapted_model(model)
    yield from problems_of_body(base)
    yield from _problems_of_checkpointing(base, args)
    yield from _problems_of_dropout(model, args)
    yield from problems_of_positions(base, args)
    if has_pictures:
        yield from problems_of_pictures(base, args)
    yield from _problems_of_fixed_scales(base, args)


def _problems_of_dropout(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield a problem of dropout, or of noise in routers, that stays on although rollout, scoring and loss must see
    one policy: for objectives other than TRL's losses, and for adapters inside low-bit weights."""
    _, remaining = _dropout(model, args)
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


def correct_policy(model: nn.Module, args: Any) -> None:
    """Correct, in place, a policy with its adapter: its dropout, its class, and what its checkpoints would hold."""
    base = base_model(model)
    _switch_off_dropout(model, args)
    correct_model(base, args.use_vllm)
    keep_generation_config(base)
    keep_ties(base)
    # It may have been loaded by the user.
    keep_masters_precise(base)


def _switch_off_dropout(model: nn.Module, args: Any) -> None:
    """Switch off dropout that TRL's `disable_dropout` misses, noise in routers, and LoRA's dropout for objectives
    other than TRL's losses."""
    off, _ = _dropout(model, args)
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


def _dropout(model: nn.Module, args: Any) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Return the rates above 0, by module and attribute: those to switch off, and those that remain."""
    off, remaining = {}, {}
    is_of_trl = get_objective(args) is None
    for name, module in model.named_modules():
        for key, rate in dropout_rates(module).items():
            # TRL's examples use dropout in LoRA. A model with its own dropout is rare, and refused.
            is_off = args.disable_dropout or (not is_of_trl and ".lora_dropout." in name)
            (off if is_off else remaining)[name, key] = rate
    return off, remaining


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Fields by which classes of text change their logits, as TRL's loss and engines do."""


def problems_of_body(model: Any) -> Iterator[str]:
    """Yield a problem if TRL's loss does not find the hidden states of a model: it asks the module that the class
    names (`base_model_prefix`), which Llama 4's classes do not have (5.17); if transformers changes a model that it
    loads; or if a class with a tower leaves out what the class of its text does with logits."""
    if has_tower(model):
        text, source = model.config.get_text_config(), inspect.getsource(type(model).forward)
        values = {name: getattr(text, name, None) for name in _OF_LOGITS if name not in source}
        for name in [name for name, value in values.items() if value not in (None, 1.0)]:
            yield (
                f"{type(model).__name__} leaves out {name}={values[name]} of its text in transformers (5.17), which TRL's loss and vLLM apply: "
                "they would compute another policy. Train a class of text, or of pictures whose text has no such field."
            )
    loaded = nn.Embedding.from_pretrained(torch.ones(2, 1), padding_idx=0)
    loaded.weight._is_hf_initialized = True  # pyrefly: ignore[missing-attribute]
    # xLSTM's asks for other layers of the model.
    with suppress(AttributeError), torch.no_grad():
        model._initialize_weights(loaded, model.is_custom_code())
    if loaded.weight[0].item() == 0:
        yield (
            f"{type(model).__name__}: whenever transformers loads it, `_init_weights` of its class sets the embedding of the padding token to 0 "
            "(5.17). If its output head is tied, a trained policy is another one after loading. Train another model."
        )
    if getattr(model, "base_model", None) is model and not hasattr(model, "model"):
        yield (
            f"{type(model).__name__} has no module {model.base_model_prefix!r}, which TRL's loss asks for hidden states. Train the class of "
            "its text, such as Llama4ForCausalLM."
        )


def correct_model(model: Any, use_vllm: bool) -> None:
    """Correct, in place, what transformers' classes do otherwise than TRL's loss expects, or than an engine does
    (5.17). The reference needs the same corrections as the policy."""
    if getattr(model, "base_model", None) is model:
        # Llama 4's class of text names a body that it does not have.
        model.base_model_prefix = "model"
    config = getattr(model, "config", None)
    cap = config and getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap and config._attn_implementation == "sdpa":
        # transformers' default, PyTorch's fused attention, drops the cap of Gemma 2 without a word; engines apply it.
        logger.info("attn_implementation='eager': 'sdpa' would drop attn_logit_softcapping=%g of this model.", cap)
        model.set_attn_implementation("eager")
    for module in model.modules():
        source = sys.modules.get(type(module).__module__)
        for fused in ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined"):
            if hasattr(source, fused):
                # In training, transformers' fused kernels (`mamba_ssm`) read the weight of `out_proj`, which is its
                # masters, and do not call the layer. Without the kernel these functions return `None` too.
                setattr(source, fused, lambda *args, **kwargs: None)
        if use_vllm and hasattr(module, "time_step_limit"):
            # transformers takes Nemotron-H's `time_step_min`; vLLM has no limit (`mamba_mixer2.py`).
            module.time_step_limit = (0.0, math.inf)
    for layer in _layers_with_long_rope(model):
        # A longer sequence would change the factors of others in its batch.
        layer.register_forward_pre_hook(partial(_check_longest, _longest_of_short(model)), with_kwargs=True)


def problems_of_positions(model: Any, args: Any) -> Iterator[str]:
    """Yield a problem of an engine that would compute positions unlike the learner: with LongRoPE (such as Phi-3) an
    engine chooses factors for all sequences by its context, the learner for each batch by its longest sequence; and a
    sliding window that vLLM and transformers count differently may not be left."""
    if not args.use_vllm:
        return
    name, length = type(model).__name__, args.vllm_max_model_length
    if family_of(name).has_longer_window:
        window = model.config.get_text_config().sliding_window
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
    if args.starts_engine and (problem := problem_of_context(model, "vllm_max_model_length", length)):
        yield problem


def warn_of_length(
    longest: int, prompts: Iterable[Sequence[int]], model: nn.Module, room: int, context: int | None = None
) -> int:
    """Return the number of tokens of the longest of `prompts`, or `longest` if that is more. The first time that
    completions of `room` tokens may leave the context of the model, or that of an engine, is logged: an engine cuts
    them, and refuses a prompt that leaves no room; `generate` does neither."""
    now = max([longest, *map(len, prompts)])
    contexts = {
        "the model's context of %d tokens, beyond which it was not trained. Leave": getattr(
            base_model(model).config.get_text_config(), "max_position_embeddings", None
        )
    }
    said = "the engine's context of %d tokens, where it cuts the completion. Raise `vllm_max_model_length`, or `--max-model-len` of a server, leave"
    contexts[said] = context
    for said, limit in contexts.items():
        if limit and (longest == 0 or longest + room <= limit) and now + room > limit:
            logger.warning(
                f"A prompt of %d tokens and max_completion_length=%d are more than {said} such prompts out, or lower max_completion_length.",
                *(now, room, limit),
            )
    return now


def _layers_with_long_rope(model: nn.Module) -> list[nn.Module]:
    named = model.named_modules()
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
    # Without tokens that a class forbids, such as Chameleon's of pictures, by the smallest number or infinity.
    largest = torch.where(logits > torch.finfo(logits.dtype).min / 2, logits.abs(), 0.0).max().item()
    allowed = 4 * torch.finfo(dtype).eps * largest / temperature + 1e-3
    if (difference := (fused - log_probs).abs().max().item()) > allowed:
        raise ValueError(
            f"The log-probs of TRL's loss differ from those of {type(base_model(model)).__name__}'s logits by {difference:.3g} nats: its "
            "forward changes the output head's logits, and TRL applies only `final_logit_softcapping`, `logit_scale` and their kin of "
            "the configuration, so the loss would be that of another policy than the rollout's. Fold the change into the head's weight."
        )


def _problems_of_masters(model: nn.Module, args: Any, has_adapter: bool) -> Iterator[str]:
    """Yield a problem if the masters' dtype rounds their updates away."""
    if has_adapter and getattr(base_model(model), "is_loaded_in_4bit", False):
        # Only the adapter is trained, and kept in float32.
        return
    if not has_adapter and not any(p.requires_grad for p in model.parameters()):
        yield "Nothing of the model is trainable: all its parameters have requires_grad=False. Call `model.requires_grad_()`."
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    yield from low_precision_masters(args, min(dtypes, key=lambda dtype: dtype.itemsize, default=None))


def _problems_of_fixed_scales(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield a problem if the run's group size differs from that of the checkpoint with whose scales it starts."""
    sizes = {fixed.group_size for fixed in fixed_scales(model).values() if fixed.group_size is not None}
    if args.group_size is not None and sizes - {args.group_size}:
        yield (
            f"group_size={args.group_size} was given, and the checkpoint has groups of {', '.join(map(str, sorted(sizes)))}, which "
            "training keeps. Remove it."
        )


def _problems_of_checkpointing(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield a problem of activations that are recomputed, as in TRL by default, for a class that cannot."""
    if args.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
        yield f"gradient_checkpointing=True: {type(model).__name__} does not support it. Set gradient_checkpointing=False."


def problems_of_experts(
    model: Any, args: Any, schemes: Mapping[str, QuantScheme], skipped: Mapping[str, str]
) -> Iterator[str]:
    """Yield problems of the experts of a mixture whose layers get these `schemes`, by name; `skipped` has the reasons
    why the others stay in high precision."""
    config = model.config.get_text_config()
    coef = args.router_aux_loss_coef
    coef = getattr(config, "router_aux_loss_coef", 0.0) if coef is None else coef
    if coef and hasattr(config, "output_router_logits") and not hasattr(config, "num_experts"):
        yield (
            f"router_aux_loss_coef={coef}: TRL reads `num_experts`, which {type(config).__name__} does not have "
            "(https://github.com/huggingface/trl/issues/5754). Set router_aux_loss_coef=0"
        )
    experts = {
        name: p for name, p in Inventory.of(model).stacked_experts.items() if name.rpartition(".")[0] not in schemes
    }
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
