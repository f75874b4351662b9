"""`qarl.json`, the quantization settings next to weights, and the checkpoint to resume from. Needs no torch."""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quantization.plan import QuantPlan, plan_of
from .marker import problem_of


if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

SCHEME_FILE = "qarl.json"
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes in which an engine runs a model, by their names."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_READ_AS_JSON = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def scheme_record(args, plan: QuantPlan, scale_dtype: "torch.dtype") -> dict[str, Any]:
    """Return the quantization settings of a checkpoint."""
    return scheme_settings(args, plan) | {"scale_dtype": str(scale_dtype).removeprefix("torch.")}


def scheme_settings(args, plan: QuantPlan) -> dict[str, Any]:
    """Return the entries of [`scheme_record`] that are known without a model. One name in `exclude_modules` is a list
    of one, and none are `None`."""
    excluded = args.exclude_modules or []
    return {
        "scheme": plan.option_value,
        "quantize_learner": args.quantize_learner,
        "group_size": plan.group_size,
        "exclude_modules": ([excluded] if isinstance(excluded, str) else [*excluded]) or None,
    }


def write_scheme(folder: str | Path, record: dict[str, Any]) -> None:
    (Path(folder) / SCHEME_FILE).write_text(json.dumps(record, indent=2) + "\n")


def check_checkpoint(folder: str | Path, record: dict[str, Any]) -> None:
    """Raise `ValueError` if this process does not have the checkpoint in `folder` as a whole, or if it was trained
    with a [`scheme_record`] that differs from this run's."""
    folder_to_resume(str(folder), "")
    path = Path(folder) / SCHEME_FILE
    if not path.is_file():
        logger.warning("%s has no %s: it was not written by QaRLTrainer.", folder, SCHEME_FILE)
    elif changed := differing_records(read_json(path), record):
        raise ValueError(explain_differences(path.parent, changed))


def explain_differences(folder: Path, changed: Iterable[str]) -> str:
    """Return the message for a checkpoint with other settings, the texts of [`differing`]."""
    names = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
    has_weights = any((folder / name).exists() for name in names)
    advice = f", or start a new run from its weights: give {folder} as the model, without `resume_from_checkpoint`"
    return (
        f"The checkpoint {folder} was trained with other settings ({'; '.join(changed)}), and its states do not fit. Resume "
        f"with the same values{advice if has_weights else ''}."
    )


