"""Saves the generation batch in progress, and other state of a run, with a checkpoint, and loads it on resuming."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import trainer


logger = logging.getLogger(__name__)

_BATCH_FILE = "rollout_state_{rank}.pt"
OBJECTIVE_FILE = "objective_state.pt"
"""File with the objective's state, such as estimated trust bands."""

# With several processes on a CPU, accelerate names their devices "cpu:0", which `torch.load` does not know, so such a
# run could not be resumed. Priority 100 comes after torch's own functions.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


@contextmanager
def hold_back_rotation() -> Iterator[Callable[[], None]]:
    """
    While open, keep transformers from deleting older checkpoints: it would do so before ours is complete, and a crash
    in between would leave none. Yields a function that deletes them afterwards.
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


class SavedBatch(NamedTuple):
    """
    Rollouts of one process: `step`, the number of trained micro-batches, which gives the position in the batch in
    progress, `buffered_inputs`; whether learner and sampler have differed; and generation batches that were drawn
    ahead ([`~trl_qarl.rollout.ahead.Ahead.state`]).
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
    """Return the batch of [`save_batch`], or `None` if there is none or this run's batches have another shape."""
    name = _BATCH_FILE.format(rank=rank)
    # A process that was added finds no file. The others find another `num_processes` and start a new batch too.
    if checkpoint is None or (state := load_shared(checkpoint, name, device)) is None:
        return None
    theirs = state.pop("shape")
    if theirs == shape:
        return SavedBatch(**state)
    changed = ", ".join(
        f"{name}={theirs[name]} there, {shape[name]} here" for name in shape if theirs[name] != shape[name]
    )
    logger.warning(
        "The generation batch in progress of %s does not fit this run (%s). It is dropped, and training continues "
        "with a new one. Resume with the same values to use it.",
        checkpoint,
        changed,
    )
    return None


def load_shared(checkpoint: str, name: str, device: torch.device | str) -> Any:
    """Load a file of `torch.save` from a checkpoint, or return `None` if there is none."""
    path = Path(checkpoint, name)
    return torch.load(path, map_location=device, weights_only=True) if path.is_file() else None
