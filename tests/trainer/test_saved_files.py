"""Files that a training leaves: valid, without secrets, and an error that names a full disk."""

import json
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from testing_utils import make_tiny_model, make_trainer, run_export
from trl_qarl.checkpoint.files import name_disk_errors


@pytest.mark.parametrize("options", [{"temperature": 0.6, "top_p": 0.9}, {"length_penalty": 2.0}])
def test_an_invalid_generation_config_is_saved_unchanged(tmp_path, options):
    """transformers loads such files, and before 5.24 refuses to save them."""
    folder = Path(make_tiny_model(tmp_path, "qwen2"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    trainer = make_trainer(str(folder), tmp_path / "run", save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.export_model()
    for saved in (tmp_path / "run", tmp_path / "run" / "checkpoint-1", tmp_path / "run" / "w4a16"):
        written = json.loads((saved / "generation_config.json").read_text())
        assert {name: written.get(name) for name in options} == options and not written.get("do_sample")
    assert run_export(tmp_path / "run", tmp_path / "again") == 0


def test_no_file_of_a_training_has_the_token(tiny_model, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = make_trainer(tiny_model, tmp_path, hub_token="hf_secret_of_the_user", **options)
    trainer.train()
    trainer.save_model()
    trainer.export_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"checkpoint-1/training_args.bin", "training_args.bin"} <= {str(p.relative_to(tmp_path)) for p in files}
    assert [path for path in files if b"hf_secret_of_the_user" in path.read_bytes()] == []
    assert trainer.args.hub_token == "hf_secret_of_the_user"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_full_disk_is_named(tiny_model, tmp_path):
    """A file system of its own, in memory, on which the masters fit and not the optimizer."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount")
    size = sum(p.stat().st_size for p in Path(tiny_model).iterdir()) + 400_000
    assert size < 2 * sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    script = f"""
    from testing_utils import make_trainer
    options = {{"save_strategy": "steps", "save_steps": 1, "max_steps": 1}}
    make_trainer({tiny_model!r}, {str(tmp_path)!r}, **options).train()
    """
    mount = f"mount -t tmpfs -o size={size} none {tmp_path} && exec {sys.executable} -c {shlex.quote(textwrap.dedent(script))}"
    tests = Path(__file__).parents[1]
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mount], cwd=tests, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "No space left" in last and "checkpoint-1" in last, done.stderr[-3000:]


@pytest.mark.parametrize(
    "said", ["[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0", "iostream error"]
)
def test_what_torch_says_of_a_full_disk_is_put_into_words(tmp_path, said):
    with (
        pytest.raises(OSError, match="No space left on the device, or over a quota") as error,
        name_disk_errors(tmp_path),
    ):
        raise RuntimeError(said)
    assert error.value.filename == str(tmp_path) and said in str(error.value)
