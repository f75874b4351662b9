import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from testing_utils import make_tiny_config, path_without, refused
from testing_utils.pictures import make_picture_config, needs_torchvision
from testing_utils.trainings import QUANTIZED
from trl_qarl._version import __version__
from trl_qarl.cli import main


@pytest.fixture
def config_only(tmp_path):
    """Folder with the configuration of a tiny model and no weights."""
    make_tiny_config("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_judged_by_its_configuration(config_only, capsys):
    assert main(["doctor", str(config_only), "--scheme", "w8a8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warning") for line in lines[:-1])
    assert sum("kernel of w8a8" in line for line in lines) == sum("kernel" in line for line in lines) == 1
    assert any(f"trl-qarl {__version__}, torch {version('torch')}" in line for line in lines)
    assert any("Qwen3ForCausalLM" in line for line in lines)


@pytest.mark.vllm
def test_a_low_bit_checkpoint_is_judged_by_its_layers(export, capsys):
    assert main(["doctor", export]) == 0
    assert "LlamaForCausalLM trains with vLLM" in capsys.readouterr().out
    assert main(["estimate", export, "--gpu_memory", "80"]) == 0


@pytest.mark.parametrize(
    "command", ["doctor adapter", "estimate adapter --gpu_memory 80", "vllm-serve --model adapter"]
)
def test_the_base_of_an_adapter_is_named(tmp_path, monkeypatch, capsys, command):
    pytest.importorskip("peft").LoraConfig(base_model_name_or_path="its/base").save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    assert "adapter is an adapter. Name its base, 'its/base'." in refused(capsys, *command.split())


@pytest.mark.parametrize(
    ("arch", "cls", "text"),
    [
        ("t5", "T5ForConditionalGeneration", "a T5ForConditionalGeneration, whose decoder reads an encoder's output"),
        ("qwen3", "Qwen3ForSequenceClassification", "a Qwen3ForSequenceClassification, which generates no text"),
    ],
)
def test_what_no_training_takes_is_named(tmp_path, capsys, arch, cls, text):
    make_tiny_config(arch, architectures=[cls]).save_pretrained(tmp_path)
    assert text in refused(capsys, "doctor", str(tmp_path))


def test_a_package_that_a_model_needs_is_named(config_only, monkeypatch, capsys):
    def need(*args):
        raise ImportError("\nIts tower requires timm.\n")

    monkeypatch.setattr("trl_qarl.doctor.memory.skeleton", need)
    assert "Its tower requires timm." in refused(capsys, "doctor", str(config_only))


def test_every_scheme_has_a_kernel_here(capsys):
    assert main(["doctor"]) == 0
    found = re.findall(r"^ok +kernel of ([\w-]+): ", capsys.readouterr().out, re.MULTILINE)
    assert found == QUANTIZED


def test_an_error_gives_exit_code_one(config_only, capsys):
    config = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))
    assert main(["doctor", "--model", str(config_only), "--scheme", "w4a16"]) == 1
    assert "in_features=200" in capsys.readouterr().out


@pytest.fixture
def broken_torchvision(tmp_path, monkeypatch):
    """A package that fails at its import as a build for another PyTorch does."""
    (tmp_path / "torchvision").mkdir()
    error = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision" / "__init__.py").write_text(error)
    (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
    others = path_without(tmp_path, "vllm", "deepspeed", "bitsandbytes")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), others]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("from trl_qarl import QaRLTrainer", marks=pytest.mark.nightly),
        pytest.param("import trl_qarl.cli as c, sys; sys.exit(c.main(['doctor']))", marks=pytest.mark.nightly),
        "import trl_qarl.cli as c, sys; sys.exit(c.main('train --model_name_or_path m --reward_funcs accuracy_reward '"
        "'--dataset_name d --output_dir o'.split()))",
    ],
)
def test_a_mismatched_torchvision_is_named_with_the_fix(broken_torchvision, command):
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    last = (done.stdout or done.stderr).splitlines()[-1]
    assert done.returncode == 1 and last.endswith("pip uninstall torchvision torchaudio torchcodec")
    assert "torchvision::nms" in last


@needs_torchvision
@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl"])
def test_a_model_of_pictures_is_judged_by_its_language_model(kind, tmp_path, monkeypatch, capsys):
    """Towers have sizes that no group divides, as Qwen2.5-VL's of 3420."""
    # vLLM inspects its class in a process of its own.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = make_picture_config(kind)
    config.vision_config.intermediate_size = 180
    config.save_pretrained(tmp_path)
    # Without a processor it would not train with vLLM.
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert main(["doctor", "--model", str(tmp_path), "--scheme", "w4a16"]) == 0
    assert "trains with vLLM" in capsys.readouterr().out
    assert main(["estimate", str(tmp_path), "--gpu_memory", "24"]) == 0
    assert "Launch with" in capsys.readouterr().out


def test_a_missing_vllm_is_named_with_a_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr("trl_qarl.doctor.checks.find_spec", lambda name: None)
    assert main(["doctor", "--engine"]) == 1
    assert '`pip install ".[vllm]"` in a clone of trl_qarl' in capsys.readouterr().out
