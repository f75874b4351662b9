"""Checks of the trainer's arguments, which are not part of a configuration."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..adapters.tensors import is_adapter_folder
from ..checkpoint.layout import problem_of_mixture
from ..objectives.registry import get_objective
from ..quantization.fixed_scales import FixedScale
from ..quantization.inventory import Inventory
from ..quantization.names import base_model, is_adapted, is_peft_model
from ..quantization.storage import num_elements
from ..rollout.pictures import problem_of_class
from .adapter import (
    is_nf4,
    problems_of_adapted_model,
    problems_of_adapter,
    problems_of_options,
    problems_of_quantized_base,
    problems_of_start,
)
from .batches import fit_generation_batch, problems_of_dataset
from .options import low_precision_masters, raise_problems


logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROMPTS = (
    "A prompt is a text, or a list of messages with `role` and `content`, and not empty. Remove such rows: "
    "`dataset.filter(lambda row: row['prompt'])`."
)
_PICTURE_COLUMNS = {"image", "images"}


def check_dropout(model: nn.Module, args: Any) -> None:
    """Switch off dropout that TRL's `disable_dropout` misses, and noise of routers, and require both to be off for
    objectives other than TRL's losses."""
    active = {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        # Attention has no dropout module: it passes an attribute of the layer to a function.
        if ("drop" in key or "jitter" in key or (key == "p" and isinstance(module, _DropoutNd)))
        and isinstance(value, float)
        and value > 0
    }
    switched_off = active
    if not args.disable_dropout:
        if get_objective(args) is None:
            return
        # TRL's examples use dropout in LoRA. A model with its own dropout is rare, and refused below.
        switched_off = {place: rate for place, rate in active.items() if ".lora_dropout." in place[0]}
        for rate in set(switched_off.values()):
            logger.warning(
                "lora_dropout=%g is switched off: under objective=%r rollout, scoring and loss must see the same policy. "
                "Use lora_dropout=0, or another objective.",
                rate,
                args.objective,
            )
    for name, key in switched_off:
        module = model.get_submodule(name)
        if "jitter" in key:
            # Without training the rate adds no noise. It is kept, because PhiMoE also compares scores with it.
            module.eval()
            module.train = partial(_stay_in_evaluation, module)
        else:
            setattr(module, key, 0.0)
    if remaining := active.keys() - switched_off.keys():
        name, key = next(place for place in active if place in remaining)
        raise ValueError(
            f"The model drops activations or adds noise ({len(remaining)} rates above 0, the first is {name}.{key}={active[name, key]}), so rollout, "
            f"scoring and loss would see different policies under objective={args.objective!r}. Set `disable_dropout=True`."
        )


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


def check_positions(model: nn.Module, args: Any) -> None:
    """Raise `ValueError` for an engine that computes positions unlike the learner: with LongRoPE (such as Phi-3) an
    engine chooses factors for all sequences by its context, the learner for each batch by its longest sequence. From
    now on the learner refuses sequences that would change the factors of others."""
    inner = base_model(model)
    layers = [
        m for n, m in inner.named_modules() if n.endswith("rotary_emb") and getattr(m, "rope_type", "") == "longrope"
    ]
    if not layers:
        return
    limit = layers[0].config.rope_parameters["original_max_position_embeddings"]
    for layer in layers:
        layer.register_forward_pre_hook(partial(_check_longest, limit), with_kwargs=True)
    if args.use_vllm and (args.vllm_max_model_length is None or args.vllm_max_model_length > limit):
        raise ValueError(
            f"vllm_max_model_length={args.vllm_max_model_length} with LongRoPE: a context of more than {limit} tokens "
            "(original_max_position_embeddings) gives every sequence of the engine the factors of long ones, and the learner scores "
            f"short ones with those of short ones. Set vllm_max_model_length={limit}, and start a server with --max-model-len {limit}."
        )


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
    # A model that will get an adapter will be frozen.
    is_trained = is_adapted(model) or not has_adapter
    dtypes = {p.dtype for p in model.parameters() if is_trained and p.requires_grad and p.is_floating_point()}
    yield from low_precision_masters(args, min(dtypes, key=lambda dtype: dtype.itemsize, default=None))


