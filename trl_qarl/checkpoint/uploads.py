"""
Uploads to the Hub: the files, their repository, and the commands that repeat a failed upload.
docs/publish_and_serve.md has the table of what goes where.
"""

import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from .._version import __version__
from .marker import COMPLETE_FILE


logger = logging.getLogger(__name__)

_CHECKPOINT_STATE = (
    *("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "rollout_*.pt"),
    *("trainer_state.json", COMPLETE_FILE),
    # Of DeepSpeed, and FSDP's second copy of the masters.
    *("global_step*", "latest", "zero_to_*.py", "pytorch_model_fsdp.bin"),
)
# `training_args.bin` contains a token that was given as an option; completions and logs stay on the training machine.
_PRIVATE = ("training_args.bin", "*.jsonl", "run.json", "*.log", "completions/*", ".*", "_*")
# An earlier model in the repository may have more shards, or an adapter, which `from_pretrained` would load.
_STALE = ("model*.safetensors", "model.safetensors.index.json", "adapter_*", "model.gguf")


class PushFailed(OSError):
    """An upload failed. The message names the files on disk and the commands that repeat the upload."""


@dataclass(frozen=True)
class Upload:
    """Upload of one folder to one repository, to its top or to `path_in_repo`, without files that match `exclude`.
    Files of the repository that match `delete` are deleted unless they are uploaded."""

    repo_id: str
    folder: Path
    path_in_repo: str = ""
    exclude: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()

    def command(self, private: bool | None = None, revision: str | None = None) -> str:
        """Return the equivalent shell command."""
        argv = ["hf", "upload", self.repo_id, os.fspath(self.folder), self.path_in_repo or "."]
        argv += ["--private"] * bool(private) + (["--revision", revision] if revision else [])
        for option, patterns in (("--exclude", self.exclude), ("--delete", self.delete)):
            for pattern in patterns:
                argv += [option, pattern]
        return shlex.join(argv)


def exports_policy(hub_export: str) -> bool:
    """Return whether the low-bit policy is pushed."""
    return hub_export in ("low-bit", "both")


def repositories(hub_export: str, name: str) -> tuple[str, str]:
    """Return the repository for loading by name, and the repository of masters and checkpoints."""
    return name, f"{name}-masters" if exports_policy(hub_export) else name


def repository_name(config) -> str:
    """Return the repository of a configuration, by default named after the output directory. `ValueError` is raised if
    this is not a valid name."""
    name = config.hub_model_id or Path(config.output_dir).absolute().name
    if problem := problem_of_name(name, config.hub_export):
        raise ValueError(problem)
    return name


def names(hub_export: str, name: str | None) -> tuple[str | None, str | None]:
    """Return the repositories of the low-bit policy and of the masters, `None` if not pushed."""
    if name is None:
        return None, None
    repo_id, masters_id = repositories(hub_export, name)
    return repo_id if exports_policy(hub_export) else None, None if hub_export == "low-bit" else masters_id


def plan(hub_export: str, name: str, policy: Path, masters: Path, checkpoint: str | None = None) -> list[Upload]:
    """
    Return the uploads to the repository `name`, with its namespace, for a value of `hub_export`. `policy` is the
    folder of the low-bit policy; `masters` is the folder of masters or adapter: output directory or checkpoint.
    `checkpoint` is a folder of the repository for all of `masters`, a checkpoint from which training can continue.
    """
    repo_id, masters_id = repositories(hub_export, name)
    uploads = []
    if exports_policy(hub_export):
        uploads.append(Upload(repo_id, policy, exclude=(".*",), delete=_STALE))
    if hub_export != "low-bit":
        exclude = (*_PRIVATE, *_CHECKPOINT_STATE, "checkpoint-*")
        if policy.absolute().is_relative_to(masters.absolute()):
            exclude += (f"{policy.absolute().relative_to(masters.absolute())}/*",)
        delete = _STALE if hub_export != "adapter" else _STALE[:2]
        uploads.append(Upload(masters_id, masters, exclude=exclude, delete=delete))
    if checkpoint is not None:
        uploads.append(Upload(masters_id, masters, checkpoint, exclude=_PRIVATE, delete=("*",)))
    return uploads


def push(
    uploads: list[Upload], message: str, token: str | None, private: bool | None, revision: str | None
) -> CommitInfo:
    """Upload each folder to its repository, which is created if missing, and return the first folder's commit.
    [`PushFailed`] names the commands for uploads that are left."""
    api, commits = _api(), []
    for index, upload in enumerate(uploads):
        try:
            repo_id = api.create_repo(upload.repo_id, token=token, private=private, exist_ok=True).repo_id
            if revision not in (None, constants.DEFAULT_REVISION):
                api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
            commits.append(
                api.upload_folder(
                    repo_id=repo_id,
                    folder_path=upload.folder,
                    path_in_repo=upload.path_in_repo,
                    commit_message=message,
                    token=token,
                    revision=revision,
                    ignore_patterns=[*upload.exclude],
                    delete_patterns=[*upload.delete] or None,
                )
            )
        except Exception as error:  # httpx, hf_xet and huggingface_hub have no common class
            commands = "\n".join(f"  {left.command(private, revision)}" for left in uploads[index:])
            raise PushFailed(
                f"The push to {upload.repo_id} failed: {_describe(error)}\n"
                f"Nothing is lost: everything is saved in {upload.folder}. To repeat the push, which sends only missing files:"
                f"\n{commands}"
            ) from error
    return commits[0]


def create_repositories(hub_export: str, name: str, token: str | None, private: bool | None) -> str:
    """Create missing repositories of a push, and return the first one's name with its namespace. [`PushFailed`] is
    raised if one cannot be created."""
    found = []
    for repo_id in filter(None, names(hub_export, name)):
        try:
            found.append(_api().create_repo(repo_id, token=token, private=private, exist_ok=True).repo_id)
        except Exception as error:
            raise PushFailed(
                f"push_to_hub was given, but the repository {repo_id} could not be created: {_describe(error)}\nNothing else has "
                "been done yet. Remove `push_to_hub` to continue without the Hub, and push the result later."
            ) from error
    return found[0]


def full_name(name: str, token: str | None) -> str:
    """Return `name` with the user's namespace, or unchanged if the Hub does not identify the token's user."""
    if "/" in name:
        return name
    try:
        return f"{_api().whoami(token)['name']}/{name}"
    except Exception:
        return name


def cache_card(name_or_path: str | None, token: str | None = None) -> None:
    """Download a base model's card, whose licence goes into our card. A missing card is ignored."""
    if name_or_path and not Path(name_or_path).exists():
        try:
            hf_hub_download(name_or_path, constants.REPOCARD_NAME, token=token)
        except Exception as error:
            logger.debug("No card of %s: %s", name_or_path, error)


def problem_of_name(name: str, hub_export: str) -> str | None:
    """Return the problem of a repository's name, or `None`."""
    try:
        for repo_id in repositories(hub_export, name):
            validate_repo_id(repo_id)
    except HFValidationError as error:
        return (
            f"hub_model_id={name!r} is not a valid name of a repository: {str(error).rstrip('.')}. Give `hub_model_id` as "
            "'USER/NAME', or as 'NAME' in your own namespace."
        )
    return None


def problem_of_access(token: str | None) -> str | None:
    """Return the reason why nothing can be pushed, as far as this machine knows, or `None`."""
    if constants.is_offline_mode():
        return "push_to_hub was given, but HF_HUB_OFFLINE is set. Unset it, or remove `push_to_hub` and push later."
    if token is None and get_token() is None:
        return "push_to_hub was given, but there is no token for the Hub. Run `hf auth login`, set HF_TOKEN, or give `hub_token`."
    return None


def _api() -> HfApi:
    return HfApi(library_name="trl-qarl", library_version=__version__)


def _describe(error: Exception) -> str:
    # The error of an upload in a thread names the file, and its cause the reason.
    causes = [error, error.__cause__] if type(error) is RuntimeError and error.__cause__ else [error]
    text = " ".join(" ".join(str(cause).split()) or type(cause).__name__ for cause in causes)
    status = getattr(getattr(causes[-1], "response", None), "status_code", None)
    if status == 401:
        return f"{text} The Hub does not know the token. Run `hf auth login`, or set HF_TOKEN to one that can write."
    if status == 403:
        return f"{text} The token may not write there. Take one that can, or another `hub_model_id`."
    if status is None and not isinstance(causes[-1], OfflineModeIsEnabled | ValueError):
        return f"{text} (the Hub is {constants.ENDPOINT})"
    return text
