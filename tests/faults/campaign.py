"""
Real trainers that lose their server, and what has become of them.

Run as a program it is a fork server: it imports torch and the trainer once, then reads lists of scenarios, one JSON line each,
from its standard input, and writes one JSON line for each scenario that has ended. A scenario runs in processes of its own: a
supervisor, the trainers that it starts one after the other, their servers ([`stand_in`]).

A scenario is a dictionary:

| key | what |
|---|---|
| `name` | unique |
| `fault` | see [`stand_in`]; without one, nothing happens |
| `at` | an event in the trainer (`"reward"`, `"step_begin"`, `"step_end"`, `"save"`) at which the server is killed |
| `server` | `"child"` of the trainer, the default, or `"apart"` |
| `ranks` | 2 for two processes |
| `expect` | `"completes"`, `"EngineLost"`, `"killed"` (by the signal), `"refused"` (before the first step) |

Whatever happens first, afterwards a run that had not completed is resumed against a healthy server. The final weights must be
those of an undisturbed run, and no process or file may be left.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from trl_qarl.rollout.serve import free_port


HERE = Path(__file__).parent
NUM_STEPS = 3
# What a trainer may take, on a busy machine; a scenario without a hang takes about a second.
PATIENCE = 90


def reward(completions, **kwargs):
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def build_trainer(folder: Path, port: int, server: str, at: str | None, options: dict):
    """A trainer on the tiny model in `folder.parent`, whose server is the stand-in."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl_qarl import QaRLConfig, QaRLTrainer, qarl_trainer
    from trl_qarl.rollout import publish

    # Several chunks to a publication.
    publish.CHUNK_BYTES = 100_000
    real_server_process = qarl_trainer.server_process

    def server_process(*args, **kwargs):
        process = real_server_process(*args, **kwargs)
        process.argv = stand_in_argv(process.argv)
        (folder / "command.json").write_text(json.dumps([process.argv, process.environment]))
        return process

    qarl_trainer.server_process = server_process

    def happen(event):
        # In the middle of training, once.
        if event == at and trainer.state.global_step == 1 and not (folder / "fired").exists():
            (folder / "fired").write_text(event)
            pid = int((folder / "starts").read_text().split()[-1])
            os.kill(pid, signal.SIGKILL)

    class Events(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            happen("step_begin")

        def on_step_end(self, *args, **kwargs):
            happen("step_end")

        def on_save(self, *args, **kwargs):
            happen("save")

    def reward_and_happen(completions, **kwargs):
        happen("reward")
        return reward(completions)

    trainer = QaRLTrainer(
        str(folder.parent / "qwen2"),
        reward_and_happen,
        QaRLConfig(
            str(folder / "output"),
            use_cpu=True,
            bf16=False,
            scheme="w8a16",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_autostart=server == "child",
            vllm_server_port=port,
            vllm_server_host="127.0.0.1",
            vllm_server_timeout=10.0,
            vllm_max_model_length=128,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            logging_steps=1,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            steps_per_generation=1,
            max_completion_length=8,
            learning_rate=1e-2,
            save_steps=1,
            disable_tqdm=True,
            **options,
        ),
        Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]}),
        callbacks=[Events()],
    )
    return trainer


def stand_in_argv(argv: list[str]) -> list[str]:
    return [sys.executable, str(HERE / "stand_in.py"), *argv[3:]]


def train(folder: Path, port: int, scenario: dict, resume: bool, rank: int = 0) -> dict:
    """What a trainer process does; returns how it ended."""
    options = scenario.get("options", {}) | ({"save_strategy": "no"} if scenario["expect"] == "EngineLost" and not resume else {})
    result: dict = {"step": None}
    trainer = None
    try:
        trainer = build_trainer(folder, port, scenario.get("server", "child"), scenario.get("at"), options)
        trainer.train(resume_from_checkpoint=resume)
        digest = hashlib.sha256()
        for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters():
            digest.update(parameter.detach().numpy().tobytes())
        result |= {"ended": "completes", "digest": digest.hexdigest()}
    except BaseException as error:
        traceback.print_exc()
        result |= {"ended": type(error).__name__, "message": str(error)[:1000]}
    if trainer is not None:
        result["step"] = trainer.state.global_step
    return result


