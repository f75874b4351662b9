"""Cards that a trainer writes, and its pushes to the Hub."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress
from trl.trainer.base_trainer import _BaseTrainer
from typing_extensions import override

from ..hub import create_repository, upload, write_card
from ..quantization.storage import is_sharded


logger = logging.getLogger(__name__)


class PushesPolicy(_BaseTrainer):
    """Cards and pushes of a trainer. Inherit from this class before TRL's trainer."""

    args: Any
    policy: Any
    export_dir: Path
    export_model: Callable[..., Path]
    # Arguments of earlier cards: TRL gives later saves none.
    _card_arguments: dict[str, Any] = {}

    @override
    def create_model_card(self, model_name=None, dataset_name=None, tags=None) -> None:
        """Writes the card of masters or an adapter. Later cards reuse the arguments."""
        self._remember(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if self.is_world_process_zero():
            self._write_card(Path(self.args.output_dir))

    def _remember(self, **given: Any) -> None:
        self._card_arguments = self._card_arguments | {name: value for name, value in given.items() if value}

    def _write_card(self, folder: Path) -> None:
        """Write the card of the masters or the adapter in a folder."""
        about, name = self._card_facts(), Path(self.args.output_dir).name
        if getattr(self.model, "is_loaded_in_4bit", False):
            options = self.model.config.quantization_config.to_dict()
            about["quantization"] = {n: v for n, v in options.items() if n.startswith(("load_in_4bit", "bnb_"))}
            about["dtype"] = str(self.model.dtype).removeprefix("torch.")
            name = self.hub_model_id or folder.name
        write_card(folder, name, self.model.name_or_path, **about)

    def _card_facts(self) -> dict[str, Any]:
        """Return the facts about the training for [`write_card`]."""
        given = {"title": self._card_arguments.get("model_name"), "dataset": self._card_arguments.get("dataset_name")}
        tags = self._card_arguments.get("tags", ())
        tags = {*([tags] if isinstance(tags, str) else tags), *(getattr(self.model, "model_tags", None) or ())}
        given |= {"tags": tags | {*self._tag_names}, "report": str(self.policy.swap_report)}
        return given | {"settings": self.policy.card_facts(), "history": self.state.log_history}

    @override
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository before the training; an error names the remedy."""
        args = self.args
        if self.is_world_process_zero():
            name = args.hub_model_id or Path(args.output_dir).absolute().name
            self.hub_model_id = create_repository(name, token or args.hub_token, self._is_private(private))
            self.push_in_progress = None

    @override
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ):
        """Saves the masters, exports the policy, and uploads the export; [`PushFailed`] has the command that pushes it
        again. `private`, by default `hub_private_repo`, counts for a new repository, and the last three arguments are
        those of `create_model_card`."""
        args, token = self.args, token or self.args.hub_token
        self._finish_current_push()
        self.save_model(_internal_call=True)
        self._remember(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if self.hub_model_id is None and self.is_world_process_zero():
            self.hub_model_id = args.hub_model_id or Path(args.output_dir).absolute().name
            # A Hub that cannot be reached fails at the upload, after the export.
            with suppress(Exception):
                if "/" not in self.hub_model_id:
                    self.hub_model_id = f"{HfApi().whoami(token)['name']}/{self.hub_model_id}"
        return self._push(commit_message, blocking, token, revision or args.hub_revision, private)

    @override
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Does nothing: transformers calls it before the checkpoint is complete, and `_push_saved` takes its place."""

    def _push_saved(self) -> None:
        """Push the policy in the background after a save. A failed upload is logged. Every process has to call."""
        args, job = self.args, getattr(self, "push_in_progress", None)
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END:
            return
        # Only the main process knows.
        is_busy = [job is not None and not job.is_done() and not args.hub_always_push]
        broadcast_object_list(is_busy)
        if not is_busy[0]:
            message = f"Training in progress, step {self.state.global_step}"
            self._finish_current_push()
            self._push(message, False, args.hub_token, args.hub_revision)

    def _is_private(self, private: bool | None) -> bool | None:
        return self.args.hub_private_repo if private is None else private

    def _push(
        self, message: str | None, blocking: bool, token: str | None, revision: str | None, private: bool | None = None
    ):
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.is_world_process_zero() or is_sharded(self.model):
            self.export_model()
        if not self.is_world_process_zero():
            return None
        given = self.export_dir, self.hub_model_id, message, token, self._is_private(private), revision
        if blocking:
            return upload(*given)
        job = HfApi().run_as_future(upload, *given)
        job.add_done_callback(lambda job: job.exception() and logger.error("%s", job.exception()))
        self.push_in_progress = PushInProgress([job])
        return job
