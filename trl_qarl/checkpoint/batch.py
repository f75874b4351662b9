"""The generation batch in progress, and what else a run goes on with, saved with a checkpoint and loaded when it is
resumed."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import trainer


__all__ = [
    "OBJECTIVE_FILE",
    "SavedBatch",
    "batch_shape",
    "hold_back_rotation",
    "load_batch",
    "load_shared",
    "save_batch",
    "save_shared",
    "versions_file",
]

logger = logging.getLogger(__name__)

_BATCH_FILE = "rollout_state_{rank}.pt"
OBJECTIVE_FILE = "objective_state.pt"
"""State of the objective: what it has learned of the run."""

# accelerate calls the device of a process among several on a CPU "cpu:0", which `torch.load` does not know: no run of
# several processes on a CPU could be resumed. Called after torch's own.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


def versions_file(rank: int | None = None) -> str:
    """Return the name of the file with the weights that draw what is pending: all of them, or the part of a rank."""
    return f"rollout_versions{'' if rank is None else f'_{rank}'}.pt"


@contextmanager
def hold_back_rotation() -> Iterator[Callable[[], None]]:
    """
    Keep transformers from deleting older checkpoints while open: it would do so before ours is complete, and a crash
    between the two would leave none. Yields a function that deletes them afterwards.
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
    """Return what a generation batch is divided into and how often it is used."""
    names = ("steps_per_generation", "num_generations", "num_iterations")
    of_args = {name: getattr(args, name) for name in names}
    return {"num_processes": num_processes, "per_device_train_batch_size": train_batch_size, **of_args}


class SavedBatch(NamedTuple):
    """
    The rollouts of one process: `step`, how many micro-batches have been trained, which says how much of the batch in
    progress, `buffered_inputs`, has been used; whether learner and sampler have differed; and the generation batches
    that were drawn ahead ([`~trl_qarl.rollout.ahead.Ahead.state`]).
    """

    step: int
    buffered_inputs: list | None
    has_differed: bool = False
    ahead: Any = ()


def save_batch(folder: Path, rank: int, shape: dict[str, int], batch: SavedBatch) -> None:
    """Write the rollouts of process `rank`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"shape": shape, **batch._asdict()}, folder / _BATCH_FILE.format(rank=rank))


def load_batch(checkpoint: str | None, rank: int, shape: dict[str, int], device: torch.device) -> SavedBatch | None:
    """Return what [`save_batch`] wrote, or `None` where there is none or this run's batches have another shape."""
    path = Path(checkpoint or "") / _BATCH_FILE.format(rank=rank)
    if checkpoint is None or not path.is_file():
        # Where processes were added, the others find another `num_processes` and start a new batch too.
        return None
    state = torch.load(path, map_location=device, weights_only=True)
    theirs = state.pop("shape")
    if theirs == shape:
        return SavedBatch(**state)
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


def save_shared(folder: Path, name: str, value: Any) -> None:
    """Write what is not of one process' rollouts: [`versions_file`] or [`OBJECTIVE_FILE`]."""
    torch.save(value, folder / name)


def load_shared(checkpoint: str, name: str, device: torch.device | str) -> Any:
    """Return what [`save_shared`] wrote, or `None` where there is nothing."""
    path = Path(checkpoint, name)
    return torch.load(path, map_location=device, weights_only=True) if path.is_file() else None
