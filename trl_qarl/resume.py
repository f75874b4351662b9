"""Files that a checkpoint adds to TRL's, and the last complete one."""

import logging
import os
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


__all__ = ["ROLLOUT_STATE_FILE", "SCHEME_FILE", "TRAINER_STATE_FILE", "last_complete_checkpoint"]

logger = logging.getLogger(__name__)

SCHEME_FILE = "qarl.json"
ROLLOUT_STATE_FILE = "rollout_state_{rank}.pt"
TRAINER_STATE_FILE = "trainer_state.json"


def last_complete_checkpoint(output_dir: str) -> str:
    folders = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = sorted((int(f.name.rpartition("-")[2]), f) for f in folders if f.name.rpartition("-")[2].isdigit())
    for _, folder in reversed(steps):
        if (folder / TRAINER_STATE_FILE).is_file():
            return os.fspath(folder)
        logger.warning("%s is incomplete (no %s) and is skipped.", folder, TRAINER_STATE_FILE)
    raise ValueError(
        f"No complete checkpoint in {output_dir!r} to resume from. Start without `resume_from_checkpoint`."
    )
