"""Checks of the trainer's arguments, which are not part of a configuration."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..adapters.tensors import is_adapter_folder
from ..checkpoint.layout import problem_of_mixture
from ..checkpoint.uploads import exports_policy
from ..objectives.registry import get_objective
from ..quantization.inventory import Inventory
from ..quantization.names import is_adapted, is_peft_model
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
from .options import low_precision_masters, raise_problems


logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROMPTS = (
    "A prompt is a text, or a list of messages with `role` and `content`, and not empty. Remove such rows: "
    "`dataset.filter(lambda row: row['prompt'])`."
)
_PICTURE_COLUMNS = {"image", "images"}


def check_dropout(model: nn.Module, args: Any) -> None:
    """Switch off dropout that TRL's `disable_dropout` misses, and require it to be off for objectives that need one
    policy throughout."""
    active = {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        # Attention has no dropout module: it passes an attribute of the layer to a function.
        if ("drop" in key or (key == "p" and isinstance(module, _DropoutNd)))
        and isinstance(value, float)
        and value > 0
    }
    switched_off = active
    if not args.disable_dropout:
        if not get_objective(args).needs_one_policy:
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
        setattr(model.get_submodule(name), key, 0.0)
    if remaining := active.keys() - switched_off.keys():
        name, key = next(place for place in active if place in remaining)
        raise ValueError(
            f"The model drops activations ({len(remaining)} rates above 0, the first is {name}.{key}={active[name, key]}), so rollout, "
            f"scoring and loss would see different policies under objective={args.objective!r}. Set `disable_dropout=True`."
        )


def problems_of_masters(model: nn.Module, args: Any, has_adapter: bool) -> Iterator[str]:
    """Yield a problem if the masters' dtype rounds their updates away."""
    # A model that will get an adapter will be frozen.
    is_trained = is_adapted(model) or not has_adapter
    dtypes = {p.dtype for p in model.parameters() if is_trained and p.requires_grad and p.is_floating_point()}
    yield from low_precision_masters(args, min(dtypes, key=lambda dtype: dtype.itemsize, default=None))


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
    if args.push_to_hub and exports_policy(args.hub_export):
        yield (
            f"push_to_hub=True with hub_export={args.hub_export!r}: with experts in high precision ({reason}) there is no low-bit "
            "export. Use hub_export='master'."
        )
    if args.use_vllm or not args.allow_high_precision_experts:
        share = num_elements(experts.values()) / num_elements(model.parameters())
        yield (
            f"{type(model).__name__} is a mixture of experts, and experts with {share:.0%} of the weights stay in high precision under "
            f"scheme={args.scheme!r} ({reason}). It has no low-bit export, which vLLM would need. Use scheme='bf16'; without "
            "vLLM, `allow_high_precision_experts=True` quantizes only the other layers."
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
    for name, value in (("numerics", "engine"), ("exact", "require")):
        if getattr(args, name) == value:
            yield (
                f"{name}={value!r} with pictures and use_vllm=True is not supported: operations of vision towers, and positions in several "
                "dimensions, may differ from the engine's bits. Remove it; log-probs of learner and engine then differ by rounding."
            )


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
    is_served = args.use_vllm and args.lora_mode == "adapter"
    if has_own_adapter and peft_config is not None:
        problems.append("`peft_config` was given with a model that has an adapter already. Leave one of them out.")
    elif is_adapter_folder(model):
        from peft import PeftConfig

        problems += problems_of_adapter(PeftConfig.from_pretrained(str(model)), is_served)
    elif has_own_adapter:
        for config in model.peft_config.values():
            problems += problems_of_adapter(config, is_served)
        problems += problems_of_adapted_model(model)
    elif has_adapter:
        problems += problems_of_adapter(peft_config, is_served)
    if args.hub_export == "adapter" and not has_adapter:
        problems.append(
            "hub_export='adapter' pushes a PEFT adapter, and none is trained. Use 'low-bit', 'master' or 'both', or give "
            "`peft_config`."
        )
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
    columns = getattr(train_dataset, "column_names", None)
    # An environment may supply the prompts.
    if columns is not None and "prompt" not in columns and environment_factory is None:
        problems.append(
            f"The training dataset needs a `prompt` column, got {columns}. Rename the column that holds it."
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
    raise_problems(problems)
    if optimizers[0] is not None and args.optim == "muon":
        logger.info("`optimizers` was given, so `optim='muon'` is not used.")
