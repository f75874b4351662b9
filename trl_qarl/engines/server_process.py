"""The server of `vllm_server_autostart=True`: a child process of the trainer."""

import atexit
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..processes import as_child, exit_on_signals
from ..wire.handshake import TOKEN_VARIABLE
from ..wire.protocol import TRANSFER_DIR_VARIABLE
from ..wire.transfer_dir import make_transfer_dir, remove_leftover_dirs
from .background import within
from .http_session import CheckedSession, ServerLost


logger = logging.getLogger(__name__)

_TRACKER_SECONDS = 5.0


def free_port() -> int:
    """Return a free port on the loopback address, below the range that Linux uses for outgoing connections, which
    could take the port before a server does."""
    for port in random.SystemRandom().sample(range(15000, 32768), 100):
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("None of 100 ports between 15000 and 32768 is free on 127.0.0.1.")


def check_address(host: str, port: int, option: str) -> None:
    """Raise `ValueError`, which names the `option` to change, if no server can listen there."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(f"No server can listen: {error.strerror}. Change {option}.") from error


class ServerProcess:
    """A server as a child process of the trainer. It ends with [`~ServerProcess.stop`], with the interpreter, and on
    Linux also when the trainer is killed. `argv` and `environment` come from [`build_server_command`]; `token` is the
    secret that the server expects from its trainer."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log_file: Path):
        self.argv = list(argv)
        self.token = secrets.token_hex(32)
        self.environment = dict(environment)
        self.log_file = log_file
        self._process: subprocess.Popen | None = None
        self._restore_signals: Callable[[], None] | None = None
        atexit.register(self.stop)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server unless it runs; files of a killed server are removed first."""
        if self.is_running:
            return
        self.stop()
        check_address("127.0.0.1", int(self.argv[self.argv.index("--port") + 1]), "`vllm_server_port`")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        if directory := self.environment.get(TRANSFER_DIR_VARIABLE):
            remove_leftover_dirs()
            make_transfer_dir(directory)
        self._restore_signals = exit_on_signals()
        try:
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    as_child(self.argv),
                    env={**os.environ, **self.environment, TOKEN_VARIABLE: self.token},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError:
            self._clean_up()
            raise

    def wait(self, url: str, timeout: float) -> None:
        """Wait until the server answers, with progress on the terminal. `RuntimeError`, with the end of the log, is
        raised if the server ends or does not answer in time."""
        session = CheckedSession()
        assert self._process is not None
        print(f"Starting a vLLM server; its log is {self.log_file}", flush=True)
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            try:
                within(10.0, partial(session.get, f"{url}/health", timeout=5.0))
                print(f"\rvLLM server ready after {waited:.0f} s          ", flush=True)
                return
            except (ServerLost, TimeoutError):
                pass
            if not self.is_running or waited > timeout:
                state = f"ended with code {self._process.returncode}" if not self.is_running else "did not answer"
                self.stop()
                tail = self.log_file.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"The vLLM server {state} after {waited:.0f} s. The end of {self.log_file}:\n{tail}"
                )
            if sys.stdout.isatty():
                print(f"\rStarting a vLLM server ... {waited:.0f} s", end="", flush=True)
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server and its workers, which are all of one process group."""
        if self._process is None:
            return
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                logger.warning("The vLLM server did not end on SIGTERM; it is killed.")
        # Workers outlive a server that was killed.
        _end_group(self._process.pid)
        self._process.wait()
        self._process = None
        self._clean_up()

    def _clean_up(self) -> None:
        if directory := self.environment.get(TRANSFER_DIR_VARIABLE):
            shutil.rmtree(directory, ignore_errors=True)
        if self._restore_signals is not None:
            self._restore_signals()


def _end_group(group: int) -> None:
    """Kill a process group. Python's resource trackers in it end by themselves after the other processes, and first
    remove their shared memory: vLLM's message queues, of some hundred MiB."""
    deadline = time.monotonic() + _TRACKER_SECONDS
    while (members := _members(group)) and time.monotonic() < deadline:
        for pid, command in members.items():
            if b"multiprocessing.resource_tracker" not in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, bytes]:
    """Return the running processes of a group, with their command lines; empty without `/proc`."""
    members = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                members[int(entry.name)] = (entry / "cmdline").read_bytes()
    return members
