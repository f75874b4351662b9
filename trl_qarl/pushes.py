"""Model cards and pushes of a trainer, which upload the low-bit policy that was trained."""

import logging
import shlex
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress
from trl.trainer.base_trainer import _BaseTrainer
from typing_extensions import override

from .checkpoint import uploads as hub
from .checkpoint.cards import TrainingFacts, make_card
from .checkpoint.files import is_of_the_disk
from .rollout.failures import all_or_none


logger = logging.getLogger(__name__)


class PushesPolicy(_BaseTrainer):
    """Pushes and model cards of a trainer. `hub_export` selects what is uploaded of its `policy`, which is first
    exported to `export_dir`. Inherit from this class before TRL's trainer."""

    args: Any
    policy: Any
    export_dir: Path
    # Arguments of earlier cards: TRL gives later saves none.
    _card_arguments: dict[str, Any] = {}
    # While a checkpoint is being saved.
    _is_saving = False

    @override
    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Writes the card of masters or an adapter. Later cards reuse the arguments. Within a checkpoint, raises a
        failure of one process in all."""
        self._remember(model_name=model_name, dataset_name=dataset_name, tags=tags)
        with self._shared_while_saving():
            if self.is_world_process_zero():
                self._weights_card().save(Path(self.args.output_dir) / "README.md")

    def _shared_while_saving(self):
        """Return the context in which a failure of one process reaches the others before they meet in a checkpoint."""
        return all_or_none(self.accelerator) if self._is_saving else nullcontext()

    def _remember(self, **given) -> None:
        self._card_arguments = self._card_arguments | {name: value for name, value in given.items() if value}

    def _weights_card(self) -> ModelCard:
        title = self._card_arguments.get("model_name") or Path(self.args.output_dir).name
        policy, masters = hub.names(self.args.hub_export, self.hub_model_id)
        made_of, facts = self.model.name_or_path, self._training_facts()
        return make_card("weights", title, made_of, facts, hub_model_id=masters, policy=policy)

    def _training_facts(self) -> TrainingFacts:
        tags = self._card_arguments.get("tags", ())
        tags = [tags] if isinstance(tags, str) else tags
        return TrainingFacts(
            self.policy.card_facts(),
            self.state.log_history,
            str(self.policy.swap_report),
            self._card_arguments.get("dataset_name"),
            frozenset({*tags, *self._tag_names, *(getattr(self.model, "model_tags", None) or ())}),
        )

    def export_model(
        self,
        output_dir: str | Path | None = None,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> Path:
        """Write the low-bit policy to `output_dir`, by default `export_dir`, with [`export_checkpoint`], and a card
        with the results of the training, this title, training set and tags. Return the folder."""
        self._remember(dataset_name=dataset_name, tags=tags)
        folder = Path(output_dir or self.export_dir)
        policy, masters = hub.names(self.args.hub_export, self.hub_model_id)
        card = {"facts": self._training_facts(), "title": model_name, "hub_model_id": policy, "masters": masters}
        # While sharded masters are gathered, an error of one process must reach the others.
        with all_or_none(self.accelerator) if self.policy.takes_all_processes else nullcontext():
            return self.policy.export(folder, self.processing_class, card)

    @override
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repositories of `hub_export`; an error names the remedy."""
        if self.is_world_process_zero():
            args = self.args
            private = args.hub_private_repo if private is None else private
            name = hub.repository_name(args)
            self.hub_model_id = hub.create_repositories(args.hub_export, name, token or args.hub_token, private)
            self.push_in_progress = None

    @override
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """
        Uploads what `hub_export` names. Masters and low-bit policy are on disk before the Hub is contacted, and
        [`~trl_qarl.checkpoint.uploads.PushFailed`] has the commands that repeat a failed push. `private`, by default
        `args.hub_private_repo`, applies to new repositories; `kwargs` are those of `create_model_card`.
        """
        args, token = self.args, token or self.args.hub_token
        private = args.hub_private_repo if private is None else private
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._finish_current_push()
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            if self.policy.takes_all_processes and hub.exports_policy(self.args.hub_export):
                self.export_model()
            return None
        if self.hub_model_id is None:
            self.hub_model_id = hub.full_name(hub.repository_name(args), token)
        hub.cache_card(self.model.name_or_path, token)
        self.create_model_card(**{"model_name": self.hub_model_id.rpartition("/")[2], **kwargs})
        revision = revision or args.hub_revision
        uploads = self._write_for_hub(Path(args.output_dir), revision, private, **kwargs)
        given = (commit_message, token, private, revision)
        return hub.push(uploads, *given) if blocking else self._push_in_background(uploads, *given)

    def _push_in_background(self, *args) -> Future:
        """Run [`~trl_qarl.checkpoint.uploads.push`] in another thread; training continues, and a failure is logged."""

        def run() -> CommitInfo:
            try:
                return hub.push(*args)
            except hub.PushFailed as error:
                logger.error("%s", error)
                raise

        job = HfApi().run_as_future(run)
        self.push_in_progress = PushInProgress([job])
        return job

    def _write_for_hub(
        self, masters: Path, revision: str | None, private: bool | None, checkpoint: str | None = None, **kwargs
    ) -> list[hub.Upload]:
        """Export the policy if it is pushed, and return the uploads; `masters` is the folder of the masters."""
        policy, name = self.export_dir, self.hub_model_id
        try:
            if hub.exports_policy(self.args.hub_export):
                self.export_model(**{"model_name": name.rpartition("/")[2], **kwargs})
        except Exception as error:
            if not is_of_the_disk(error):
                raise
            argv = ["trl-qarl", "export", "--model_name_or_path", masters, "--output_dir", policy, "--push_to_hub"]
            argv += ["--hub_model_id", name] + ["--hub_private_repo"] * bool(private)
            command = shlex.join(map(str, argv + (["--hub_revision", revision] if revision else [])))
            raise hub.PushFailed(
                f"Nothing was pushed to {name}: the low-bit policy could not be written to {policy}: {error}\nNothing is "
                f"lost: the masters are saved in {masters}. Free disk space, or choose another folder, and repeat:\n  {command}"
            ) from error
        return hub.plan(self.args.hub_export, name, policy, masters, checkpoint)

    @override
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads what `hub_export` names in the background, once the checkpoint is complete: transformers calls this
        while it is being saved too. Failures are logged, and training continues."""
        args, folder = self.args, Path(checkpoint_folder)
        if self._is_saving or not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if not (self.push_in_progress is None or self.push_in_progress.is_done() or args.hub_always_push):
            return
        # The push in progress reads the folder that is written next.
        self._finish_current_push()
        self.callback_handler.on_push_begin(args, self.state, self.control)
        places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}
        try:
            place = places.get(args.hub_strategy)
            uploads = self._write_for_hub(folder, args.hub_revision, args.hub_private_repo, place)
        except hub.PushFailed as error:
            logger.error("%s", error)
            return
        message = f"Training in progress, step {self.state.global_step}"
        self._push_in_background(uploads, message, args.hub_token, args.hub_private_repo, args.hub_revision)
