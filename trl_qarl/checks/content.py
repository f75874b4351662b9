"""Checks of the content of a training: datasets, rewards and the tokenizer."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import trl.rewards
from datasets import Dataset, Image, IterableDataset
from pyarrow import compute
from pyarrow.types import is_struct
from torch import nn
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import add_response_schema, supports_tool_calling
from trl.data_utils import prepare_multimodal_messages

from ..adapters.tensors import base_of, is_adapter_folder
from ..checkpoint.record import check_config, has_tokenizer, problems_of_json
from .batches import problems_of_dataset
from .names import is_no_folder


_PROMPTS = (
    "A prompt is a text, or a list of messages with `role` and `content`, and not empty. Remove such rows: "
    "`dataset.filter(lambda row: row['prompt'])`."
)
_WITH_HEAD = "Give a model with a head for scores (`AutoModelForSequenceClassification`)."
_CLASSIFIES = "ForSequenceClassification"
PICTURE_COLUMNS = {"image", "images"}


def has_pictures(*datasets: Any) -> bool:
    """Return whether a dataset, or one of several by name, has a column from which TRL reads pictures."""
    return bool(columns_among(PICTURE_COLUMNS, datasets))


def _problems_of_pictures(dataset: Any, name_of_data: str) -> Iterator[str]:
    """Yield a problem of each column without pictures, or of the first row whose prompt takes others."""
    features = getattr(dataset, "features", None) or {}
    for name, right in (("image", "Image()"), ("images", "List(Image())")):
        feature = features.get(name, Image())
        found = getattr(feature, "feature", None) if name == "images" and name in features else feature
        if not (getattr(found, "decode", False) or "string" in getattr(found, "dtype", "")):
            yield f"The column {name!r} holds {feature}. Make it pictures: `dataset.cast_column({name!r}, {right})`."
            return
    for row, (prompt, number) in enumerate(zip(_prompts_of(dataset), _numbers_of_pictures(dataset), strict=False)):
        if _is_prompt(prompt) and (problem := _problem_of_number(prompt, number)):
            yield f"Row {row} of the {name_of_data} dataset {problem}"
            return
    if missing := next((path for path in _paths_of_pictures(dataset) if not Path(path).is_file()), None):
        yield f"The {name_of_data} dataset names the picture {missing!r}, which is not a file here. Give its whole path."


def _paths_of_pictures(dataset: Any) -> Iterator[str]:
    """Yield the local paths by which a dataset names pictures, relative ones to the working directory."""
    name = _column_of_pictures(dataset)
    if name is None:
        return
    column = dataset.data.column(name)
    rows = range(len(column)) if dataset._indices is None else dataset._indices.column(0).to_pylist()
    if name == "images":
        ends = [0, *accumulate(length or 0 for length in compute.list_value_length(column).to_pylist())]
        rows = [place for row in rows for place in range(ends[row], ends[row + 1])]
        column = compute.list_flatten(column)
    if is_struct(column.type):
        # Alone, these fields do not copy the bytes of pictures.
        has_bytes = compute.is_valid(compute.struct_field(column, "bytes"))
        column = compute.if_else(has_bytes, None, compute.struct_field(column, "path"))
    texts = column.to_pylist() if "string" in str(column.type) else []
    for text in map(texts.__getitem__, rows if texts else ()):
        # An address, of an archive too, has "://", and base64 has no point.
        if text is not None and "." in text and "://" not in text and not text.startswith("data:"):
            yield text


def _column_of_pictures(dataset: Any) -> str | None:
    """Return the column from which TRL reads pictures, `None` without one or for other data than a `Dataset`."""
    # TRL looks for `images` first.
    return max(columns_among(PICTURE_COLUMNS, [dataset]), default=None) if isinstance(dataset, Dataset) else None


def _numbers_of_pictures(dataset: Any) -> list[int | None]:
    """Return the number of pictures of each row, unread, `None` for a row with `None`; `[]` without a column."""
    name = _column_of_pictures(dataset)
    if name is None:
        return []
    # A format of `datasets` would copy the bytes of the pictures.
    column = dataset.data.column(name)
    if name == "images":
        numbers = compute.list_value_length(column)
    else:
        numbers = compute.if_else(compute.is_valid(column), 1, None)
    return (numbers if dataset._indices is None else numbers.take(dataset._indices.column(0))).to_pylist()


def _problem_of_number(prompt: Any, number: int | None) -> str | None:
    """Return why TRL cannot put a number of pictures into a prompt, or `None`."""
    if number is None:
        return "has None for its pictures. Give a column 'images' of lists, which are empty in rows without pictures."
    if isinstance(prompt, str):
        return (
            "has a picture and a text as its prompt. Give a list of messages, into which TRL puts it."
            if number
            else None
        )
    try:
        prepare_multimodal_messages(prompt, images=[None] * number)
    except (ValueError, LookupError) as error:
        return f"does not take its pictures: {error} A message whose content is a text needs no placeholders."
    return None


def columns_among(names: set[str], datasets: Iterable[Any]) -> set[str]:
    """Return those of the `names` that are columns of one of the `datasets`, or of one of several by name."""
    splits = [split for data in datasets for split in (data.values() if isinstance(data, dict) else [data])]
    return names & {column for split in splits for column in getattr(split, "column_names", None) or ()}


def problems_of_prompts(dataset: Any, name: str) -> Iterator[str]:
    """Yield a problem of a format, or of the first row without a prompt; streams and own formats are not read."""
    for data in dataset.values() if isinstance(dataset, dict) else [dataset]:
        for row, prompt in enumerate(_prompts_of(data)):
            if not _is_prompt(prompt):
                yield f"Row {row} of the {name} dataset has the prompt {prompt!r}. {_PROMPTS}"
                break
        else:
            if (kind := _format_of(data)) and not _holds_prompts(data):
                yield f"The {name} dataset has the format {kind!r}, in which no prompt is a text. Call `.with_format(None)`."


def _format_of(data: Any) -> str | None:
    """Return the format of a dataset or a stream, `None` for Python's objects and for code of the user's own."""
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


def has_texts(data: Any) -> bool:
    """Return whether the prompts of a dataset are texts and no messages."""
    prompts = _prompts_of(data)
    return len(prompts) > 0 and isinstance(prompts[0], str)


def _reads_messages(reward: Any) -> bool:
    return str(getattr(reward, "__module__", "")).startswith("trl.rewards.") and (
        "completions" in inspect.signature(reward).parameters
    )


def check_columns(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ValueError` for a row of a batch without a prompt: only the rows of a stream may tell its columns."""
    for place, row in enumerate(rows):
        if "prompt" not in row:
            raise ValueError(f"Row {place} of a batch has no `prompt`, only {[*row]}. Rename its column.")


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


