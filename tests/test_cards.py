"""
The Python code of every card is run as its reader would run it: in the folder next to the export, with plain
transformers, in a process that cannot import trl_qarl.
"""

import os
import shlex
import sys
from importlib.util import find_spec

import pytest
import torch
import transformers
from packaging.version import Version
from test_docs import ROOT, blocks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
)

from testing_utils import make_own_code, make_tiny_mixture, make_tiny_model, make_trainer
from testing_utils.pictures import make_tiny_picture_model
from testing_utils.trainings import lora
from trl_qarl.adapters.base import prepare_base
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.cli import main
from trl_qarl.hub import serve_command
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.schemes import SCHEMES
from trl_qarl.quantization.swap import prepare_model


TOKENS = torch.arange(10, 34).view(2, 12)
# Exports by name: the scheme, and what is exported.
EXPORTS = {scheme: (scheme, "model") for scheme in SCHEMES}
EXPORTS |= {f"{scheme}-adapter": (scheme, "adapter") for scheme in SCHEMES}
EXPORTS |= {kind: ("w4a16", kind) for kind in ("mixture", "pictures", "own code")}
# Runs the Python code of each card that is named, and saves the logits of its model.
RUNNER = f"""
import pathlib, re, sys, torch, traceback
assert sys.modules["trl_qarl"] is None
for name in sys.argv[1:]:
    (code,) = re.findall("^```python\\n(.*?)^```", pathlib.Path(name, "README.md").read_text(), re.DOTALL | re.MULTILINE)
    done = {{}}
    try:
        exec(code, done)
        with torch.no_grad():
            logits = done["model"](torch.tensor({TOKENS.tolist()})).logits.float()
        torch.save(logits, name + ".logits")
    except Exception:
        pathlib.Path(name + ".error").write_text(traceback.format_exc())
"""


def code_of(folder, language="python"):
    return blocks(folder / "README.md", language)


def make_learner(folder, scheme, kind):
    """A policy with trained weights in bfloat16, and its tokenizer."""
    sources = {"mixture": make_tiny_mixture, "pictures": make_tiny_picture_model, "own code": make_own_code}
    source = sources.get(kind, make_tiny_model)
    path = source(folder, {"mixture": "qwen3_moe", "pictures": "qwen2_5_vl"}.get(kind, "qwen2"))
    if kind == "pictures":
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
        processing_class = AutoProcessor.from_pretrained(path)
    else:
        options = {"trust_remote_code": True} if kind == "own code" else {}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)
        processing_class = AutoTokenizer.from_pretrained(path)
    if kind == "adapter":
        from peft import get_peft_model

        model = get_peft_model(model, lora(r=20, init_lora_weights=False))
        prepare_base(model, get_plan(scheme), keep_masters=False, scale_dtype=torch.bfloat16)
    elif scheme != "bf16":
        prepare_model(model, scheme, scale_dtype=torch.bfloat16)
    return model.eval(), processing_class


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder with all exports, and the learners' logits of them."""
    folder, logits = tmp_path_factory.mktemp("exports"), {}
    for name, (scheme, kind) in EXPORTS.items():
        if kind == "pictures" and find_spec("torchvision") is None:
            continue
        model, processing_class = make_learner(folder / "masters" / kind, scheme, kind)
        export_checkpoint(model, folder / name, processing_class, torch.bfloat16)
        with torch.no_grad():
            logits[name] = model(TOKENS).logits.float()
    return folder, logits


@pytest.fixture(scope="module")
def read(learned, warm):
    """The folder, in which a process has run the Python code of all cards."""
    folder, logits = learned
    run_code_of(warm, folder, *[name for name in logits if code_of(folder / name)])
    return folder, logits


def run_code_of(warm, folder, *names):
    """Run the Python code of cards in a process that cannot import trl_qarl."""
    (folder / "runner.py").write_text(RUNNER)
    command = warm.start([sys.executable, "runner.py", *names], os.environ, log := folder / "log", folder, "plain")
    assert command.wait(900) == 0, log.read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_code_of_a_card_loads_the_policy(read, name):
    folder, logits = read
    if name not in logits:
        pytest.skip("needs torchvision")
    if not code_of(folder / name):
        assert "transformers cannot read this layout" in (folder / name / "README.md").read_text()
        return
    error = folder / f"{name}.error"
    assert not error.exists(), error.read_text()
    ours = torch.load(folder / f"{name}.logits")
    # Rounding in bfloat16, and activations that transformers does not quantize.
    assert (ours - logits[name]).abs().max() < 0.1 * logits[name].abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("w8a8-adapter", True), ("fp8-adapter", True), ("w4a16-adapter", False)])
def test_a_base_rounds_activations_as_its_card_says(learned, name, rounds):
    """The code of a card dequantizes the weights for PEFT. From transformers 5.23 on such a model is dense."""
    said = "transformers>=5.23 does not round activations" in (learned[0] / name / "README.md").read_text()
    assert said == rounds
    rounds &= Version(transformers.__version__) < Version("5.23")
    bits = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(learned[0] / name, quantization_config=bits)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        is_rounded = not torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert is_rounded == rounds


def test_pages_serve_an_export_as_its_card_does(tmp_path):
    """What the commands of the pages serve is compared in tests/journeys."""
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert f"\n{serve_command(tmp_path, 'out/w4a16')}" in (ROOT / "docs" / "publish_and_serve.md").read_text()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 16}')
    assert f"\n{serve_command(tmp_path, 'deploy')}\n" in (ROOT / "docs" / "adapters.md").read_text()


def test_command_of_the_masters_card_exports_the_policy(tiny_model, tmp_path, monkeypatch, capsys):
    trainer = make_trainer(tiny_model, tmp_path / "out", max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.export_model(tmp_path / "ours")
    monkeypatch.chdir(tmp_path)
    (commands,) = code_of(tmp_path / "out", "sh")
    program, *arguments = shlex.split(commands)
    assert program == "trl-qarl" and main(arguments) == 0
    written = (tmp_path / "out-export" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "ours" / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_card_of_an_adapter_over_bitsandbytes_loads_it(tiny_model, tmp_path, warm):
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"scheme": "bf16", "bf16": False, "max_steps": 1, "learning_rate": 1e-2}
    trainer = make_trainer(tiny_model, tmp_path / "out", peft_config=lora(), quantization_config=bits, **options)
    trainer.train()
    trainer.export_model(tmp_path / "export")
    run_code_of(warm, tmp_path, "export")
    assert not (error := tmp_path / "export.error").exists(), error.read_text()
    with torch.no_grad():
        theirs = trainer.model.eval()(TOKENS).logits
    assert (torch.load(tmp_path / "export.logits") - theirs).abs().max() < 1e-5
