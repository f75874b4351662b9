"""
vLLM servers that start at once: forked from a process that has imported what they need, which is most of what a start
takes.

Each is a process of its own in a group of its own, and does what its command line and its environment say. Its engine
is forked too. Servers that are started as users start them, whose engines are spawned, are in test_vllm_server.py, in
tests/distributed, and each night in test_vllm_autostart.py.
"""

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from testing_utils.children import start


# As in conftest.py.
sys.path.append(os.path.join(sys.prefix, "pictures"))

IMPORTED = [
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    *(f"vllm.model_executor.models.{name}" for name in ("qwen2", "qwen3")),
    "trl_qarl.vllm_plugin.worker",
]


class WarmServers:
    """The process that servers are forked from."""

    def __init__(self):
        tests = str(Path(__file__).parents[1])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "testing_utils.warm_servers"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = start(command, env=environment, text=True, **pipes)
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, *request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def popen(self, argv, env, stdout, **options):
        _launcher, command = argv[:4], argv[4:]
        return WarmServer(self, self.ask("start", command, env, stdout.name))

    def serve(self, patch, in_one_process: bool = True) -> dict:
        """
        Have trainers of this process start their servers here, until the monkeypatch `patch` is undone. Returns
        options of such a trainer, whose server has the engine in its own process or in another one.
        """
        from trl_qarl.engines import server_process

        if in_one_process:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        names = ("DEVNULL", "STDOUT", "TimeoutExpired")
        known = {name: getattr(subprocess, name) for name in names}
        patch.setattr(server_process, "subprocess", SimpleNamespace(Popen=self.popen, **known))
        options = {
            "vllm_mode": "server",
            "vllm_server_autostart": True,
            "vllm_server_port": server_process.free_port(),
        }
        # Where many share the cores, vLLM takes long to start.
        return options | {"vllm_server_timeout": 900}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


class WarmServer:
    """The part of `subprocess.Popen` that [`~trl_qarl.engines.server_process.ServerProcess`] uses."""

    def __init__(self, servers: WarmServers, pid: int):
        self.servers, self.pid, self.returncode = servers, pid, None

    def poll(self):
        if self.returncode is None:
            self.returncode = self.servers.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a server", timeout)
            time.sleep(0.02)
        return self.returncode

    def kill(self, signal: int = 9):
        if self.poll() is None:
            os.kill(self.pid, signal)

    def terminate(self):
        self.kill(15)


def run(parent: int, argv: list[str], environment: dict[str, str], log: str) -> None:
    """`python -m module argument ...`, in this process."""
    from trl_qarl.processes import end_with_parent

    os.setsid()
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), output)
    code = 1
    try:
        assert argv[1] == "-m"
        sys.argv = argv[2:]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # As an interpreter that ends.
        atexit._run_exitfuncs()
        os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in IMPORTED:
        importlib.import_module(name)
    import pytest
    from vllm.platforms import current_platform

    from testing_utils import start_engines_quickly

    start_engines_quickly(pytest.MonkeyPatch())
    current_platform.register_triton_kernel_overrides()
    for module in list(sys.modules.values()):
        if "get_mp_context" in getattr(module, "__dict__", {}):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")
    # A collection in a child must not walk, and copy, all of it.
    gc.collect()
    gc.freeze()
    answers.write("ready\n")
    for line in sys.stdin:
        kind, *arguments = json.loads(line)
        if kind == "start":
            parent, answer = os.getpid(), os.fork()
            if answer == 0:
                run(parent, *arguments)
        else:
            pid, status = os.waitpid(arguments[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