def problems_of_tokenizer(model: Any, processing_class: Any, name: str = "processing_class") -> Iterator[str]:
    """Yield a problem of a processing class, the argument `name`, that is none, or if none was given and the model's
    folder has no tokenizer: transformers makes one without a vocabulary."""
    if not isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin | None):
        yield f"`{name}` is of type {type(processing_class).__name__}. Give a tokenizer or a processor, or leave it out."
        return
    if processing_class is not None:
        if name == "processing_class" and (problem := problem_of_end(processing_class)):
            yield problem
        return
    model = base_of(model) if is_adapter_folder(model) else model
    if not (isinstance(model, str) and model and Path(model).is_dir()):
        return
    if not has_tokenizer(model):
        yield f"{model} has no tokenizer. Save it there with `tokenizer.save_pretrained`, or give it as `{name}`."
    yield from problems_of_json(model)


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
            token = f"{tokenizer.convert_ids_to_tokens(unknown[0])!r} ({unknown[0]})"
            raise ValueError(
                f"Prompt {place} of a batch has the token {token}, and the model has embeddings of {vocab_size}. Call "
                "`model.resize_token_embeddings(len(tokenizer))`, or give the model's own tokenizer."
            )


def _problems_of_template(model: Any, processing_class: Any, args: Any, tools: Any, *datasets: Any) -> Iterator[str]:
    """Yield a problem if prompts are messages, and the tokenizer, as far as it is found, has no template, or one that
    does not render the first of them, or no calls of `tools`."""
    prompts = [column[0] for column in map(_prompts_of, datasets) if len(column) and isinstance(column[0], list)]
    pictures = columns_among(PICTURE_COLUMNS, datasets)
    tokenizer = _tokenizer_of(model, processing_class, args) if any(prompts) or pictures else None
    if pictures and isinstance(tokenizer, PreTrainedTokenizerBase):
        yield (
            f"The dataset has a column {min(pictures)!r}, and the processing class is a tokenizer, which reads no pictures. "
            "Remove the column, or give the model's processor."
        )
    elif tokenizer is not None and getattr(tokenizer, "chat_template", None) is None:
        yield (
            "The prompts are messages, and the tokenizer has no chat template. Give a `processing_class` with one, or "
            "prompts that are texts."
        )
    elif isinstance(tokenizer, PreTrainedTokenizerBase):
        try:
            options = getattr(args, "chat_template_kwargs", None) or {}
            options = {"tools": tools if isinstance(tools, list) else None, **options}
            for prompt in filter(None, prompts):
                tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
            if tools and not supports_tool_calling(tokenizer):
                raise ValueError("it renders no calls of tools, or not their results")
            if tools and not any(getattr(tokenizer, f"response_{name}", None) for name in ("template", "schema")):
                add_response_schema(copy(tokenizer))
        except Exception as error:
            # Code of a template raises any kind of error.
            said = f"{type(error).__name__}: {error}"
            yield f"The chat template does not fit the first prompt or the tools ({said}). Change these, or the template."


