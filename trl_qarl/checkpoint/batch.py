"""What a checkpoint adds to TRL's: which scheme it was trained for, and the generation batch in progress; the last complete one."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..quantization.plan import QuantPlan
from .marker import is_complete


__all__ = [
    "SCHEME_FILE",
    "batch_shape",
    "find_checkpoint",
    "hold_back_rotation",
    "load_batch",
    "save_batch",
    "scheme_record",
    "write_scheme",
]

logger = logging.getLogger(__name__)

SCHEME_FILE = "qarl.json"
_BATCH_FILE = "rollout_state_{rank}.pt"

# accelerate calls the device of a process among several on a CPU "cpu:0", which `torch.load` does not know: no run of several
# processes on a CPU could be resumed. Called after torch's own.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


def scheme_record(args, plan: QuantPlan, scale_dtype: torch.dtype) -> dict[str, Any]:
    """What the weights of a checkpoint were trained for."""
    excluded = args.exclude_modules
    return {
        "scheme": plan.written,
        "quantize_learner": args.quantize_learner,
        "group_size": plan.group_size,
        "exclude_modules": list(excluded) if isinstance(excluded, tuple) else excluded,
        "scale_dtype": str(scale_dtype).removeprefix("torch."),
        **plan.options,
    }


def write_scheme(folder: str | Path, record: dict[str, Any]) -> None:
    (Path(folder) / SCHEME_FILE).write_text(json.dumps(record, indent=2) + "\n")


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str, record: dict[str, Any]) -> str | None:
    """
    Checkpoint folder to resume from, `None` for a new run.

    Args:
        resume_from_checkpoint (`str`, `bool` or `None`):
            The folder, or `True` for the last complete one of `output_dir`.
        output_dir (`str`):
            Where checkpoints are.
        record (`dict`):
            This run's [`scheme_record`].

    Raises:
        ValueError: if there is no such checkpoint, if it is incomplete, or if it was trained with another `record`.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        resume_from_checkpoint = _last_complete_checkpoint(output_dir)
    folder = Path(resume_from_checkpoint)
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint={resume_from_checkpoint!r} is not a folder. Give a checkpoint's.")
    if not is_complete(folder):
        raise ValueError(
            f"The checkpoint {folder} is incomplete: it was not written to its end. Resume from another one, or with "
            "`resume_from_checkpoint=True` from the last complete one of `output_dir`."
        )
    if not (folder / SCHEME_FILE).is_file():
        logger.warning("%s has no %s: it was not written by QaRLTrainer.", folder, SCHEME_FILE)
        return resume_from_checkpoint
    theirs = json.loads((folder / SCHEME_FILE).read_text())
    if theirs != record:
        raise ValueError(
            f"The checkpoint {folder} was trained with {theirs}, this run uses {record}. Resume with the same settings, "
            "or start a new run from its masters by passing it as the model."
        )
    return resume_from_checkpoint


def _last_complete_checkpoint(output_dir: str) -> str:
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = sorted((int(f.name.rpartition("-")[2]), f) for f in folders if f.name.rpartition("-")[2].isdigit())
    for _, folder in reversed(steps):
        if is_complete(folder):
            return os.fspath(folder)
        logger.warning("%s is incomplete and is skipped.", folder)
    raise ValueError(
        f"No complete checkpoint in {output_dir!r} to resume from. Start without `resume_from_checkpoint`."
    )


@contextmanager
def hold_back_rotation() -> Iterator[Callable[[], None]]:
    """
    While open, transformers deletes no older checkpoint; it would before ours is complete, and a crash between the two would
    leave none. Yields what makes up for it.
    """
    original, held_back = trainer.rotate_checkpoints, []

    def rotate() -> None:
        for kwargs in held_back:
            original(**kwargs)

    trainer.rotate_checkpoints = lambda **kwargs: held_back.append(kwargs)
    try:
        yield rotate
    finally:
        trainer.rotate_checkpoints = original


def batch_shape(args, num_processes: int, train_batch_size: int) -> dict[str, int]:
    """What a generation batch is divided into and how often it is used."""
    return {
        "num_processes": num_processes,
        "per_device_train_batch_size": train_batch_size,
        "steps_per_generation": args.steps_per_generation,
        "num_generations": args.num_generations,
        "num_iterations": args.num_iterations,
    }


def save_batch(folder: Path, rank: int, shape: dict[str, int], step: int, batches: list | None) -> None:
    """Write the generation batch in progress, of which `step` says how much has been used, for process `rank`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"shape": shape, "step": step, "buffered_inputs": batches}
    torch.save(state, folder / _BATCH_FILE.format(rank=rank))


def load_batch(
    checkpoint: str | None, rank: int, shape: dict[str, int], device: torch.device
) -> tuple[int, list | None] | None:
    """`step` and `batches` of [`save_batch`], or `None` where there is none or this run's batches have another shape."""
    path = Path(checkpoint or "") / _BATCH_FILE.format(rank=rank)
    if checkpoint is None or not path.is_file():
        # Where processes were added, the others find another `num_processes` and start a new batch too.
        return None
    state = torch.load(path, map_location=device, weights_only=True)
    theirs = state["shape"]
    if theirs == shape:
        return state["step"], state["buffered_inputs"]
    changed = ", ".join(
        f"{name}={theirs[name]} there, {shape[name]} here" for name in shape if theirs[name] != shape[name]
    )
    logger.warning(
        "The generation batch in progress of %s does not fit this run (%s). It is dropped, and training goes on "
        "with a new one. Resume with the same values to use it.",
        checkpoint,
        changed,
    )
    return None
