"""Random models in the shapes of real ones, with a tokenizer made on the spot: nothing is downloaded."""

import os
from pathlib import Path
from typing import Any


_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32768,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "0.1b": _LLAMA
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "0.5b": _LLAMA
    | {
        "hidden_size": 1280,
        "intermediate_size": 3456,
        "num_hidden_layers": 26,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
    },
    "1.5b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}
"""
Fields of a configuration by name. `tiny` is for a trial on a CPU; the names of numbers are billions of parameters in
the proportions of Llama.
"""

SIZES = [name.removesuffix("b") for name in SHAPES if name[0].isdigit()]
"""Billions of parameters of those."""


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