def _tokenizer_of(model: Any, processing_class: Any, args: Any) -> Any:
    """Return the tokenizer or processor that TRL will load, `None` if it is not found."""
    if processing_class is not None:
        return processing_class
    name = base_of(model) if is_adapter_folder(model) else getattr(model, "name_or_path", model)
    with suppress(Exception):
        revision = (args.model_init_kwargs or {}).get("revision")
        return AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
    return None


def problems_of_reward(reward: Any, processing_class: Any) -> Iterator[str]:
    """Yield problems of one of `reward_funcs`, with its tokenizer if it is a model."""
    if isinstance(reward, str):
        if problem := _problem_of_reward_model(reward):
            yield problem
            return
    elif isinstance(reward, nn.Module):
        generates = getattr(reward, "can_generate", lambda: not hasattr(reward, "config"))()
        if generates:
            yield f"The reward model is a {type(reward).__name__}, which has no head for scores. {_WITH_HEAD}"
        elif type(reward).__name__.endswith(_CLASSIFIES) and getattr(reward.config, "num_labels", 1) != 1:
            yield _has_scores_of(reward.config)
    elif not callable(reward):
        yield f"`reward_funcs` has {reward!r} of type {type(reward).__name__}. Give a function, a model or its name."
        return
    yield from problems_of_tokenizer(reward, processing_class, "reward_processing_classes")


def _problem_of_reward_model(name: str) -> str | None:
    """Return why a reward model by name gives no rewards, or `None`."""
    if callable(getattr(trl.rewards, name, None)):
        return f"The reward {name!r} is a text, which names a reward model. Give the function: `from trl.rewards import {name}`."
    if is_no_folder(name):
        return f"The reward model {name!r} is not a folder."
    try:
        check_config(name)
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        return f"The reward model {name!r} cannot be read: {error}"
    classes = config.architectures or []
    if getattr(config, "auto_map", None) or not classes:
        return None
    if classes[0].endswith(_CLASSIFIES):
        # A configuration that says nothing has two labels of this form.
        named = len(config.id2label) > 1 and [*config.id2label.values()] != ["LABEL_0", "LABEL_1"]
        return _has_scores_of(config) if named else None
    return f"The reward model {name!r} is a {classes[0]}, whose scores would come from a random head. {_WITH_HEAD}"


def _has_scores_of(config: Any) -> str:
    return (
        f"The reward model has a score for each of {[*config.id2label.values()]}, and TRL takes the first. Give a function "
        "that calls the model and chooses."
    )