def problems_of_fixed_scales(scales: Mapping[str, FixedScale], args: Any) -> Iterator[str]:
    """Yield a problem if the run's group size differs from that of the checkpoint with whose scales it starts."""
    sizes = {fixed.group_size for fixed in scales.values() if fixed.group_size is not None}
    if args.group_size is not None and sizes - {args.group_size}:
        yield (
            f"group_size={args.group_size} was given, and the checkpoint has groups of {', '.join(map(str, sorted(sizes)))}, which "
            "training keeps. Remove it."
        )


def problems_of_experts(model: nn.Module, args: Any, skipped: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of the experts of a prepared mixture; `skipped` has the reasons why layers stay in high
    precision, by name."""
    inventory = Inventory.of(model)
    if args.use_vllm and (problem := problem_of_mixture(inventory)):
        yield f"use_vllm=True: {problem}"
    experts = inventory.stacked_experts
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


def has_pictures(*datasets: Any) -> bool:
    """Return whether a dataset, or one of several by name, has a column from which TRL reads pictures."""
    return bool(_columns_among(_PICTURE_COLUMNS, datasets))


def _columns_among(names: set[str], datasets: Iterable[Any]) -> set[str]:
    splits = [split for data in datasets for split in (data.values() if isinstance(data, dict) else [data])]
    return names & {column for split in splits for column in getattr(split, "column_names", None) or ()}


def problems_of_pictures(model: nn.Module, args: Any) -> Iterator[str]:
    """Yield problems of rollouts with pictures, for a prepared `model`."""
    if not args.use_vllm:
        return
    if problem := problem_of_class(model):
        yield problem
    if args.numerics in ("engine", "exact"):
        yield (
            f"numerics={args.numerics!r} with pictures and use_vllm=True is not supported: operations of vision towers, and positions in "
            "several dimensions, may differ from the engine's bits. Remove it; log-probs of learner and engine then differ by rounding."
        )


def _count(number: int) -> str:
    return "is 1 reward function" if number == 1 else f"are {number} reward functions"


def problems_of_prompts(dataset: Any, name: str) -> Iterator[str]:
    """Yield a problem for the first row of a dataset whose prompt is neither text nor messages. Streams and formats of
    the user's own are not read."""
    for data in dataset.values() if isinstance(dataset, dict) else [dataset]:
        if not isinstance(data, Dataset) or "prompt" not in data.column_names or data.format["type"] is not None:
            continue
        for row, prompt in enumerate(data.select_columns("prompt")["prompt"]):
            if not _is_prompt(prompt):
                yield f"Row {row} of the {name} dataset has the prompt {prompt!r}. {_PROMPTS}"
                break


def check_prompts(prompts: Iterable[Any]) -> None:
    """Raise `ValueError` for a prompt of a batch that is neither text nor messages, as a stream may have."""
    for place, prompt in enumerate(prompts):
        if not _is_prompt(prompt):
            raise ValueError(f"Row {place} of a batch has the prompt {prompt!r}. {_PROMPTS}")


def _is_prompt(prompt: Any) -> bool:
    return (isinstance(prompt, str) or _are_messages(prompt)) and len(prompt) > 0


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(each, dict) and "role" in each for each in prompt)


def problems_of_tokenizer(model: Any, processing_class: Any) -> Iterator[str]:
    """Yield a problem if no tokenizer was given and the model's folder has none: transformers makes one without a
    vocabulary."""
    if processing_class is not None or not isinstance(model, str) or not Path(model).is_dir():
        return
    if not any((Path(model) / file).is_file() for file in _TOKENIZER_FILES) and not is_adapter_folder(model):
        yield (
            f"{model} has no tokenizer ({', '.join(_TOKENIZER_FILES)}). Save it there with `tokenizer.save_pretrained`, or give it "
            "as `processing_class`."
        )


