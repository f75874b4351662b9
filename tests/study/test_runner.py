import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from trl_qarl.cli import main


# Stands in for a trainer: 4 steps, a checkpoint after each, and the files that a run writes.
TRAINER = """
import json, os, pathlib, sys, time

out, seed, scheme, resume = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "true"
behaviour = json.loads(pathlib.Path(__file__).with_name("behaviour.json").read_text())
wanted = behaviour.get(f"{scheme}-seed{seed}", "finish")
first = 1 + max((int(p.name[11:]) for p in out.glob("checkpoint-*")), default=0) if resume else 1
print(f"training from step {first}", flush=True)
if wanted == "fail":
    sys.exit("the trainer gave up")
(out / "run.json").write_text(json.dumps({"scheme": scheme, "seed": seed, "max_steps": 4}))
for step in range(first, 5):
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time": time.time(), "reward": seed + step / 4}) + "\\n")
    checkpoint = out / f"checkpoint-{step}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if wanted == "kill" and step == 2:
        os.kill(os.getpid(), 9)
    if wanted == "wait" and step == 2:
        time.sleep(600)
(out / "distributions.jsonl").write_text("")
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with a trainer; returns a function that writes a grid and how its cells behave."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINER)

    def write(behaviour=(), **changes):
        (tmp_path / "behaviour.json").write_text(json.dumps(dict(behaviour)))
        config = {
            "command": ["{python}", "train.py", "{output_dir}", "{seed}", "{scheme}", "{resume_from_checkpoint}"],
            "grid": {"scheme": ["w4a16", "bf16"], "seed": [0, 1]},
            **changes,
        }
        path = tmp_path / "grid.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
        return path

    write.out = tmp_path / "out"
    return write


def compare(path, out):
    return main(["compare", str(path), "--output_dir", str(out)])


def heed_interrupts():
    """For a child to call: shells have commands in the background ignore interrupts, which children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def steps(cell):
    return [json.loads(line)["step"] for line in (cell / "metrics.jsonl").read_text().splitlines()]


GRID, TRAIN = {"grid": None}, {"train": {}, "command": None}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"gird": {}}, "'gird'"),
        ({"grid": {"sheme": ["fp8"]}}, "'sheme'"),
        ({"grid": {"scheme": [], "seed": [0]}}, "`grid` must map"),
        ({"grid": {}}, "`grid`"),
        ({"grid": {"scheme": ["fp8"], "seed": [0, 1, 0]}}, "cell fp8-seed0 occurs twice"),
        ({"grid": {"seed": [True]}}, "not True"),
        ({"grid": {"scheme": ["../x"]}}, "not '../x'"),
        (GRID, "neither `grid` nor `cells`"),
        ({"cells": [{"seed": 0}]}, "`grid` and `cells`"),
        (GRID | {"cells": []}, "`cells`"),
        (GRID | {"cells": [{"seed": 0, "lr": 1}]}, "'lr'"),
        (GRID | {"cells": [{"scheme": "fp8"}]}, "{seed}"),
        (TRAIN | {"train": {"scheme": "fp8"}}, "`scheme` is both"),
        (TRAIN | {"train": {"output_dir": "x"}}, "`output_dir`"),
        (TRAIN | {"train": {"lerning_rate": 1e-6}}, "`--lerning_rate`"),
        (TRAIN | {"grid": {"scheme": ["w5a16"]}}, "'w5a16'"),
        (TRAIN | {"grid": {"objective": ["ppo"]}}, "'ppo'"),
        (TRAIN | {"grid": {"lora_mode": ["none"]}}, "'none'"),
        (TRAIN | {"grid": {"quantize_learner": ["aligned"]}}, "'aligned'"),
        ({"train": {}}, "`train` and `command`"),
        ({"command": None}, "`train`"),
        ({"command": []}, "`command`"),
        ({"command": ["no-such-program", "{output_dir}"]}, "'no-such-program'"),
        ({"command": ["{python}", "{output_dir}", "{seed}"]}, "{scheme}"),
        ({"evaluate": "x"}, "`evaluate`"),
        ({"evaluate": ["{python}", "{objective}"]}, "`evaluate` has the placeholder {objective}"),
    ],
    ids=str,
)
def test_a_grid_that_cannot_run_is_one_line_and_exit_code_two(project, capsys, changes, names):
    with pytest.raises(SystemExit, match="2"):
        compare(project(**changes), project.out)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trl-qarl: error: ") and names in line
    assert not project.out.exists()


