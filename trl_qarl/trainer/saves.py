"""Additions to transformers' checkpoints: the generation batch in progress, a mark of completeness, and a record."""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import IterableDataset
from transformers import TrainerState, trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from typing_extensions import override

from ..adapters.tensors import adapter_config
from ..checkpoint import marker, record
from ..checkpoint.export import save_configuration
from ..checkpoint.files import OUTPUT_LOCK, allow_as_umask, check_free, hold, name_disk_errors
from ..checkpoint.load import load_renamed
from ..checkpoint.scales import write_scales
from ..checks.launch import check_resumed_launch
from ..checks.resume import RESUME_FILE, batch_settings, check_states, state_settings
from ..quantization.names import base_model, is_peft_model
from ..quantization.storage import is_sharded, keep_gradients_in, num_elements, storage_of
from ..replacing import replaced
from ..rollout.ahead import Prefetcher
from ..rollout.failures import all_or_none
from ..sharding.fsdp2 import whole_state
from .pushes import PushesPolicy


logger = logging.getLogger(__name__)

_BATCH_FILE = "rollout_state_{rank}.pt"


@lru_cache(maxsize=1)
def _load_numbered_cpus() -> None:
    """Have `torch.load` know the devices of several processes on a CPU, which accelerate names `cpu:0` and so on. The
    priority of 100 comes after torch's own functions."""
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
    _ahead: Prefetcher | None = None
    _own_optimizer: Any
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
        """Return the checkpoint folder to resume from, `None` for a new run; every process has to call. `ValueError`
        is raised if the checkpoint is missing, incomplete or damaged, or was trained with another scheme, learner or
        launch."""
        _load_numbered_cpus()
        # The main process reads the files once for all, and may go back to an earlier checkpoint.
        answer: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                answer[0] = record.folder_to_resume(resume_from_checkpoint, self.args.output_dir, reads_content=True)
            except (ValueError, OSError) as error:
                answer[1] = str(error)
        broadcast_object_list(answer, from_process=0)
        folder, problem = answer
        if problem is not None:
            raise ValueError(problem)
        if folder is not None:
            record.check_checkpoint(folder, self.policy.record())
            check_resumed_launch(self.accelerator, folder)
            check_states(folder, self._state_settings())
        return folder

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the masters, or the adapter, as TRL does, and next to them their scheme and a card."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        token = self.args.hub_token
        # transformers would write it into training_args.bin, which others may read.
        self.args.hub_token = None
        # transformers leaves out a tied tensor by its address, and FSDP2 gathers a copy of it (5.17).
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", ())
        state_dict = state_dict and {name: tensor for name, tensor in state_dict.items() if name not in tied}
        try:
            with name_disk_errors(folder):
                super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token
        # From transformers 5.24 on every process calls this.
        if not self.args.should_save:
            return
        allow_as_umask(folder.glob("*.safetensors"))
        # TRL's copy of the initial adapter is not a result, and next to it transformers would not resume the adapter.
        shutil.rmtree(folder / "ref", ignore_errors=True)
        record.write_scheme(folder, self.policy.record())
        write_scales(folder, self.accelerator.unwrap_model(self.model))
        self._write_card(folder)

    @override
    def _save_checkpoint(self, model, trial):
        """Also saves the generation batch in progress. Once the files of all processes are on disk, the folder is
        marked as complete and uploaded, and older checkpoints are deleted. `NotFinite` is raised instead if a trained
        tensor has a value that is not finite: nothing is written, and older checkpoints stay."""
        self._check_finite(f"{self._checkpoint_folder(trial)} is not written", is_for_all=True)
        folder = self._checkpoint_folder(trial)
        # This waits for the batch that the engine is drawing.
        ahead, weights = (None, None) if self._ahead is None else self._ahead.state()
        with all_or_none(self.accelerator):
            if self.args.should_save:
                marker.begin(folder)
        # transformers would delete older checkpoints before this one is complete; a crash in between would leave none.
        held_back: list[dict[str, Any]] = []
        rotates_later = replaced(trainer, rotate_checkpoints=lambda **kwargs: held_back.append(kwargs))
        self._is_saving = True
        try:
            with all_or_none(self.accelerator), name_disk_errors(folder), rotates_later:
                super()._save_checkpoint(model, trial)
                if self.args.should_save:
                    self._describe_checkpoint(folder)
                self._save_batch(folder, ahead)
                if weights is not None and (self.args.should_save or is_sharded(self.model)):
                    torch.save(weights, folder / self._version_file())
                marker.sync(folder)
        finally:
            self._is_saving = False
        with all_or_none(self.accelerator):
            if self.args.should_save:
                marker.complete(folder)
                if self._last_checkpoint is None:
                    marker.leave_behind(folder)
        self._last_checkpoint = folder.resolve()
        for kwargs in held_back:
            _rotate(folder, kwargs["save_total_limit"], kwargs["best_model_checkpoint"])
        self._push_saved()

    def _describe_checkpoint(self, folder: Path) -> None:
        """Writes the settings that states need, and next to the parts that FSDP2 leaves in a checkpoint what
        `save_model` writes next to weights, without which `trl-qarl export` cannot read them."""
        if not (folder / record.SCHEME_FILE).is_file():
            model = self.accelerator.unwrap_model(self.model)
            save_configuration(model, folder, model.dtype, self.processing_class)
            record.write_scheme(folder, self.policy.record())
            write_scales(folder, model)
        settings = self._state_settings()
        if self.args.save_only_model:
            settings = {name: value for name, value in settings.items() if name not in ("optim", "lr_scheduler_type")}
        (folder / RESUME_FILE).write_text(json.dumps(settings, indent=2) + "\n")

    def _save_batch(self, folder: Path, ahead: tuple | None) -> None:
        """Writes the rollouts of this process: the number of trained micro-batches, which gives the position in the
        batch in progress; this batch; whether learner and sampler have differed; and that of `Prefetcher.state`."""
        batch = {
            "settings": self._batch_settings(),
            "step": self._step,
            "buffered_inputs": self._buffered_inputs,
            "has_differed": self.policy.exactness.has_differed,
            "ahead": ahead,
            "rollout_ahead": self.args.rollout_ahead,
        }
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(batch, folder / _BATCH_FILE.format(rank=self.accelerator.process_index))

    @override
    def save_model(self, *args, **kwargs) -> None:
        """Gathers sharded masters, except in a checkpoint that FSDP2 writes in parts: `export` reads those. Raises
        `NotFinite` if a trained tensor has a value that is not finite; within a checkpoint, a failure of one process
        in all."""
        if not self._is_saving:
            self._check_finite("the model is not saved")
        is_gathered = not self._is_saving or is_peft_model(self.model)
        with self._shared_while_saving(), whole_state(self.accelerator) if is_gathered else nullcontext():
            super().save_model(*args, **kwargs)

    @override
    def create_model_card(self, *args, **kwargs) -> None:
        """Within a checkpoint, raises a failure of one process in all."""
        with self._shared_while_saving():
            super().create_model_card(*args, **kwargs)

    def _shared_while_saving(self):
        """Return the context in which a failure of one process reaches the others before they meet in a checkpoint."""
        return all_or_none(self.accelerator) if self._is_saving else nullcontext()

    def export_model(self, output_dir: str | Path | None = None, dataset_name: str | None = None) -> Path:
        """Write the low-bit policy to `output_dir`, by default `export_dir`, with [`export_checkpoint`], and a card
        with the results of the training and this training set. Over a 4-bit base of bitsandbytes, write the adapter.
        Return the folder. `NotFinite` is raised if a trained tensor has a value that is not finite."""
        self._check_finite("the policy is not exported")
        self._remember(dataset_name=dataset_name)
        folder = Path(output_dir or self.export_dir)
        if getattr(self.model, "is_loaded_in_4bit", False):
            if self.args.should_save:
                self._save(os.fspath(folder))
                (folder / TRAINING_ARGS_NAME).unlink()
            return folder
        card = {**self._card_facts(), "name": self.hub_model_id}
        # While sharded masters are gathered, an error of one process must reach the others.
        with all_or_none(self.accelerator) if is_sharded(self.model) else nullcontext():
            return self.policy.export(folder, self.processing_class, card)

    def _check_finite(self, consequence: str, is_for_all: bool = False) -> None:
        """Raises `NotFinite` if a trained tensor has a NaN or an infinity: in all processes if `is_for_all`, or if the
        tensors are sharded."""
        bad = []
        for name, tensor in self.accelerator.unwrap_model(self.model).named_parameters():
            if tensor.requires_grad and not storage_of(tensor).local(tensor).isfinite().all():
                bad.append(name)
        if is_for_all or is_sharded(self.model):
            bad = sorted(set(gather_object(bad)))
        if not bad:
            return
        update = self.state.global_step
        named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        norms = ((row["step"], row["grad_norm"]) for row in self.state.log_history if "grad_norm" in row)
        first = next((step for step, norm in norms if not math.isfinite(norm)), None)
        since = "" if first is None else f", and the first logged gradient that is not finite is of update {first}"
        raise NotFinite(
            f"After update {update} a trained tensor has a NaN or an infinity ({named}){since}: {consequence}. Earlier "
            "checkpoints stay. Resume from the last one with a lower `max_grad_norm`, start a new run from its weights with a lower "
            "`learning_rate`, or look for a reward or a loss that is not finite."
        )

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
        """Also restores the generation batch in progress, or drops it if this run would have drawn another one. Says
        which of this run's settings of the optimizer do not count, because a checkpoint has its own."""
        given = self._optimizer_settings()
        rounds_gradients = self.is_fsdp_enabled and self.args.gradient_dtype == "bfloat16"
        if rounds_gradients:
            # torch initializes the state of an optimizer by a step with gradients in the masters' dtype.
            keep_gradients_in(self.model, None)
        super()._load_optimizer_and_scheduler(checkpoint)
        if rounds_gradients:
            keep_gradients_in(self.model, torch.bfloat16)
        pairs = zip(self._optimizer_settings(), given, strict=True)
        unused = dict.fromkeys(text for theirs, ours in pairs for text in record.differing(ours, theirs, ours))
        if unused and self.is_world_process_zero():
            message = (
                "The optimizer goes on with the settings that it was saved with in %s (%s). For others, start a new run: give the "
                "checkpoint as the model, without `resume_from_checkpoint`."
            )
            logger.warning(message, checkpoint, "; ".join(unused))
        states = Path(checkpoint or "", RESUME_FILE)
        if (
            checkpoint
            and states.is_file()
            and "optim" not in record.read_json(states)
            and self.is_world_process_zero()
        ):
            logger.warning(
                "%s was saved with save_only_model=True, without states: the optimizer and its schedule begin anew.",
                checkpoint,
            )
        name, device = _BATCH_FILE.format(rank=self.accelerator.process_index), self.accelerator.device
        # A process that was added finds no file. The others find another `num_processes` and start a new batch too.
        if checkpoint is None or (batch := _load(checkpoint, name, device)) is None:
            return
        theirs, ours, ahead = batch["settings"], self._batch_settings(), batch["ahead"]
        if changed := record.differing(ours, theirs, ours):
            message = (
                "The generation batch in progress of %s does not fit this run (%s). It is dropped, and training continues "
                "with a new one. Resume with the same values to use it."
            )
            logger.warning(message, checkpoint, ", ".join(changed))
            return
        self._step, self._buffered_inputs = batch["step"], batch["buffered_inputs"]
        self.policy.exactness.has_differed = batch.get("has_differed", False)
        if self._ahead is not None:
            self._ahead.load(ahead, _load(checkpoint, self._version_file(), device))
        if reason := self._reason_for_another_run(batch, _saved_state(checkpoint).max_steps):
            message = "%s %s. The next batch is drawn by the weights of this update: it is another run than one from the start."
            logger.warning(message, checkpoint, reason)

    def _optimizer_settings(self) -> list[dict[str, Any]]:
        """Return the options of each group of the optimizer that a checkpoint holds too, by their names in a
        configuration or in the optimizer."""
        names = {"initial_lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas", "eps": "eps"}
        groups = getattr(self.optimizer, "param_groups", None) or []
        return [{option: group[name] for name, option in names.items() if name in group} for group in groups]

    def _reason_for_another_run(self, batch: dict[str, Any], max_steps: int) -> str | None:
        """Return why this run has batches of another age than one with its options from the start, or `None`. `batch`
        is of [`~SavesRuns._save_batch`], in a run of `max_steps`."""
        theirs, ours = batch["rollout_ahead"], self.args.rollout_ahead
        if theirs != ours:
            return f"was saved with rollout_ahead={theirs}, and this run has rollout_ahead={ours}"
        if ours and batch["ahead"] is None and max_steps < self.state.max_steps:
            return f"was saved by a run that ended at update {max_steps}, and has no batch that was drawn ahead"
        return None

    def _check_folder_is_free(self) -> None:
        """Raises `ValueError` if another trainer writes to `output_dir`, before a server starts."""
        with all_or_none(self.accelerator):
            if self.accelerator.is_main_process:
                check_free(Path(self.args.output_dir, OUTPUT_LOCK))

    @contextmanager
    def _hold_folder(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Hold `output_dir` during a training; the main process does so for all. Yields the checkpoint from which the
        training continues, `None` for a new run."""
        with ExitStack() as held:
            with all_or_none(self.accelerator):
                if self.is_world_process_zero():
                    held.enter_context(hold(Path(self.args.output_dir, OUTPUT_LOCK)))
            checkpoint = self.find_checkpoint(resume_from_checkpoint)
            self._last_checkpoint = None if checkpoint is None else Path(checkpoint).resolve()
            if checkpoint is not None and self.is_world_process_zero():
                Path(checkpoint, marker.EARLIER_FILE).unlink(missing_ok=True)
            yield checkpoint

    def _version_file(self) -> str:
        """Return the name of the file with the weights that draw the pending batch."""
        part = f"_{self.accelerator.process_index}" if is_sharded(self.model) else ""
        return f"rollout_version{part}.pt"

    def _batch_settings(self) -> dict[str, Any]:
        """Return the settings that decide what a generation batch contains and means, and how it is divided."""
        functions = [*(self.tools or ()), *filter(None, [self.rollout_func])]
        return {
            "num_processes": self.accelerator.num_processes,
            "per_device_train_batch_size": self._train_batch_size,
            **batch_settings(self.args),
            "reward_funcs": [*self.reward_func_names],
            "tools and rollout_func": [getattr(each, "__name__", type(each).__name__) for each in functions],
            # As chosen by this run, on this machine.
            "numerics": self.policy.numerics,
        }

    def _state_settings(self) -> dict[str, Any]:
        adapter = adapter_config(self.model) if self.policy.has_adapter else None
        trained = [p for p in self.model.parameters() if p.requires_grad]
        counts = {"num_trained_tensors": len(trained), "num_trained_parameters": num_elements(trained)}
        return state_settings(self.args, base_model(self.model).config, adapter, self._own_optimizer) | counts


class NotFinite(ValueError):
    """A trained tensor has a NaN or an infinity."""


def _rotate(last: Path, limit: int | None, best: str | None) -> None:
    """Delete checkpoints next to the one in `last`, which was saved just now, until `limit` are left: incomplete ones
    first, then those of earlier steps. The best one stays too. transformers goes by the times of the files, which
    other hosts or a clock that was set back give."""
    if not limit or limit < 0:
        return
    kept = {last.resolve()} | ({Path(best).resolve()} if best else set())
    others = [Path(path) for path in sort_checkpoints(os.fspath(last.parent)) if Path(path).resolve() not in kept]
    others.sort(key=marker.is_complete)
    for path in others[: max(len(others) - max(limit - len(kept), 0), 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _load(checkpoint: str, name: str, device: torch.device | str) -> Any:
    """Loads a file of `torch.save` from a checkpoint, or returns `None` if there is none."""
    path = Path(checkpoint, name)
    return torch.load(path, map_location=device, weights_only=True) if path.is_file() else None


def _saved_state(checkpoint: str) -> TrainerState:
    return TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
