"""
Real trainers that lose their server, and what has become of them.

`python campaign.py FOLDER AT_ONCE` reads a list of scenarios ([`scenarios`]) from `FOLDER/asked.json`, imports torch
and the trainer once, and writes one JSON line to `FOLDER/reports` for each scenario that has ended. The first one is
undisturbed. A scenario has processes of its own: a supervisor, the trainers that it starts one after the other, and
their servers ([`stand_in`]).

Whatever happens first, afterwards a run that was not completed is resumed with a healthy server. The final weights
must be those of an undisturbed run bit for bit, and no process and no file may be left.
"""

import atexit
import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import requests

from faults.scenarios import num_steps
from testing_utils import importing, make_tiny_model, parse_metadata_once
from trl_qarl.checkpoint.marker import is_complete
from trl_qarl.engines.server_process import free_port
from trl_qarl.wire.handshake import TOKEN_FILE_VARIABLE, make_token_file


HERE = Path(__file__).parent
PATIENCE = 60
"""Seconds after which a trainer counts as hanging. On an idle machine one takes about one second."""


def make_trainer(folder: Path, output: Path, port: int, is_child: bool, on_event, options: dict):
    """A trainer of the tiny model beside `folder`, whose server is the stand-in."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl_qarl import QaRLConfig, QaRLTrainer
    from trl_qarl.rollout import generation

    real_server_process = generation.server_process

    def server_process(*args, **kwargs):
        process = real_server_process(*args, **kwargs)
        process.argv[: process.argv.index("--model")] = [sys.executable, str(HERE / "stand_in.py")]
        if not (command := folder.parent / "command.json").exists():
            command.write_text(json.dumps([process.argv, process.environment]))
        return process

    generation.server_process = server_process

    class Events(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            on_event("step_begin", state)

        def on_optimizer_step(self, args, state, control, **kwargs):
            on_event("optimizer", state)

        def on_step_end(self, args, state, control, **kwargs):
            on_event("step_end", state)

        def on_save(self, args, state, control, **kwargs):
            on_event("save", state)

    def reward(completions, **kwargs):
        on_event("reward", trainer.state)
        return [sum(map(ord, text)) % 97 / 97 for text in completions]

    known = {field.name for field in dataclasses.fields(QaRLConfig)}
    trainer = QaRLTrainer(
        str(folder.parent / "qwen2"),
        reward,
        QaRLConfig(
            str(output),
            use_cpu=True,
            bf16=False,
            scheme="w8a16",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_autostart=is_child,
            vllm_server_port=port,
            vllm_server_host="127.0.0.1",
            vllm_max_model_length=128,
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            logging_steps=1,
            num_generations=4,
            max_completion_length=8,
            # Some codes change in a step, not all.
            learning_rate=1e-4,
            # Wide: weights depend on all that is drawn, ahead too.
            positive_epsilon_high=0.5,
            negative_epsilon_low=0.5,
            negative_epsilon_high=0.5,
            # The Newton-Schulz iteration of Muon would be a third of all time on processors without bfloat16.
            optim="adamw_torch",
            disable_tqdm=True,
            **{name: value for name, value in options.items() if name in known},
        ),
        Dataset.from_dict({"prompt": [f"{i} +" for i in range(options["num_prompts"])]}),
        callbacks=[Events()],
    )
    return trainer


def digest(model) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return total.hexdigest()


class TrainerProcess:
    """A trainer in a process of its own, forked from this one; `scenario` says what happens to it, if anything."""

    def __init__(self, supervisor: "Supervisor", scenario: dict, output: Path, resume: bool | str, rank: int = 0):
        self.supervisor, self.scenario, self.output = supervisor, scenario, output
        self.resume, self.rank = resume, rank
        self.result_file = supervisor.folder / f"result-{time.monotonic_ns()}.json"
        self.pid = fork(self._run)
        supervisor.pids.append(self.pid)

    def wait(self) -> dict:
        """How it ended: `ended` is `"completes"`, the name of an exception, a signal, or `"hangs"`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return {"ended": "hangs", "step": None}
            time.sleep(0.02)
        if self.result_file.exists():
            return json.loads(self.result_file.read_text())
        code = os.waitstatus_to_exitcode(status)
        return {"ended": signal.Signals(-code).name if code < 0 else f"exit {code}", "step": None}

    def _run(self) -> None:
        log = self.supervisor.log.fileno()
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._prepare()
            result = self._train()
            if self.supervisor.undisturbed is None:
                (self.supervisor.folder.parent / "imported").write_text(json.dumps(list(sys.modules)))
            self.result_file.with_suffix(".part").write_text(json.dumps(result))
            self.result_file.with_suffix(".part").rename(self.result_file)
        finally:
            # As an interpreter that ends.
            atexit._run_exitfuncs()

    def _prepare(self) -> None:
        from trl_qarl.engines import client, http_session
        from trl_qarl.sync import canary, publisher
        from trl_qarl.wire import transfer_dir

        # The stand-in has log-probs of the fixed text that no weights have.
        canary.SMALLEST = canary.LARGEST
        # Several chunks to a publication.
        publisher.CHUNK_BYTES = 100_000
        # Waits of seconds, between attempts and for servers that are slow to start.
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(seconds / 10)
        client._HEALTH_SECONDS = client._REFUSAL_SECONDS = 1.0
        if self.supervisor.undisturbed is not None:
            # Requests that are counted where nothing fails must not fail because the machine is busy.
            http_session.REQUEST_SECONDS = http_session.GENERATION_SECONDS = 1.0
        shm, tmp = self.supervisor.shm, self.supervisor.tmp
        tempfile.tempdir = str(tmp)
        transfer_dir.transfer_bases = lambda: [shm]
        if "tear" in self.scenario and self.rank == self.scenario.get("rank", 0):
            self._tear(self.scenario["tear"])
        if self.scenario.get("ranks") == 2:
            os.environ |= {
                "RANK": str(self.rank),
                "LOCAL_RANK": str(self.rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
            }
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.supervisor.rendezvous_port)}

    def _train(self) -> dict:
        from trl_qarl.rollout.failures import EngineLost

        scenario, trainer, result, step = self.scenario, None, {}, None
        # With no checkpoint but the one that a lost engine leaves.
        saves = self.resume or "EngineLost" not in scenario["expect"] or scenario.get("at") == "save"
        options = {"save_strategy": "steps", "save_steps": 1} if saves else {"save_strategy": "no"}
        options["per_device_train_batch_size"] = 4 // scenario.get("ranks", 1)
        options["max_steps"] = num_steps(scenario)
        has_epochs = scenario.get("epochs", False)
        options |= (
            {"num_prompts": 4, "steps_per_generation": 2}
            if has_epochs
            else {"num_prompts": 16, "steps_per_generation": 1}
        )
        options["rollout_ahead"] = scenario.get("ahead", 0)
        options["shuffle_dataset"] = scenario.get("shuffled", True)
        options["lr_scheduler_type"] = scenario.get("schedule", "linear")
        options["vllm_server_timeout"] = scenario.get("timeout", 3.0 if scenario.get("server") == "apart" else 10.0)
        is_child = scenario.get("server", "child") == "child"
        try:
            trainer = make_trainer(
                self.supervisor.folder, self.output, self.supervisor.port, is_child, self._on_event, options
            )
            try:
                trainer.train(resume_from_checkpoint=self.resume)
            except EngineLost:
                if self.resume or not scenario.get("again"):
                    raise
                step = trainer.state.global_step
                trainer.train()
            result = {"ended": "completes", "digest": digest(trainer.accelerator.unwrap_model(trainer.model))}
        except BaseException as error:
            traceback.print_exc()
            result = {"ended": type(error).__name__, "message": str(error)[:1000]}
        return result | {"step": trainer.state.global_step if trainer and step is None else step}

    def _on_event(self, event: str, state) -> None:
        """Perform the scenario's action once, at its step."""
        if event == "step_begin" and self.rank == 0:
            with (self.supervisor.folder / "calls").open("a") as file:
                file.write("step\n")
        # A step is counted before its end.
        step = state.global_step - (event in ("step_end", "save"))
        mark = self.supervisor.folder / "acted"
        is_step = step == self.scenario.get("step", 1)
        is_time = event == self.scenario.get("at") and is_step and self.rank == self.scenario.get("rank", 0)
        if not is_time or self.resume or mark.exists():
            return
        mark.touch()
        getattr(self, "_" + self.scenario["action"].replace(" ", "_"))()

    def _kill_server(self) -> None:
        (self.supervisor.folder / "fired-0").touch()
        os.kill(self.supervisor.server_pid(), signal.SIGKILL)

    def _replace_server(self) -> None:
        self._kill_server()
        self.supervisor.start_liar()

    def _remove_transfer_directory(self) -> None:
        for folder in (*self.supervisor.shm.glob("trl-qarl-*"), self.supervisor.tmp / "transfer"):
            shutil.rmtree(folder, ignore_errors=True)

    def _kill_trainer(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _damage_checkpoint(self) -> None:
        step = self.scenario.get("step", 1) + 1
        path = self.output / f"checkpoint-{step}" / self.scenario["file"]
        os.truncate(path, int(path.stat().st_size * self.scenario["share"]))
        self._kill_trainer()

    def _kill_server_and_leave_no_room(self) -> None:
        self._kill_server()
        limit_files()

    def _tear(self, moment: str) -> None:
        """Kills this process, or leaves it no room, while it saves its second step."""
        from transformers import TrainerState

        from trl_qarl import QaRLTrainer
        from trl_qarl.checkpoint import marker

        owner, name = {
            "before the batch": (QaRLTrainer, "_save_batch"),
            "before the optimizer": (QaRLTrainer, "_save_optimizer_and_scheduler"),
            "half a model": (QaRLTrainer, "_save"),
            "no room": (QaRLTrainer, "_save"),
            "after the marker": (marker, "complete"),
        }.get(moment, (TrainerState, "save_to_json"))
        write, mark = getattr(owner, name), self.supervisor.folder / "acted"

        def torn(*args, **kwargs):
            path = next(Path(argument) for argument in args if isinstance(argument, str | Path))
            if "checkpoint-2" not in path.parts or mark.exists():
                return write(*args, **kwargs)
            mark.touch()
            if moment == "no room":
                limit_files()
            if not moment.startswith("before"):
                write(*args, **kwargs)
            if moment == "half a model":
                path /= "model.safetensors"
            if moment.startswith(("half", "empty")):
                os.truncate(path, path.stat().st_size // 2 if moment.startswith("half") else 0)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, torn)

    def _raise(self) -> None:
        raise ZeroDivisionError("The scenario says so.")

    def _fill_disk(self) -> None:
        self.supervisor.filler.write_bytes(bytes(free_bytes(self.supervisor.shm) - 2**16))

    def _fill_disk_for_a_moment(self) -> None:
        self._fill_disk()
        # Until an attempt has failed of it, which is logged.
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.supervisor.filler.unlink(missing_ok=True)
        logging.getLogger("trl_qarl").addHandler(handler)

    def _wait(self) -> None:
        (self.supervisor.folder / "waiting").touch()
        while not (self.supervisor.folder / "go").exists():
            time.sleep(0.1)


class Supervisor:
    """Runs one scenario; see the module's docstring. `undisturbed` has digest and calls of a run without faults."""

    def __init__(self, root: Path, scenario: dict, undisturbed: dict | None):
        self.scenario, self.undisturbed = scenario, undisturbed
        self.folder = root / "".join(c if c.isalnum() else "-" for c in scenario["name"])
        self.output, self.tmp = (self.folder / name for name in ("output", "tmp"))
        self.tmp.mkdir(parents=True)
        # Memory of its own in place of the machine's, so that what is left there is this scenario's.
        shared = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else self.tmp
        self.shm = Path(tempfile.mkdtemp(prefix="campaign-", dir=shared))
        self.filler = self.shm / "filler"
        self.log = (self.folder / "log").open("a")
        self.pids: list[int] = []
        self.problems: list[str] = []
        self.port, self.rendezvous_port = free_port(), free_port()
        self.server: subprocess.Popen | None = None
        # Known to every process of the scenario that is started by command line.
        os.environ["CAMPAIGN"] = str(self.folder)
        os.environ["TMPDIR"] = str(self.tmp)

    def run(self) -> dict:
        start, scenario = time.monotonic(), self.scenario
        ended = []
        with self.limited_room():
            (self.folder / "faults.json").write_text(json.dumps(self.faults()))
            if "deaths" in scenario:
                (self.folder / "deaths").write_text(str(scenario["deaths"]))
            self.start_apart()
            resume: bool | str = False
            if scenario.get("overwrites"):
                self.train({"expect": "ends", "at": "save", "action": "kill trainer"}, resume=False)
                (self.folder / "acted").unlink()
                resume = str(self.output / "checkpoint-1")
            results = self.train(scenario, resume=resume)
            ended.append(results[0]["ended"])
            self.check_first(results)
            self.check_fired()
            self.calm_down()
            if any(result["ended"] != "completes" for result in results):
                results = self.train(scenario, resume=last_checkpoint(self.output) is not None)
                ended.append(results[0]["ended"])
            self.check_last(results)
            for _ in range(scenario.get("again", 0)):
                results = self.train(scenario, resume=True)
                ended.append(results[0]["ended"])
                self.check_last(results)
            self.stop_apart()
            self.check_nothing_left()
        shutil.rmtree(self.shm, ignore_errors=True)
        report = {"name": scenario["name"], "ended": ended, "problems": self.problems}
        report |= {
            "digest": results[0].get("digest"),
            "seconds": round(time.monotonic() - start, 2),
        }
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        report["cpu_seconds"] = round(usage.ru_utime + usage.ru_stime, 2)
        if not self.undisturbed and not self.problems:
            report["calls"] = (self.folder / "calls").read_text().split()
            report["dropped"] = max(row.get("tbpo/dropped/total", 0.0) for row in self.logged())
        if self.problems:
            report["log"] = (self.folder / "log").read_text(errors="replace")[-5000:]
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        return report

    def logged(self) -> list[dict]:
        last = self.output / f"checkpoint-{num_steps(self.scenario)}"
        return json.loads((last / "trainer_state.json").read_text())["log_history"]

    def faults(self) -> list[dict]:
        """With numbers for moments: which call in which step, so that what an earlier fault has repeated counts for
        nothing."""
        faults = []
        for fault in self.scenario.get("faults", []):
            if isinstance(fault["call"], str):
                calls, endpoint = self.undisturbed["calls"], fault["endpoint"]
                places = [place for place, call in enumerate(calls) if call == endpoint]
                index = {"first": 0, "middle": (len(places) - 1) // 2, "last": -1}[fault["call"]]
                before = calls[: places[index]]
                step = before.count("step")
                start = max(place for place, call in enumerate(["step", *before]) if call == "step")
                fault = fault | {"step": step, "call": before[start:].count(endpoint) + 1}
            faults.append(fault)
        return faults

    def train(self, scenario: dict, resume: bool | str) -> list[dict]:
        """Runs the trainer, or both, to the end."""
        ranks = range(scenario.get("ranks", 1))
        processes = [TrainerProcess(self, scenario, self.output, resume, rank) for rank in ranks]
        if scenario.get("rival") and not resume:
            self.meet_rival()
        keeper = self.keep_server_alive() if scenario.get("server") == "back" else contextlib.nullcontext()
        with keeper:
            return [process.wait() for process in processes]

    def check_first(self, results: list[dict]) -> None:
        expect = self.scenario["expect"]
        for result in results:
            ended, step = result["ended"], result["step"]
            if expect in ("completes", "EngineLost"):
                is_fine = ended == expect
            elif expect == "EngineLost without room":
                is_fine = ended == "EngineLost" and last_checkpoint(self.output) is None
            elif expect == "starts or refuses":
                is_fine = ended == "completes" or (ended != "hangs" and not step)
            else:
                is_fine = ended != "hangs"
            if not is_fine:
                self.problems.append(f"expected: {expect}; got: {result}")
            last = last_checkpoint(self.output)
            if expect == ended == "EngineLost" and last != (step or None):
                self.problems.append(f"EngineLost after step {step}, but the last complete checkpoint is of {last}")

    def check_fired(self) -> None:
        if self.scenario.get("action", "").endswith("for a moment") and self.filler.exists():
            self.problems.append("the disk was full without consequences")
        num_fired = len(list(self.folder.glob("fired-*")))
        if num_fired < len(self.scenario.get("faults", [])) or (
            {"at", "tear"} & self.scenario.keys() and not (self.folder / "acted").exists()
        ):
            self.problems.append(f"only {num_fired} of the faults happened")

    def check_last(self, results: list[dict]) -> None:
        total = num_steps(self.scenario)
        for result in results:
            if result["ended"] != "completes":
                self.problems.append(f"the run did not complete afterwards: {result}")
            elif self.undisturbed and result["digest"] != self.undisturbed["digest"]:
                self.problems.append("the final weights are not those of the undisturbed run")
            elif result["step"] != total or last_checkpoint(self.output) not in (total, None):
                self.problems.append(f"after {result['step']} steps of {total}")

    def check_nothing_left(self) -> None:
        """A process that was told to end may need a moment."""
        deadline = time.monotonic() + 10
        while (processes := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.filler.unlink(missing_ok=True)
        files = [path.name for folder in (self.shm, self.tmp) for path in folder.glob("*trl-qarl*")]
        if processes or files:
            self.problems.append(f"left behind: processes {processes}, files {files}")
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Running processes that were started by command line with this scenario's environment."""
        mark, found = f"CAMPAIGN={self.folder}\0".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def server_pid(self) -> int:
        return int((self.folder / "starts").read_text().split()[-1])

    def calm_down(self) -> None:
        """Nothing fails from here on."""
        self.stop_liar()
        for name in ("faults.json", "deaths", "filler"):
            (self.folder / name).unlink(missing_ok=True)
        self.filler.unlink(missing_ok=True)
        if self.scenario.get("room", 1e9) < 1e6:
            subprocess.run(["mount", "-o", "remount,size=8M", str(self.shm)], check=True)
        if self.server is not None and self.server.poll() is not None:
            self.start_apart()

    def start_apart(self) -> None:
        """The server of a trainer that does not start it, by the command that the undisturbed run's trainer used."""
        if self.scenario.get("server", "child") == "child":
            return
        self.server = self.start_stand_in({})

    def start_stand_in(self, variables: dict[str, str]) -> subprocess.Popen:
        argv, environment = json.loads((self.folder.parent / "command.json").read_text())
        argv[argv.index("--port") + 1] = str(self.port)
        directory = self.tmp / "transfer"
        directory.mkdir(exist_ok=True, mode=0o700)
        make_token_file(directory / "token")
        environment |= {"TRL_QARL_TRANSFER_DIR": str(directory), TOKEN_FILE_VARIABLE: str(directory / "token")}
        process = subprocess.Popen(argv, env=os.environ | environment | variables, stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            # Not a request, which a fault might count.
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            time.sleep(0.02)
        return process

    def start_liar(self) -> None:
        """A process without the secret at the server's port."""
        (self.folder / "liar").write_text(str(self.start_stand_in({"LIAR": "1"}).pid))

    def stop_liar(self) -> None:
        """It must have been told nothing but what a handshake needs."""
        if not (self.folder / "liar").exists():
            return
        os.kill(int((self.folder / "liar").read_text()), signal.SIGKILL)
        log = self.folder / "told to the liar"
        told = {tuple(json.loads(line)) for line in log.read_text().splitlines()} if log.exists() else set()
        if secret := sorted(told - {("/health", False), ("/qarl/state", False), ("/qarl/session", False)}):
            self.problems.append(f"whoever took the port was asked, and told the session's token or not: {secret}")

    def stop_apart(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()

    @contextlib.contextmanager
    def keep_server_alive(self):
        """Starts it again half a second after it has ended, as somebody would."""
        is_over = threading.Event()

        def keep():
            while not is_over.wait(0.05):
                if self.server.poll() is not None and not is_over.wait(0.5):
                    self.start_apart()

        thread = threading.Thread(target=keep)
        thread.start()
        yield
        is_over.set()
        thread.join()

    def meet_rival(self) -> None:
        """Somebody else comes to the server while the trainer waits in the middle of its work; they must be turned
        away."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        rival = self.scenario["rival"]
        if rival == "stranger":
            url = f"http://127.0.0.1:{self.port}"
            paths = (
                "/pause?mode=abort",
                "/start_weight_update",
                "/update_weights",
                "/finish_weight_update",
                "/qarl/session",
            )
            answers = {path: requests.post(url + path, json={}, timeout=5).status_code for path in paths}
            if not all(400 <= status < 500 for status in answers.values()):
                self.problems.append(f"a stranger got {answers}")
        else:
            scenario = {"expect": "ends", "server": self.scenario["server"]}
            output, reason = {
                "trainer": (self.folder / "rival", "already works for process"),
                "trainer with a server of its own": (self.folder / "rival", "Change `vllm_server_port`"),
                "trainer of one output_dir": (self.output, "which is still training. Choose another folder."),
            }[rival]
            result = TrainerProcess(self, scenario, output, resume=False).wait()
            if reason not in result.get("message", ""):
                self.problems.append(f"the second trainer was not turned away: {result}")
        (self.folder / "go").touch()

    @contextlib.contextmanager
    def limited_room(self):
        """A transfer directory of a fixed size, where this process may mount one."""
        room = self.scenario.get("room")
        if room is None:
            yield
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(self.shm)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self.shm)], check=True)


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def last_checkpoint(output: Path) -> int | None:
    """Step of the last complete checkpoint."""
    steps = [int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*") if is_complete(path)]
    return max(steps, default=None)


def limit_files() -> None:
    """No file of this process, nor of those that it starts, gets as large as the model from here on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def kind_of(scenario: dict) -> tuple:
    """Runs of one kind reach the same weights by the same requests."""
    return (
        scenario.get("ranks", 1),
        scenario.get("ahead", 0),
        scenario.get("schedule", "linear"),
        scenario.get("epochs", False),
        scenario.get("shuffled", True),
    )


def fork(function) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def prepare(root: Path) -> None:
    """Import what a training imports, so that forked trainings need not."""
    from transformers import AutoModelForCausalLM

    with importing():
        for name in json.loads((root / "imported").read_text()):
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    # At each exit it would import what makes tables and show none.
    atexit.unregister(importlib.import_module("torch._dynamo.utils").dump_compile_times)
    # Compiles the patterns of names that transformers knows from checkpoints.
    AutoModelForCausalLM.from_pretrained(root / "qwen2")


def main(root: Path, at_once: int) -> None:
    # Once, for all.
    parse_metadata_once()
    with importing():
        import trl_qarl.trainer.qarl_trainer  # noqa: F401

    def run(scenario: dict, undisturbed: dict | None, report: Path) -> None:
        supervisor = Supervisor(root, scenario, undisturbed)
        report.write_text(json.dumps(supervisor.run()))

    make_model = fork(lambda: make_tiny_model(root, "qwen2"))
    assert os.waitpid(make_model, 0)[1] == 0
    undisturbed: dict[tuple, dict] = {}
    waiting, running = json.loads((root / "asked.json").read_text()), {}
    with (root / "reports").open("w", buffering=1) as answers:
        while waiting or running:
            while waiting and len(running) < (at_once if undisturbed else 1):
                # The first scenario of a kind is the one that the others are compared with: they wait for it.
                unknown = {kind_of(scenario) for scenario, _ in running.values()} - undisturbed.keys()
                scenario = next((scenario for scenario in waiting if kind_of(scenario) not in unknown), None)
                if scenario is None:
                    break
                waiting.remove(scenario)
                report = root / f"report-{time.monotonic_ns()}.json"
                known = undisturbed.get(kind_of(scenario))
                running[fork(lambda: run(scenario, known, report))] = scenario, report  # noqa: B023
            pid, _ = os.wait()
            scenario, path = running.pop(pid)
            if path.exists():
                report = json.loads(path.read_text())
            else:
                report = {"name": scenario["name"], "problems": ["its supervisor failed"]}
            if not undisturbed:
                prepare(root)
            undisturbed.setdefault(kind_of(scenario), report)
            answers.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
