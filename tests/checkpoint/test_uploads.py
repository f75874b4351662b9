"""The commands of the documentation that push, against a stand-in for the Hub, and what they refuse."""

import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from testing_utils import make_trainer, run_export
from testing_utils.hub_stand_in import fails_at, local_files, pushed_files, run_hf
from trl_qarl.checkpoint.export import is_export
from trl_qarl.checkpoint.uploads import plan
from trl_qarl.cli import main
from trl_qarl.options import CHOICES


PAGE = Path(__file__).parents[2] / "docs/publish_and_serve.md"


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """The output directory of a run of two updates, with masters."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    trainer = make_trainer(tiny_model, folder, max_steps=2, bf16=True)
    trainer.train()
    trainer.save_model()
    return folder


def documented(start):
    """The command of the documentation that begins so, with a user of the stand-in."""
    (command,) = re.findall(
        rf"^{start}.*(?: \\\n.*)*", PAGE.read_text().partition("## Push to the Hub")[2], re.MULTILINE
    )
    return shlex.split(command.replace("\\\n", "").replace("USER", "someone"))


@pytest.mark.slow
def test_documented_commands_push_an_export(trained, monkeypatch, hub, tmp_path, capsys):
    monkeypatch.chdir(trained.parent)
    assert main(documented("trl-qarl export")[1:]) == 0
    assert "Pushed to someone/NAME. To serve it: vllm serve someone/NAME\n" in capsys.readouterr().out
    files = pushed_files(hub, "someone/NAME")
    assert files == local_files(trained / "w4a16") and is_export(trained / "w4a16")
    card = files["README.md"].decode()
    assert "# NAME\n" in card and "vllm serve someone/NAME\n" in card and "| reward, " in card
    assert ("reward.png" in files) == ("![reward by training step](reward.png)" in card)

    hub.repos.clear()
    run_hf(hub, tmp_path / "home", *documented("hf upload")[1:])
    assert pushed_files(hub, "someone/NAME") == files


def test_documented_script_pushes(trained, tiny_model, monkeypatch, hub, tmp_path):
    monkeypatch.chdir(trained.parent)
    code = PAGE.read_text().partition("## Push to the Hub")[2].partition("```python\n")[2].partition("```")[0]
    trainer = make_trainer(tiny_model, tmp_path / "out", max_steps=1)
    exec(code, {"trainer": trainer})
    assert pushed_files(hub, "someone/out") == local_files(tmp_path / "out" / "w4a16")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--push_to_hub"], "--push_to_hub needs the repository: give --hub_model_id USER/NAME"),
        (["--push_to_hub", "--hub_model_id", "a/b/c"], "hub_model_id='a/b/c' is not"),
        (["--hub_model_id", "someone/x"], "--hub_model_id was given without --push_to_hub"),
        (["--hub_private_repo"], "--hub_private_repo was given without --push_to_hub"),
        (["--push_to_hub", "--hub_model_id", "other/x"], "The token may not write there"),
    ],
)
def test_export_refuses_a_push_that_cannot_be_before_it_writes(trained, tmp_path, hub, capsys, options, says):
    with pytest.raises(SystemExit, match="2"):
        run_export(trained, tmp_path / "x", *options)
    assert says in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_export_whose_push_fails_keeps_it_and_ends_with_code_three(trained, tmp_path, hub, capsys):
    arguments = trained, tmp_path / "x", "--push_to_hub", "--hub_model_id", "x", "--hub_private_repo"
    hub.fault = fails_at("/commit/", 500)
    assert run_export(*arguments) == 3
    error = capsys.readouterr().err
    assert f"hf upload someone/x {tmp_path / 'x'} . --private" in error and is_export(tmp_path / "x")
    hub.fault = lambda method, path: None
    assert run_export(*arguments) == 0
    assert pushed_files(hub, "someone/x") == local_files(tmp_path / "x") and hub.repos["someone/x"].private


@pytest.mark.parametrize("hub_export", CHOICES["hub_export"])
def test_plan_is_that_of_the_documentation(hub_export):
    table = PAGE.read_text().partition("### What goes where")[2].partition("\n\nMasters")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    first, second = next(row[1:] for row in rows if row[0].startswith(f'`"{hub_export}"`'))
    uploads = plan(hub_export, "USER/NAME", Path("out/w4a16"), Path("out"))
    kinds = {"the policy": Path("out/w4a16"), "masters": Path("out"), "the PEFT adapter": Path("out")}
    expected = [("USER/NAME", kinds[first])] + [("USER/NAME-masters", kinds[kind]) for kind in [second] if kind]
    assert [(upload.repo_id, upload.folder) for upload in uploads] == expected


def test_masters_are_pushed_from_a_sharded_checkpoint_without_the_optimizer():
    masters = ["README.md", "model.safetensors", "pytorch_model_fsdp_0/__0_0.distcp"]
    deepspeed = ["global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest", "zero_to_fp32.py"]
    state = [*deepspeed, "optimizer_0/__0_0.distcp", "optimizer.bin", "pytorch_model_fsdp.bin"]
    exclude = plan("master", "USER/NAME", Path("out/w4a16"), Path("out"))[0].exclude
    assert [*filter_repo_objects(masters + state, ignore_patterns=[*exclude])] == masters


def test_masters_are_pushed_without_an_export_inside_them_however_the_two_folders_are_written():
    for policy, masters in ((Path("out/w4a16"), Path("out")), (Path("out/w4a16").absolute(), Path("out"))):
        assert plan("both", "USER/NAME", policy, masters)[1].exclude[-1] == "w4a16/*"
