"""
Commands of journeys, and servers, that start at once: forked from a process that has imported what they need, which is
most of what a start takes. Their engines start quickly, too ([`quicken_engines`]). Everything else is the user's: the
command line, files, environment, working directory, launcher, exit code. A server that is started as users start it,
whose engine is spawned, is in test_vllm_server.py.

`python -m testing_utils.warm SOCKET KIND` is that process. It takes requests over the socket, one JSON object a
connection: `start` a command, `poll` one that it has started, or `end` all of them.
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

import psutil
import pytest

from testing_utils import importing, parse_metadata_once, quicken_engines, start_engines_quickly
from testing_utils.children import start
from testing_utils.hub_stand_in import use
from trl_qarl.processes import end_with_parent


SERVER = (
    *("vllm.entrypoints.llm", "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.core"),
    *("vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker", "trl_qarl.vllm_plugin.worker"),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.qwen3",
)
IMPORTED = {
    # Our commands, and scripts that train.
    "engines": (
        *(
            "trl_qarl.cli",
            "trl_qarl.scripts.train",
            "trl_qarl.scripts.export",
            "trl_qarl.trainer.qarl_trainer",
            "peft",
        ),
        *("accelerate.commands.launch", "torch.distributed.run", "trl.cli.commands.training", "deepspeed"),
        *("transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "pandas", "pyarrow"),
        *SERVER,
    ),
    # Readers of an export, without our package.
    "plain": (
        *("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.lora.request", "peft"),
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        *("vllm.model_executor.models.qwen3", "transformers.models.qwen3.modeling_qwen3"),
        *("transformers.quantizers.quantizer_compressed_tensors", "compressed_tensors"),
    ),
    # Servers whose trainer is in the process of a test.
    "servers": (*SERVER, "vllm.model_executor.models.qwen2"),
}
SCRIPTS = {"trl-qarl": "trl_qarl.cli", "accelerate": "accelerate.commands.accelerate_cli"}
SOCKET_VARIABLE = "JOURNEY_SOCKET"
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
        request = {"argv": list(argv), "env": dict(env), "log": str(log), "cwd": str(cwd or os.getcwd())}
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
    """The process that commands of a kind are forked from, started when the first one is."""

    def __init__(self, kind: str, folder: Path):
        self.kind, self.place, self.log = kind, str(folder / f"{kind}.sock"), folder / f"{kind}.log"
        self.process = None

    def fork(self) -> None:
        """Start it as a fork of this process, which has imported much of it."""
        if (pid := os.fork()) == 0:
            end_with_parent(signal.SIGTERM)
            for output in (1, 2):
                os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), output)
            main(self.place, self.kind)
        self.process = psutil.Process(pid)
        self._wait(lambda: self.process.status() != psutil.STATUS_ZOMBIE)

    def _wait(self, is_running) -> None:
        while not Path(self.place).exists():
            assert is_running(), self.log.read_text()
            time.sleep(0.1)

    def start(self, argv, env, log, cwd) -> Command:
        # Another process may have started it.
        if self.process is None and not Path(self.place).exists():
            with self.log.open("w") as output:
                command = [sys.executable, "-m", "testing_utils.warm", self.place, self.kind]
                # Commands of one journey may have a Hub, and [`run`] gives it to them.
                shared = {name: value for name, value in env.items() if not name.startswith("HF_")}
                shared["HF_HUB_OFFLINE"] = "1"
                self.process = start(command, env=shared, stdout=output, stderr=output, cwd=TESTS)
            self._wait(lambda: self.process.poll() is None)
        return Command(self.place, argv, env | {SOCKET_VARIABLE: self.place}, log, cwd)

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
            return self.start(argv[4:], env, stdout.name, os.getcwd())

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
        """Kill the commands that still run, with those that they have started."""
        if self.process is not None:
            ask(self.place, kind="end")

    def close(self) -> None:
        if self.process is not None:
            self.end_commands()
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
    run it in this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda self, argv, env: Command(place, argv, env, env["JOURNEY_LOG"])

    def become(file, argv, env):
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


def prepare_engines(kind: str) -> None:
    """Have engines of a kind start in a third of the time, and servers start theirs in forked processes."""
    from vllm.platforms import current_platform

    if kind == "plain":
        quicken_engines(pytest.MonkeyPatch())
    else:
        start_engines_quickly(pytest.MonkeyPatch())
    current_platform.register_triton_kernel_overrides()
    if kind != "servers":
        return
    for module in list(sys.modules.values()):
        if "get_mp_context" in getattr(module, "__dict__", {}):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")


def main(place: str, kind: str) -> None:
    # torchvision: transformers looks for it once.
    sys.path.append(os.path.join(sys.prefix, "pictures"))
    if kind == "plain":
        os.environ["VLLM_PLUGINS"] = ""
        # This file has imported one function of it.
        for name in [name for name in sys.modules if name.partition(".")[0] == "trl_qarl"]:
            del sys.modules[name]
        sys.modules["trl_qarl"] = None  # pyrefly: ignore[unsupported-operation]
    parse_metadata_once()
    with importing():
        for name in IMPORTED[kind]:
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
        if find_spec("vllm") is not None:
            prepare_engines(kind)
    running: set[int] = set()

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
            with connection.makefile() as lines:
                request = json.loads(lines.readline())
            asked, answer = request.pop("kind"), None
            if asked == "poll":
                pid, status = os.waitpid(request["pid"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
                running.discard(pid)
            elif asked == "end":
                for pid in running:
                    # A command has a group of its own, so that what it has forked ends with it.
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                running.clear()
            else:
                answer = os.fork()
                if answer == 0:
                    connection.close()
                    server.close()
                    run(kind, place, **request)
                running.add(answer)
            connection.sendall(json.dumps(answer).encode() + b"\n")
            connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