def problems_of_content(
    args: Any,
    model: Any,
    train_dataset: Any,
    eval_dataset: Any,
    reward_funcs: Any = None,
    processing_class: Any = None,
    environment_factory: Any = None,
    tools: Any = None,
) -> Iterator[str]:
    """Yield problems of datasets, of reward functions with their columns, and of the model's tokenizer. `args` may be
    a configuration whose initialization has ended early. An `eval_dataset` that a training does not read may have any
    columns."""
    yield from problems_of_dataset(train_dataset)
    # An environment may supply the prompts.
    if environment_factory is None:
        yield from _problems_of_columns(train_dataset, reward_funcs, "training")
        if evaluates(args):
            yield from problems_of_evaluation(eval_dataset, reward_funcs, _columns_of(train_dataset))
        for name, data in (("training", train_dataset), ("evaluation", eval_dataset)):
            yield from problems_of_prompts(data, name)
        for reward in reward_funcs if isinstance(reward_funcs, list) and has_texts(train_dataset) else []:
            if _reads_messages(reward):
                name = getattr(reward, "__name__", reward)
                yield f"TRL's reward {name!r} reads messages, and the prompts are texts. Give messages, or another reward."
    yield from problems_of_tokenizer(model, processing_class)
    tools = tools or environment_factory
    yield from _problems_of_template(model, processing_class, args, tools, train_dataset, eval_dataset)
    for name, data in (("training", train_dataset), ("evaluation", eval_dataset)):
        yield from _problems_of_pictures(data, name)
    if videos := columns_among({"video", "videos"}, (train_dataset, eval_dataset)):
        yield f"The dataset has a column {min(videos)!r}: videos are unsupported. Remove it, or give frames in 'images'."


def evaluates(config: Any) -> bool:
    """Return whether a training evaluates. `config` may be one whose initialization has ended early."""
    return getattr(config, "eval_strategy", "no") != "no" or getattr(config, "eval_on_start", False)


def problems_of_evaluation(dataset: Any, reward_funcs: Any, known: Sequence[str] | None = None) -> Iterator[str]:
    """Yield problems of the rows and columns of a dataset, or of several by name, that will be evaluated; none of
    columns that are `known`, because they are those of the training dataset."""
    several = dataset if isinstance(dataset, dict) else {None: dataset}
    if not several:
        yield "`eval_dataset` is an empty dictionary, so nothing would be evaluated. Give a dataset, or several by name."
    for name, data in several.items():
        if isinstance(data, str):
            yield f"`eval_dataset` is the text {data!r}. Give a dataset, or a dictionary of datasets by name."
        elif isinstance(data, Dataset) and not len(data):
            which = "" if name is None else f" {name!r}"
            yield f"The evaluation dataset{which} has no rows, so nothing would be evaluated. Give it rows, or leave it out."
        elif _columns_of(data) != known:
            yield from _problems_of_columns(data, reward_funcs, "evaluation")


def _columns_of(data: Any) -> list[str] | None:
    """Return the columns of a dataset's rows, `None` if only its rows tell: a stream, or an own transform."""
    is_known = not isinstance(data, dict) and not (isinstance(data, Dataset) and data.format["type"] == "custom")
    return getattr(data, "column_names", None) if is_known else None


def _problems_of_columns(data: Any, reward_funcs: Any, name: str) -> Iterator[str]:
    if (columns := _columns_of(data)) is not None:
        if "prompt" not in columns:
            yield f"The {name} dataset needs a `prompt` column, got {columns}. Rename the column that holds it."
        yield from _problems_of_calls(reward_funcs, columns, name)


def _problems_of_calls(reward_funcs: Any, columns: Iterable[str], name_of_data: str) -> Iterator[str]:
    """Yield a problem for each reward function that does not take TRL's arguments and the dataset's columns."""
    if taken := sorted({"prompts", "completions", "trainer_state", "log_extra", "log_metric"}.intersection(columns)):
        yield f"The {name_of_data} dataset has the columns {taken}, names of a reward's own arguments. Rename them."
        return
    own = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    given = dict.fromkeys([*own, *(name for name in columns if name not in ("prompt", "completion"))])
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not callable(function) or isinstance(function, nn.Module):
            continue
        if error := error_of_call(function, **given):
            name = getattr(function, "__name__", type(function).__name__)
            yield (
                f"The reward function {name!r} cannot be called: {error}. It gets {[*given]}, among them the columns of the "
                f"{name_of_data} dataset, by name. Add a missing column, and `**kwargs` for those that it does not need."
            )


def error_of_call(function: Any, /, *args: Any, **kwargs: Any) -> TypeError | None:
    """Return the error of a function that does not take these arguments, as far as its signature tells."""
    with suppress(ValueError):
        # Functions in C have no signature, and a wrapper may add arguments to those of what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return error
    return None