def check_arguments(*, model, args, train_dataset, eval_dataset, peft_config, optimizers, **others) -> None:
    """Raise one `ValueError` with all problems of the trainer's arguments, before anything is loaded."""
    has_own_adapter = is_peft_model(model) or is_adapter_folder(model)
    has_adapter = has_own_adapter or peft_config is not None
    problems = [*problems_of_options(args, has_adapter), *problems_of_start(model, has_adapter)]
    served = {"is_served": args.use_vllm and args.lora_mode == "adapter", "is_merged": args.lora_mode == "merged"}
    if has_own_adapter and peft_config is not None:
        problems.append("`peft_config` was given with a model that has an adapter already. Leave one of them out.")
    elif is_adapter_folder(model):
        from peft import PeftConfig

        problems += problems_of_adapter(PeftConfig.from_pretrained(str(model)), **served)
    elif has_own_adapter:
        for config in model.peft_config.values():
            problems += problems_of_adapter(config, **served)
        problems += problems_of_adapted_model(model)
    elif has_adapter:
        problems += problems_of_adapter(peft_config, **served)
    if others["rollout_func"] is not None and not args.quantize_learner and not args.use_vllm:
        problems.append(
            "`rollout_func` was given with quantize_learner=False and use_vllm=False: its completions would come from the "
            "learner's high-precision forward. Use `use_vllm=True`, or leave `rollout_func` out."
        )
    environment_factory, quantization_config = others["environment_factory"], others["quantization_config"]
    if quantization_config is None:
        loaded = getattr(getattr(model, "config", None), "quantization_config", None)
        quantization_config = loaded if is_nf4(loaded) else None
    problems += problems_of_quantized_base(args, quantization_config, has_adapter)
    problems += problems_of_dataset(train_dataset)
    columns = None if isinstance(train_dataset, dict) else getattr(train_dataset, "column_names", None)
    # An environment may supply the prompts.
    if columns is not None and "prompt" not in columns and environment_factory is None:
        problems.append(
            f"The training dataset needs a `prompt` column, got {columns}. Rename the column that holds it."
        )
    rewards = others["reward_funcs"] or []
    num_rewards = len(rewards) if isinstance(rewards, list | tuple) else 1
    if args.reward_weights is not None and len(args.reward_weights) != num_rewards:
        problems.append(
            f"reward_weights={args.reward_weights!r} has {len(args.reward_weights)} numbers, and there {_count(num_rewards)}. Give "
            "one for each."
        )
    datasets = train_dataset, eval_dataset
    if environment_factory is None:
        for name, data in (("training", train_dataset), ("evaluation", eval_dataset)):
            problems += problems_of_prompts(data, name)
    problems += problems_of_tokenizer(model, others["processing_class"])
    if videos := _columns_among({"video", "videos"}, datasets):
        problems.append(
            f"The dataset has a column {min(videos)!r}: videos are not supported, here or in TRL's trainer. Remove it, or "
            "give frames as pictures in a column 'images'."
        )
    if args.use_vllm and environment_factory is not None and has_pictures(*datasets):
        problems.append(
            "`environment_factory` was given with a dataset of pictures, which is untested. Use one of the two."
        )
    if args.rollout_ahead:
        said = f"rollout_ahead={args.rollout_ahead} is unsupported with"
        for name in ("tools", "environment_factory", "rollout_func"):
            if others[name]:
                problems.append(f"{said} `{name}`: its later turns would get newer weights. Leave out one of them.")
        if isinstance(train_dataset, IterableDataset):
            problems.append(
                f"{said} a streamed dataset: prompts are looked up before their turn. Load it without streaming."
            )
        if pictures := _columns_among(_PICTURE_COLUMNS, [train_dataset]):
            problems.append(f"{said} pictures, and the dataset has a column {min(pictures)!r}. Leave out one of them.")
    if isinstance(model, nn.Module):
        problems += problems_of_masters(model, args, has_adapter)
    elif not has_adapter:
        # The command line adds `dtype` after the configuration has been checked.
        problems += low_precision_masters(args, (args.model_init_kwargs or {}).get("dtype"))
    raise_problems([*problems, *fit_generation_batch(args, train_dataset)])
    if optimizers[0] is not None and args.optim == "muon":
        logger.info("`optimizers` was given, so `optim='muon'` is not used.")
