"""Additions to transformers' checkpoints: the generation batch in progress, a mark of completeness, and a record."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from transformers import TrainerState, trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from .checkpoint import marker, record
from .checkpoint.files import OUTPUT_LOCK, allow_as_umask, check_free, hold, name_disk_errors
from .checkpoint.load import load_renamed
from .checkpoint.relay import LOCK_FILE, Relay
from .checks.launch import check_resumed_launch
from .hub import PushesPolicy
from .objectives.objective import Objective
from .rollout.ahead import Ahead
from .rollout.failures import all_or_none


logger = logging.getLogger(__name__)

_BATCH_FILE = "rollout_state_{rank}.pt"
# State of the objective, such as estimated trust bands.
_OBJECTIVE_FILE = "objective_state.pt"

# With several processes on a CPU, accelerate names their devices "cpu:0", which `torch.load` does not know, so such a
# run could not be resumed. Priority 100 comes after torch's own functions.
torch.serialization.register_package(
    100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


class SavesRuns(PushesPolicy):
    """
    Checkpoints from which a run continues as if it had not ended. Inherit from this class before TRL's trainer, whose
    generation batch is saved too.
    """

    _step: int
    _buffered_inputs: Any
    _last_checkpoint: Path | None = None
    _relay: Relay | None = None
    _ahead: Ahead | None = None
    _objective: Objective
    # While a checkpoint is being saved.
    _is_saving = False
    # The epoch in progress, its first micro-batch that is trained, and the number of micro-batches trained before it.
    _epoch_begun: tuple[int, int, int] = (0, 0, 0)
    # The update before which the epoch began, and torch's random state at that time.
    _epoch_start: tuple[int, torch.Tensor | None] = (-1, None)

    def _save_before_leaving(self) -> None:
        """Saves a checkpoint if this update has no complete one; logs a failure, as another error ended the run."""
        if self.state.global_step == 0:
            return
        folder = self._checkpoint_folder(trial=None)
        # The main process decides because it completes the folder.
        is_saved = [folder.resolve() == self._last_checkpoint and marker.is_complete(folder)]
        broadcast_object_list(is_saved, from_process=0)
        if is_saved[0]:
            logger.warning("%s is complete and stays as it is.", folder)
        else:
            start, random_state = self._epoch_start
            if self.state.global_step == start:
                # Iterating a loader draws a seed for its workers; a resumed run draws it again as the epoch begins.
                torch.set_rng_state(random_state)
            try:
                self._save_checkpoint(self.model, trial=None)
            except Exception as error:
                message = "%s could not be saved (%s: %s). A resumed run goes on from the last complete checkpoint."
                logger.error(message, folder, type(error).__name__, error)
        # A launcher ends the other processes as soon as one has failed.
        self.accelerator.wait_for_everyone()

    def _checkpoint_folder(self, trial) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    @override
    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        """Ends a run that is resumed at its last update, where transformers would train another epoch, and finds the
        position in a streamed dataset, for which transformers counts all updates as one epoch."""
        position = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None:
            return position
        if isinstance(self.train_dataset, IterableDataset):
            saved = _saved_state(resume_from_checkpoint)
            num_passes, share = divmod(saved.epoch, 1)
            num_batches = round(share * saved.max_steps * self.args.gradient_accumulation_steps)
            position = int(num_passes), 0 if self.args.ignore_data_skip else num_batches
        if self.state.global_step < max_steps:
            return position
        if self.is_world_process_zero():
            message = (
                "%s is of update %d, and the run ends at %d: nothing is left to train. Raise `max_steps` or "
                "`num_train_epochs` to go on."
            )
            logger.warning(message, resume_from_checkpoint, self.state.global_step, max_steps)
        return num_train_epochs, 0

    @override
    def _run_epoch(self, *, epoch, epochs_trained, train_dataloader, **kwargs):
        """In a resumed run, first draws the orders of the earlier epochs: TRL's sampler is seeded only once."""
        is_first = epoch == epochs_trained
        for _ in range(epochs_trained if is_first else 0):
            next(iter(train_dataloader.batch_sampler), None)
        num_skipped = kwargs["steps_trained_in_current_epoch"] if is_first and not self.args.ignore_data_skip else 0
        self._epoch_begun = epoch, num_skipped, self._step
        if self._ahead is not None and is_first:
            self._ahead.begin(self._get_train_sampler(), self.train_dataset)
        self._epoch_start = self.state.global_step, torch.get_rng_state()
        return super()._run_epoch(
            epoch=epoch, epochs_trained=epochs_trained, train_dataloader=train_dataloader, **kwargs
        )

    def find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the checkpoint folder to resume from, `None` for a new run. `ValueError` is raised if the checkpoint
        is missing or incomplete, or was trained with another scheme, learner, trust band or launch."""
        found = record.find_checkpoint(resume_from_checkpoint, self.args.output_dir, self.policy.record())
        if found is not None:
            check_resumed_launch(self.accelerator, found)
            self._objective.load(_load(found, _OBJECTIVE_FILE, "cpu"))
        return found

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the masters, or the adapter, as TRL does, and next to them their scheme and a card."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        token = self.args.hub_token
        # transformers would write it into training_args.bin, which others may read.
        self.args.hub_token = None
        try:
            with name_disk_errors(folder):
                super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token
        allow_as_umask(folder.glob("*.safetensors"))
        # TRL's copy of the initial adapter is not a result, and next to it transformers would not resume the adapter.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        record.write_scheme(folder, self.policy.record())
        self._write_card(folder)

    @override
    def _save_checkpoint(self, model, trial):
        """Also saves the generation batch in progress. Once the files of all processes are on disk, the folder is
        marked as complete and uploaded, and older checkpoints are deleted."""
        folder = self._checkpoint_folder(trial)
        # This waits for the batches that the engine is drawing.
        ahead, versions = ([], []) if self._ahead is None else self._ahead.state()
        with all_or_none(self.accelerator):
            if self.args.should_save:
                marker.begin(folder)
        self._is_saving = True
        try:
            with all_or_none(self.accelerator), name_disk_errors(folder), _hold_back_rotation() as rotate:
                super()._save_checkpoint(model, trial)
                if self.args.should_save and not (folder / record.SCHEME_FILE).is_file():
                    # FSDP2's sharded checkpoints contain the weights only, and nothing else that `save_model` writes.
                    record.write_scheme(folder, self.policy.record())
                self._save_batch(folder, ahead)
                if versions and (self.args.should_save or self.policy.takes_all_processes):
                    torch.save(versions, folder / self._versions_file())
                learned = self._objective.state()
                if learned and self.args.should_save:
                    torch.save(learned, folder / _OBJECTIVE_FILE)
                marker.sync(folder)
        finally:
            self._is_saving = False
        with all_or_none(self.accelerator):
            if self.args.should_save:
                marker.complete(folder)
        self._last_checkpoint = folder.resolve()
        rotate()
        self._push_saved()

    def _save_batch(self, folder: Path, ahead: list) -> None:
        """Writes the rollouts of this process: the number of trained micro-batches, which gives the position in the
        batch in progress; this batch; whether learner and sampler have differed; and those of `Ahead.state`."""
        batch = {
            "shape": self._batch_shape(),
            "step": self._step,
            "buffered_inputs": self._buffered_inputs,
            "has_differed": self.policy.exactness.has_differed,
            "ahead": ahead,
        }
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(batch, folder / _BATCH_FILE.format(rank=self.accelerator.process_index))

    @override
    def save_model(self, *args, **kwargs) -> None:
        """Within a checkpoint, raises a failure of one process in all."""
        with self._shared_while_saving():
            super().save_model(*args, **kwargs)

    @override
    def create_model_card(self, *args, **kwargs) -> None:
        """Within a checkpoint, raises a failure of one process in all."""
        with self._shared_while_saving():
            super().create_model_card(*args, **kwargs)

    def _shared_while_saving(self):
        """Return the context in which a failure of one process reaches the others before they meet in a checkpoint."""
        return all_or_none(self.accelerator) if self._is_saving else nullcontext()

    def export_model(
        self,
        output_dir: str | Path | None = None,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> Path:
        """Write the low-bit policy to `output_dir`, by default `export_dir`, with [`export_checkpoint`], and a card
        with the results of the training, this title, training set and tags. Over a 4-bit base of bitsandbytes, write
        the adapter. Return the folder."""
        self._remember(model_name=model_name, dataset_name=dataset_name, tags=tags)
        folder = Path(output_dir or self.export_dir)
        if getattr(self.model, "is_loaded_in_4bit", False):
            self._save(os.fspath(folder))
            (folder / TRAINING_ARGS_NAME).unlink()
            return folder
        card = {**self._card_facts(), "name": self.hub_model_id}
        # While sharded masters are gathered, an error of one process must reach the others.
        with all_or_none(self.accelerator) if self.policy.takes_all_processes else nullcontext():
            return self.policy.export(folder, self.processing_class, card)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        """Also loads tensors whose names in the checkpoint differ from the model's, such as experts of a mixture."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_renamed(self.model if model is None else model, resume_from_checkpoint)

    @override
    def _load_best_model(self) -> None:
        """Also loads renamed tensors, like [`~SavesRuns._load_from_checkpoint`]."""
        super()._load_best_model()
        load_renamed(self.model, self.state.best_model_checkpoint)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        """Also restores the generation batch in progress, or drops it if this run's batches have another shape."""
        super()._load_optimizer_and_scheduler(checkpoint)
        name, device = _BATCH_FILE.format(rank=self.accelerator.process_index), self.accelerator.device
        # A process that was added finds no file. The others find another `num_processes` and start a new batch too.
        if checkpoint is None or (batch := _load(checkpoint, name, device)) is None:
            return
        theirs, ours, ahead = batch["shape"], self._batch_shape(), batch.get("ahead", ())
        if theirs != ours:
            changed = [
                f"{name}={theirs[name]} there, {ours[name]} here" for name in ours if theirs[name] != ours[name]
            ]
            message = (
                "The generation batch in progress of %s does not fit this run (%s). It is dropped, and training continues "
                "with a new one. Resume with the same values to use it."
            )
            logger.warning(message, checkpoint, ", ".join(changed))
            return
        self._step, self._buffered_inputs = batch["step"], batch["buffered_inputs"]
        self.policy.exactness.has_differed = batch.get("has_differed", False)
        if self._ahead is not None:
            self._ahead.load(ahead, _load(checkpoint, self._versions_file(), device) or [])
        elif ahead:
            message = "%s has %d generation batches that were drawn ahead. With rollout_ahead=0 they are dropped and drawn again."
            logger.warning(message, checkpoint, len(ahead))

    def _check_folders_are_free(self) -> None:
        """Raises `ValueError` if another trainer writes to `output_dir` or `publish_dir`, before a server starts."""
        args = self.args
        with all_or_none(self.accelerator):
            if self.accelerator.is_main_process:
                check_free(Path(args.output_dir, OUTPUT_LOCK), "output_dir")
                if args.publish_dir is not None:
                    check_free(Path(args.publish_dir, LOCK_FILE), "publish_dir")

    @contextmanager
    def _hold_folders(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Hold `output_dir` and `publish_dir` during a training; the main process does so for all. Yields the
        checkpoint from which the training continues, `None` for a new run."""
        args, is_main = self.args, self.is_world_process_zero()
        with ExitStack() as held:
            with all_or_none(self.accelerator):
                if is_main:
                    held.enter_context(hold(Path(args.output_dir, OUTPUT_LOCK), "output_dir"))
            checkpoint = self.find_checkpoint(resume_from_checkpoint)
            self._last_checkpoint = None if checkpoint is None else Path(checkpoint).resolve()
            with all_or_none(self.accelerator):
                if args.publish_dir is not None and is_main:
                    resumed_at = None if checkpoint is None else _saved_state(checkpoint).global_step
                    self._relay = Relay(args.publish_dir, args.output_dir, resumed_at)
                    held.callback(self._relay.close)
            try:
                yield checkpoint
            finally:
                self._relay = None

    def _relay_policy(self) -> None:
        """Adds the policy to `publish_dir` if the policy has changed; the other processes wait for the main one."""
        if self.args.publish_dir is None:
            return
        with all_or_none(self.accelerator):
            if self._relay is not None:
                self.policy.relay(self._relay, self.state.global_step, self.export_model)

    def _versions_file(self) -> str:
        """Return the name of the file with the weights that draw pending batches."""
        part = f"_{self.accelerator.process_index}" if self.policy.takes_all_processes else ""
        return f"rollout_versions{part}.pt"

    def _batch_shape(self) -> dict[str, int]:
        """Return the settings that divide a generation batch, and how often it is used."""
        names = ("steps_per_generation", "num_generations", "num_iterations")
        of_args = {name: getattr(self.args, name) for name in names}
        num_processes, size = self.accelerator.num_processes, self._train_batch_size
        return {"num_processes": num_processes, "per_device_train_batch_size": size, **of_args}


@contextmanager
def _hold_back_rotation() -> Iterator[Callable[[], None]]:
    """While open, keeps transformers from deleting older checkpoints: it would do so before ours is complete, and a
    crash in between would leave none. Yields a function that deletes them afterwards."""
    original, held_back = trainer.rotate_checkpoints, []

    def rotate() -> None:
        for kwargs in held_back:
            original(**kwargs)

    trainer.rotate_checkpoints = lambda **kwargs: held_back.append(kwargs)
    try:
        yield rotate
    finally:
        trainer.rotate_checkpoints = original


def _load(checkpoint: str, name: str, device: torch.device | str) -> Any:
    """Loads a file of `torch.save` from a checkpoint, or returns `None` if there is none."""
    path = Path(checkpoint, name)
    return torch.load(path, map_location=device, weights_only=True) if path.is_file() else None


def _saved_state(checkpoint: str) -> TrainerState:
    return TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