def differing_records(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return a text for each difference of two records of [`Policy.record`]."""
    names = dict.fromkeys([*theirs, *ours])
    # Scales of many layers.
    texts = [] if theirs.get("global_scales") == ours.get("global_scales") else ["global_scales"]
    has_adapter = ["lora_mode" in record for record in (theirs, ours)]
    texts += differing_presence(*has_adapter)
    left = {"global_scales"} | ({"lora_mode", "base"} if has_adapter[0] != has_adapter[1] else set())
    texts += differing([name for name in names if name not in left], theirs, ours)
    notes = {"base": " (a fingerprint of the base)", "scale_dtype": " (by `bf16` and `fp16`)"}
    return [text + notes.get(text.partition("=")[0], "") for text in texts]


def differing_presence(is_theirs: bool, is_ours: bool) -> list[str]:
    """Return the text for an adapter that only one of two runs has, if so."""
    if is_theirs == is_ours:
        return []
    return ["an adapter there, none here" if is_theirs else "no adapter there, one here"]


def folder_to_resume(
    resume_from_checkpoint: str | bool | None, output_dir: str, reads_content: bool = False
) -> str | None:
    """Return the checkpoint folder to resume from, `None` for a new run. `ValueError` is raised if there is no such
    checkpoint, or if it is incomplete or damaged. With `reads_content` files are read and compared with their sums,
    otherwise only their sizes are."""
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        found = last_complete_checkpoint(output_dir, reads_content)
        if found is None:
            raise ValueError(
                f"No complete checkpoint in {output_dir!r} to resume from. Start without `resume_from_checkpoint`."
            )
        return found
    if not isinstance(resume_from_checkpoint, str | Path) or not Path(resume_from_checkpoint).is_dir():
        raise ValueError(f"resume_from_checkpoint={resume_from_checkpoint!r} is not a folder. Give a checkpoint's.")
    folder = Path(resume_from_checkpoint)
    if problem := problem_of(folder, reads_content, is_named=True):
        if inside := last_complete_checkpoint(folder, reads_content):
            raise ValueError(
                f"{folder} is a folder of checkpoints. Resume from {inside}, the last complete one in it."
            )
        other = last_complete_checkpoint(folder.parent, reads_content, other_than=folder)
        advice = (
            "There is no complete one next to it: start a new run"
            if other is None
            else f"Resume from {other}, the last complete one next to it"
        )
        raise ValueError(f"The checkpoint {folder} is {problem}. {advice}.")
    return resume_from_checkpoint


def last_complete_checkpoint(
    output_dir: str | Path, reads_content: bool = False, other_than: Path | None = None
) -> str | None:
    """Return the folder of the last complete checkpoint, or `None`; others are skipped with a warning."""
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = sorted((int(f.name.rpartition("-")[2]), f) for f in folders if f.name.rpartition("-")[2].isdigit())
    for _, folder in reversed(steps):
        if folder == other_than:
            continue
        problem = problem_of(folder, reads_content)
        if problem is None:
            return os.fspath(folder)
        logger.warning("%s is %s. It is skipped.", folder, problem)
    return None


def check_record(folder: str | Path, record: dict[str, Any]) -> None:
    """Raise `ValueError` if the adapter in `folder` was trained over another base or scheme than that of `record`."""
    path = Path(folder) / SCHEME_FILE
    if not path.is_file():
        logger.warning("%s has no %s: its adapter may not fit this base and scheme.", folder, SCHEME_FILE)
        return
    theirs = read_json(path)
    if changed := differing(("scheme", "group_size", "scale_dtype", "base"), theirs, record):
        raise ValueError(
            f"The adapter in {folder} was trained over another low-bit base ({'; '.join(changed)}); `base` is a "
            "fingerprint of its scales. Use the same base, scheme, group_size and bf16, or train a new adapter."
        )


def differing(names: Iterable[str], theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return a text for each of these settings that has another value in the two."""
    pairs = {name: (theirs.get(name), ours.get(name)) for name in names}
    # Compare JSON text: the order of patterns matters.
    return [f"{name}={a!r} there, {b!r} here" for name, (a, b) in pairs.items() if json.dumps(a) != json.dumps(b)]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint or a model; `ValueError` names it if it is damaged."""
    try:
        if not isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError(f"its content is of type {type(found).__name__}, and must be a dictionary")
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Restore it from another checkpoint of the run, or download it again."
        ) from error
    return found


def check_config(model: str) -> None:
    """Raise `ValueError` for a damaged `config.json` in a folder; transformers names none that holds a list (5.17)."""
    if (path := Path(model, "config.json")).is_file():
        read_json(path)


def problems_of_json(folder: str) -> Iterator[str]:
    """Yield a problem of each damaged file of a tokenizer, or of how to generate, which transformers does not name."""
    for path in filter(Path.is_file, (Path(folder) / name for name in _READ_AS_JSON)):
        try:
            read_json(path)
        except ValueError as error:
            yield str(error)


def has_tokenizer(folder: str) -> bool:
    return any((Path(folder) / file).is_file() for file in TOKENIZER_FILES)


def read_record(path: str | Path) -> dict[str, Any]:
    """Read the `qarl.json` that a trainer wrote next to its masters. `ValueError` is raised if it is damaged."""
    record = read_json(Path(path))
    try:
        plan_of(record)
        if record["scale_dtype"] not in DTYPES:
            raise ValueError(f"scale_dtype={record['scale_dtype']!r} is not one of {list(DTYPES)}.")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be used: {error} Restore it from another checkpoint of the run, or delete it and give `--scheme`."
        ) from None
    return record
