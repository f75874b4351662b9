"""
Commands and servers that start at once: forked from a process that has imported what they need, which is most of what
a start takes. Their engines start quickly, too ([`quicken_engines`]). Everything else is the user's: the command line,
files, environment, working directory, launcher, exit code. A server that is started as users start it, whose engine is
spawned, is in test_vllm_server.py.

`python -m testing_utils.warm FOLDER` is the first of these processes, which imports vLLM when it is first asked, over
the socket `FOLDER/first`, for one of its two forks: `plain`, without our package, and `engines`, which imports ours,
too. These take requests over sockets of their names, one JSON object a connection: `start` a command, `poll` one that
was started, or `end` all of an owner.
"""

import atexit
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from testing_utils import importing, parse_metadata_once, quicken_engines, start_engines_quickly
from testing_utils.children import start
from testing_utils.hub_stand_in import use
from trl_qarl.processes import end_with_parent


IMPORTED = {
    # Readers of an export, without our package.
    "plain": (
        *("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor"),
        *("vllm.v1.worker.cpu_worker", "vllm.lora.request", "peft", "compressed_tensors"),
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        *("vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3"),
        *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3"),
        *("transformers.quantizers.quantizer_compressed_tensors", "safetensors.torch", "pandas", "pyarrow"),
    ),
    # Our commands, their servers, and scripts that train.
    "engines": (
        *("trl_qarl.cli", "trl_qarl.scripts.train", "trl_qarl.scripts.export", "trl_qarl.trainer.qarl_trainer"),
        *("accelerate.commands.launch", "torch.distributed.run", "trl.cli.commands.training", "deepspeed"),
        *("vllm.entrypoints.launchers.api_server.entry", "trl_qarl.vllm_plugin.worker"),
    ),
}
SCRIPTS = {"trl-qarl": "trl_qarl.cli", "accelerate": "accelerate.commands.accelerate_cli"}
FOLDER, OWNER = "WARM_FOLDER", "WARM_OWNER"
"""Variables of commands: the sockets' folder, and the test process for which they run."""
TESTS = Path(__file__).parents[1]


def ask(place: str, **request):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as answer:
            return json.loads(answer.readline())


class Command:
    """The part of `subprocess.Popen` that a test, and torch's launcher, use. Output goes to `log`."""

    def __init__(self, place: str, argv, env, log, cwd=None):
        self.place, self.returncode = place, None
        request = {"argv": [*map(str, argv)], "env": dict(env), "log": str(log), "cwd": str(cwd or os.getcwd())}
        self.pid = ask(place, kind="start", **request)

    def poll(self):
        if self.returncode is None:
            self.returncode = ask(self.place, kind="poll", pid=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None):
        deadline = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a command", timeout or 0)
            time.sleep(0.05)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Warm:
    """The processes that commands are forked from, by the folder of their sockets."""

    def __init__(self, folder):
        self.folder, self.owner, self.process = Path(folder), os.environ.get(OWNER, str(os.getpid())), None

    def open(self) -> None:
        """Start the first one, which ends with this process."""
        path = os.pathsep.join([*map(str, (TESTS, TESTS / "journeys")), *filter(None, sys.path)])
        environment = {"PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        with (self.folder / "log").open("w") as log:
            command = [sys.executable, "-m", "testing_utils.warm", str(self.folder)]
            self.process = start(command, env=os.environ | environment, stdout=log, stderr=log)

    def _wait_for(self, name: str) -> str:
        deadline = time.monotonic() + 300
        while not (place := self.folder / name).exists():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)
        return str(place)

    def start(self, argv, env, log, cwd=None, kind: str = "engines") -> Command:
        if not (self.folder / kind).exists():
            ask(self._wait_for("first"), kind=kind)
        env = dict(env) | {FOLDER: str(self.folder), OWNER: self.owner}
        return Command(self._wait_for(kind), argv, env, log, cwd)

    def serve(self, patch, in_one_process: bool = True) -> dict:
        """
        Have trainers of this process start their servers here, until the monkeypatch `patch` is undone. Returns
        options of such a trainer, whose server has the engine in its own process or in another one.
        """
        from trl_qarl.engines import server_process

        if in_one_process:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

        def popen(argv, env, stdout, **options):
            # Without the launcher, which would end it with this process.
            return self.start(argv[4:], env, stdout.name)

        known = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
        patch.setattr(server_process, "subprocess", SimpleNamespace(Popen=popen, **known))
        options = {
            "vllm_mode": "server",
            "vllm_server_autostart": True,
            "vllm_server_port": server_process.free_port(),
        }
        # Where many share the cores, vLLM takes long to start.
        return options | {"vllm_server_timeout": 900}

    def end_commands(self) -> None:
        """Kill those of this test process that still run, with those that they have started."""
        for kind in IMPORTED:
            if (self.folder / kind).exists():
                ask(str(self.folder / kind), kind="end", owner=self.owner)

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)