@pytest.mark.parametrize(
    ("devices", "train"),
    [
        (["0", "0"], None),
        (["0,"], None),
        (["cuda:0"], None),
        (["0", "1"], {"vllm_server_autostart": True}),
        (["0", "1"], {"vllm_mode": "server"}),
    ],
    ids=str,
)
def test_devices_that_cells_cannot_run_on_are_refused(project, capsys, devices, train):
    changes = {} if train is None else {"command": None, "train": {"use_vllm": True, **train}}
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(project(**changes)), "--output_dir", str(project.out), "--devices", *devices])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--devices" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_ends_its_cell_and_continues_later(project, number):
    path = project({"w4a16-seed0": "wait"}, grid={"scheme": ["w4a16"], "seed": [0]})
    command = [sys.executable, "-m", "trl_qarl.cli", "compare", str(path), "--output_dir", str(project.out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_interrupts)
    cell, deadline = project.out / "w4a16-seed0", time.monotonic() + 60
    while not (cell / "checkpoint-2" / "trainer_state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        # The kernel ends the cell, which has inherited the lock, a moment later.
        with open(project.out / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        assert process.returncode == 128 + number and "The same command continues." in errors
    # The lock is free, so no process of the cell is left.
    assert compare(project(grid={"scheme": ["w4a16"], "seed": [0]}), project.out) == 0
    assert steps(cell) == [1, 2, 3, 4]


def test_dry_run_prints_commands_and_writes_nothing(project, capsys, tmp_path):
    assert main(["compare", str(project()), "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# w4a16-seed0: new"
    assert lines[1].endswith("train.py outputs/grid/w4a16-seed0 0 w4a16 false")
    assert len(lines) == 8 and not (tmp_path / "outputs").exists()


def test_every_cell_trains_in_its_own_directory_once(project, capsys):
    path = project()
    assert compare(path, project.out) == 0
    assert "4 of 4 cells finished" in capsys.readouterr().out
    for scheme in ("w4a16", "bf16"):
        for seed in (0, 1):
            cell = project.out / f"{scheme}-seed{seed}"
            assert steps(cell) == [1, 2, 3, 4] and (cell / "finished").is_file()
            assert json.loads((cell / "run.json").read_text())["scheme"] == scheme
    assert compare(path, project.out) == 0
    assert capsys.readouterr().err.count("finished before, skipped") == 4
    assert steps(project.out / "bf16-seed1") == [1, 2, 3, 4]


def test_failing_cell_does_not_stop_the_others_and_is_trained_again(project, capsys):
    assert compare(project({"w4a16-seed1": "fail"}), project.out) == 1
    captured = capsys.readouterr()
    log = project.out / "w4a16-seed1" / "log.txt"
    assert f"failed: w4a16-seed1: exit code 1, log: {log}" in captured.err
    assert "3 of 4 cells finished" in captured.out
    assert "the trainer gave up" in log.read_text()
    assert not (log.parent / "finished").exists() and steps(project.out / "bf16-seed1") == [1, 2, 3, 4]
    assert compare(project(), project.out) == 0
    assert steps(log.parent) == [1, 2, 3, 4]


def test_killed_cell_resumes_from_its_last_checkpoint(project, capsys):
    assert compare(project({"bf16-seed0": "kill"}), project.out) == 1
    assert "bf16-seed0: killed by signal 9" in capsys.readouterr().err
    path = project()
    assert main(["compare", str(path), "--output_dir", str(project.out), "--dry_run"]) == 0
    assert "# bf16-seed0: resumes" in capsys.readouterr().out
    assert compare(path, project.out) == 0
    cell = project.out / "bf16-seed0"
    assert steps(cell) == [1, 2, 3, 4]
    assert "training from step 3" in (cell / "log.txt").read_text()


def test_incomplete_checkpoint_is_not_resumed(project, capsys):
    cell = project.out / "bf16-seed0"
    (cell / "checkpoint-2").mkdir(parents=True)
    assert main(["compare", str(project()), "--output_dir", str(project.out), "--dry_run"]) == 0
    assert "# bf16-seed0: new" in capsys.readouterr().out


def test_results_of_other_options_are_not_taken_over(project, capsys):
    assert compare(project(grid={"scheme": ["bf16"], "seed": [0]}), project.out) == 0
    path = project(
        command=["{python}", "train.py", "{output_dir}", "{seed}", "{scheme}", "{resume_from_checkpoint}", "--more"]
    )
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        compare(path, project.out)
    (line,) = capsys.readouterr().err.splitlines()
    assert "bf16-seed0 holds results of other options" in line


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ('print(\'noise\'); print(\'{"greedy": {"correct": 3, "total": 4}}\')', None),
        ("print('nothing')", "evaluation: the answer must be"),
        ("raise SystemExit(3)", "evaluation: exit code 3"),
    ],
)
def test_evaluation_is_written_for_finished_cells(project, capsys, code, failure):
    path = project(grid={"scheme": ["bf16"], "seed": [0]}, evaluate=["{python}", "-c", code])
    cell = project.out / "bf16-seed0"
    assert compare(path, project.out) == int(failure is not None)
    if failure:
        assert failure in capsys.readouterr().err and not (cell / "finished").exists()
        # What is trained is only evaluated again, whether or not it left a checkpoint.
        shutil.rmtree(cell / "checkpoint-4")
        assert compare(path, project.out) == 1 and steps(cell) == [1, 2, 3, 4]
        good = 'print(\'{"greedy": {"correct": 3, "total": 4}}\')'
        changed = project(grid={"scheme": ["bf16"], "seed": [0]}, evaluate=["{python}", "-c", good])
        assert compare(changed, project.out) == 0 and (cell / "finished").exists() and steps(cell) == [1, 2, 3, 4]
    else:
        assert json.loads((cell / "evaluation.json").read_text()) == {"greedy": {"correct": 3, "total": 4}}


def test_second_command_in_the_same_directory_is_refused(project, capsys):
    project.out.mkdir()
    with open(project.out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="2"):
            compare(project(), project.out)
    (line,) = capsys.readouterr().err.splitlines()
    assert "is running in" in line


def test_a_file_system_without_locks_only_gets_a_warning(project, capsys, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert compare(project(grid={"scheme": ["bf16"], "seed": [0]}), project.out) == 0
    assert "No locks available: a second `trl-qarl compare`" in capsys.readouterr().err


def test_cells_run_side_by_side_on_the_devices_that_are_given(project, tmp_path):
    code = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
(out / "device").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
deadline = time.monotonic() + 60
# Waits for the other device's first cell.
while len(list(out.parent.glob("*/device"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
(out / "met").write_text(str(len(list(out.parent.glob("*/device")))))
# A report that is followed waits for cells that have not begun.
assert len(list(out.parent.glob("*/cell.json"))) == 4
"""
    (tmp_path / "meet.py").write_text(code)
    path = project(command=["{python}", "meet.py", "{output_dir}", "{scheme}", "{seed}"])
    assert main(["compare", str(path), "--output_dir", str(project.out), "--devices", "0,1", "2"]) == 0
    cells = [project.out / f"{scheme}-seed{seed}" for scheme in ("w4a16", "bf16") for seed in (0, 1)]
    assert all((cell / "finished").exists() and int((cell / "met").read_text()) >= 2 for cell in cells)
    devices = [(cell / "device").read_text() for cell in cells]
    assert set(devices) == {"0,1", "2"} and set(devices[:2]) == {"0,1", "2"}