class Supervisor:
    """Runs one scenario; see the module's docstring."""

    def __init__(self, root: Path, scenario: dict, undisturbed: dict | None):
        self.scenario = scenario
        self.undisturbed = undisturbed
        self.folder = root / scenario["name"].replace("/", "_").replace(" ", "-")
        self.folder.mkdir()
        self.log = (self.folder / "log").open("w")
        self.problems: list[str] = []
        self.pids: list[int] = []

    def run(self) -> dict:
        start = time.monotonic()
        before = leftovers()
        scenario = self.scenario
        if fault := scenario.get("fault"):
            (self.folder / "fault.json").write_text(json.dumps(fault))
        os.environ["CAMPAIGN"] = str(self.folder)
        port = free_port()
        result = self.train_once(port, resume=False)
        ended = [result["ended"]]
        self.check_first(result)
        if result["ended"] != "completes":
            (self.folder / "fault.json").unlink(missing_ok=True)
            step = complete_checkpoint(self.folder / "output")
            result = self.train_once(port, resume=step is not None)
            ended.append(result["ended"])
        if result["ended"] != "completes":
            self.problems.append(f"the run ended with {result}")
        elif self.undisturbed is not None and result["digest"] != self.undisturbed["digest"]:
            self.problems.append("the final weights are not the undisturbed run's")
        if (fault or scenario.get("at")) and not (self.folder / "fired").exists():
            self.problems.append("the fault did not happen")
        self.check_nothing_left(before)
        calls = (self.folder / "calls").read_text().split() if not self.undisturbed else []
        seconds = time.monotonic() - start
        report = {"name": scenario["name"], "ended": ended, "problems": self.problems, "seconds": round(seconds, 2)}
        if self.problems:
            report["log"] = (self.folder / "log").read_text()[-6000:]
        return report | {"digest": result.get("digest"), "calls": calls}

    def train_once(self, port: int, resume: bool) -> dict:
        path = self.folder / "result.json"
        path.unlink(missing_ok=True)
        pid = fork(lambda: self.train_and_tell(path, port, resume))
        self.pids.append(pid)
        code = wait_for(pid, PATIENCE)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"ended": "hangs"}
        if path.exists():
            return json.loads(path.read_text())
        return {"ended": f"signal {-code}" if code < 0 else f"exit {code}"}

    def train_and_tell(self, path: Path, port: int, resume: bool) -> None:
        os.setsid()
        os.dup2(self.log.fileno(), 1)
        os.dup2(self.log.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        shorten_waits()
        try:
            result = train(self.folder, port, self.scenario, resume)
            path.write_text(json.dumps(result))
        finally:
            # As an interpreter that ends.
            atexit._run_exitfuncs()

    def check_first(self, result: dict) -> None:
        expect, ended = self.scenario["expect"], result["ended"]
        if expect == "EngineLost" and ended == expect:
            last = complete_checkpoint(self.folder / "output")
            if last != (result["step"] or None):
                self.problems.append(f"the run ended after step {result['step']}, the last checkpoint is of {last}")
        allowed = {"killed": ("completes", "signal", "KeyboardInterrupt", "SystemExit", "EngineLost", "exit")}
        if not ended.startswith(allowed.get(expect, (expect,))):
            self.problems.append(f"expected: {expect}, got: {result}")

    def check_nothing_left(self, before: set[str]) -> None:
        deadline = time.monotonic() + 10
        while True:
            processes = self.processes()
            files = {name for name in leftovers() - before if any(f"{pid}" in name for pid in self.pids)}
            if not processes and not files:
                return
            if time.monotonic() > deadline:
                self.problems.append(f"left behind: processes {processes}, files {sorted(files)}")
                for pid in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Servers that were started with this scenario's environment, and trainers."""
        found = []
        mark = f"CAMPAIGN={self.folder}\0".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found


def leftovers() -> set[str]:
    return {str(path) for base in ("/dev/shm", "/tmp") for path in Path(base).glob("trl-qarl-*")}


def complete_checkpoint(output: Path) -> int | None:
    steps = [int(path.parent.name.rpartition("-")[2]) for path in output.glob("checkpoint-*/trainer_state.json")]
    return max(steps, default=None)


def wait_for(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def fork(function) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def shorten_waits(factor: float = 0.1) -> None:
    """Waits between attempts, which are seconds, are not what is tested."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds * factor)


def main(root: Path, at_once: int) -> None:
    import trl_qarl.qarl_trainer  # noqa: F401

    undisturbed = None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        pending, running = json.loads(line), {}
        while pending or running:
            while pending and len(running) < at_once:
                scenario = pending.pop(0)
                path = root / f"report-{time.monotonic_ns()}.json"
                pid = fork(lambda s=scenario, p=path: p.write_text(json.dumps(Supervisor(root, s, undisturbed).run())))
                running[pid] = scenario, path
            pid, _ = os.wait()
            scenario, path = running.pop(pid)
            report = json.loads(path.read_text()) if path.exists() else {"name": scenario["name"], "problems": ["crash"]}
            undisturbed = undisturbed or report
            answers.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