def execute(argv: list[str]) -> None:
    """Do in this process what `argv` does in a new one: a script of [`SCRIPTS`] with its arguments, or `python [-u]`
    with `-m MODULE` or a file."""
    if (name := Path(argv[0]).name) in SCRIPTS:
        sys.argv = argv
        sys.exit(importlib.import_module(SCRIPTS[name]).main())
    words = argv[1:]
    while words[0] == "-u":
        del words[0]
    if words[:2] == ["-m", "trl_qarl.scripts.train"] or words[0] == "train.py":
        import ranks

        ranks.prepare()
    if words[0] == "-m":
        sys.argv = words[1:]
        # As Python does, for modules that belong to the user.
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def replace_starts(place: str) -> None:
    """Have torch's launcher fork its workers from the warm process too, and a program that becomes a Python program
    run it in this process. The command's own training is prepared like theirs."""
    import ranks
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    from trl_qarl.scripts import train

    SubprocessHandler._popen = lambda self, argv, env: Command(place, argv, env, env["JOURNEY_LOG"])
    run = train.run

    def prepare_and_run(argv):
        ranks.prepare()
        run(argv)

    train.run = prepare_and_run

    def become(file, argv, env):
        for number in (signal.SIGHUP, signal.SIGTERM):
            # A program has no handlers of the one before it.
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        leave(argv)

    os.execvpe = os.execve = become


def leave(argv: list[str]) -> None:
    """[`execute`], and end as an interpreter does."""
    code = 1
    try:
        execute([*argv])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(kind: str, place: str, argv, env, log, cwd) -> None:
    os.setsid()
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    # The process that it was forked from ends with the test run.
    end_with_parent(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for output in (1, 2):
        os.dup2(descriptor, output)
    if "HF_ENDPOINT" in env:
        use(SimpleNamespace(endpoint=env["HF_ENDPOINT"]), pytest.MonkeyPatch(), Path(env["HF_HOME"]))
    if kind == "engines":
        replace_starts(place)
    leave(argv)


def prepare(kind: str) -> None:
    """Import what commands of a kind need, have their engines start in a third of the time, and servers start theirs
    in forked processes."""
    with importing():
        for name in IMPORTED[kind]:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
        if find_spec("vllm") is None:
            return
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()
        if kind == "plain":
            quicken_engines(pytest.MonkeyPatch())
            return
        start_engines_quickly(pytest.MonkeyPatch())
        for module in list(sys.modules.values()):
            if "get_mp_context" in getattr(module, "__dict__", {}):
                module.get_mp_context = lambda: multiprocessing.get_context("fork")


def requests(place: str, running: dict[int, str]):
    """Requests to the socket at `place`, and the connections on which they are answered."""

    def end(number, frame):
        # An engine that a server has spawned is in the server's group, and outlives it.
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}.new")
        server.listen(16)
        os.rename(f"{place}.new", place)
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile() as lines:
                yield json.loads(lines.readline()), connection


def listen(folder: str, kind: str) -> None:
    """Start commands of a kind."""
    end_with_parent(signal.SIGTERM)
    if kind == "engines":
        del sys.modules["trl_qarl"]
        prepare(kind)
    running: dict[int, str] = {}
    for request, connection in requests(place := f"{folder}/{kind}", running):
        asked, answer = request.pop("kind"), None
        if asked == "poll":
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running.pop(pid, None)
        elif asked == "end":
            for pid in [pid for pid, owner in running.items() if owner == request["owner"]]:
                # A command has a group of its own, so that what it has forked ends with it.
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del running[pid]
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                run(kind, place, **request)
            running[answer] = request["env"][OWNER]
        connection.sendall(json.dumps(answer).encode() + b"\n")


def main(folder: str) -> None:
    # torchvision: transformers looks for it once.
    sys.path.append(os.path.join(sys.prefix, "pictures"))
    # This file has imported one function of it.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl_qarl"]:
        del sys.modules[name]
    sys.modules["trl_qarl"] = None  # pyrefly: ignore[unsupported-operation]
    parse_metadata_once()
    forks: dict[int, str] = {}
    for request, connection in requests(f"{folder}/first", forks):
        if not forks:
            prepare("plain")
        if (kind := request["kind"]) not in forks.values():
            pid = os.fork()
            if pid == 0:
                listen(folder, kind)
            forks[pid] = kind
        connection.sendall(b"null\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
