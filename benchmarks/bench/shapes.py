"""Random models in the shapes of real ones, with a tokenizer made on the spot: nothing is downloaded."""

import os
from pathlib import Path
from typing import Any


_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
_QWEN2["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = _QWEN2 | {"model_type": "qwen3", "max_position_embeddings": 40960, "head_dim": 128}
_TINY = _QWEN3 | {"vocab_size": 512, "head_dim": 64, "max_position_embeddings": 512}


def _shape(fields: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, key_heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return fields | sizes | {"num_attention_heads": heads, "num_key_value_heads": key_heads}


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape(_SMOLLM2, 576, 1536, 30, 9, 3),
    "qwen2.5-0.5b": _shape(_QWEN2, 896, 4864, 24, 14, 2),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16, 8),
    "qwen3-8b": _shape(_QWEN3 | {"tie_word_embeddings": False}, 4096, 12288, 36, 32, 8),
    "tiny": _shape(_TINY, 128, 256, 2, 2, 1),
}
"""Fields of a configuration by name. `tiny` is for a trial on a CPU."""


def make_config(shapes: str, num_layers: int | None = None):
    """Configuration of the shapes in [`SHAPES`], with `num_layers` decoder layers if given."""
    from transformers import AutoConfig

    fields = dict(SHAPES[shapes])
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def random_model(config, dtype):
    """A model of `config` with random weights, made where it will compute."""
    import torch
    from transformers import AutoModelForCausalLM

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def write_random_model(shapes: str, num_layers: int | None = None) -> str:
    """Configuration and tokenizer, which is what an engine reads, in a folder of the cache; weights are made when it
    is loaded."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_qarl"
    folder = cache / f"random-{shapes}{'' if num_layers is None else f'-{num_layers}-layers'}"
    config = make_config(shapes, num_layers)
    # vLLM looks for the name of a class.
    config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
    config.save_pretrained(folder)
    _byte_tokenizer(config.vocab_size).save_pretrained(folder)
    return str(folder)


def write_weights(shapes: str, folder: Path) -> str:
    """Model and tokenizer in `folder`, for a training."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_random_model(shapes), eos_token="<300>", pad_token="<301>")
    tokenizer.save_pretrained(folder)
    random_model(make_config(shapes), torch.float32).cpu().save_pretrained(folder)
    return str(folder)


def has_weights(path: str) -> bool:
    """Return whether `path`, which may be the name of a model on the Hub, is not a folder of
    [`write_random_model`]."""
    return not Path(path).is_dir() or any(Path(path).glob("*.safetensors*")) or any(Path(path).glob("*.bin"))


def _byte_tokenizer(vocab_size: int):
    """One token per byte, and as many more as the model can sample, each with a text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"<{index}>" for index in range(len(texts), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left")
