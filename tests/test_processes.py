"""Signals to a command, as supervisors, `docker stop` and shells send them, and what is left of its processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from testing_utils import is_running, path_without
from trl_qarl.checkpoint.marker import is_complete
from trl_qarl.engines.server_process import free_port
from trl_qarl.processes import end_with_parent, exit_on_signals


# A trainer that ends in an orderly manner leaves a file with its pid.
REWARDS = """
import atexit, os, pathlib, random

atexit.register(lambda: pathlib.Path(f"ended-{os.environ.get('RANK', 0)}").write_text(str(os.getpid())))


def anything(completions, **kwargs):
    return [random.random() for _ in completions]
"""


def has_pid_namespaces() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode
    )


as_process_1 = pytest.param(
    ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"],
    id="as process 1 of a container",
    marks=pytest.mark.skipif(not has_pid_namespaces(), reason="needs `unshare` and the right to make PID namespaces"),
)
in_a_shell = pytest.param([], id="in a shell")


def begin_as_child():
    """Begin a child: it heeds signals that a shell's commands in the background, or those of `nohup`, ignore. It is
    killed if the test run is cut off, and so is what `unshare` started."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def running(folder, prefix, arguments, is_up, environment=None, warm=None):
    """A command once it is up and, where that is another one, the process that began with `prefix`."""
    log = folder / "log.txt"
    command = [*prefix, sys.executable, "-m", "trl_qarl.cli", *arguments]
    if warm is not None:
        process = warm.start(command, environment, log, folder)
    else:
        with open(log, "w") as file:
            outputs = {"stdout": file, "stderr": file, "preexec_fn": begin_as_child}
            process = subprocess.Popen(command, cwd=folder, env=environment, **outputs)
    try:
        deadline, first = time.monotonic() + 240, psutil.Process(process.pid)
        while not is_up(found := (first.children() or [None])[0] if prefix else first):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found, process
    finally:
        # What is left of it after its command has gone is found by its working directory.
        for one in psutil.process_iter(["cwd"]):
            if one.info["cwd"] == str(folder):
                one.kill()
        process.wait()


@pytest.fixture
def train(train_argv, tmp_path, warm):
    """A training of many steps by the command, `train(prefix, options)`, which has saved two checkpoints; one process
    in a shell starts at once."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    options = dict(zip(train_argv[::2], train_argv[1::2], strict=True))
    options |= {"--reward_funcs": "rewards.anything", "--max_steps": "5000", "--save_total_limit": "3"}
    words = [word for option in options.items() for word in option]
    environment = {**os.environ, "PYTHONPATH": path_without(tmp_path, "vllm", "deepspeed", "bitsandbytes")}

    def start(prefix=(), options=()):
        def is_up(_):
            return is_complete(tmp_path / "run" / "checkpoint-2")

        is_warm = warm if not prefix and not options else None
        return running(tmp_path, prefix, ["train", *words, *options], is_up, environment, is_warm)

    return start


def ended(processes, seconds=20) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_running(process.pid) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(is_running(process.pid) for process in processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "prefix"),
    [
        pytest.param(number, *place.values, id=f"{number.name} {place.id}", marks=[*place.marks, *marks])
        for number, place, *marks in (
            (signal.SIGINT, in_a_shell),
            (signal.SIGTERM, in_a_shell, pytest.mark.nightly),
            (signal.SIGTERM, as_process_1, pytest.mark.nightly),
            (signal.SIGHUP, as_process_1, pytest.mark.nightly),
        )
    ],
)
def test_a_signal_to_the_train_command_ends_the_trainer(train, tmp_path, prefix, number):
    with train(prefix) as (command, process):
        everything = [command, *command.children(recursive=True)]
        command.send_signal(number)
        assert ended(everything)
        # A process ends by SIGINT itself where it can, which shells show as 130.
        said = (tmp_path / "log.txt").read_text()
        assert process.wait() in ({130, -2} if number == signal.SIGINT else {128 + number}), said
    assert (tmp_path / "ended-0").exists()
    checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert any(map(is_complete, checkpoints[-2:]))
    expected = r"interrupted. \S+checkpoint-\d+ is complete: go on from it with `--resume_from_checkpoint true`"
    assert re.search(expected, said)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize("prefix", [as_process_1])
def test_sigterm_to_the_command_ends_both_ranks(train, tmp_path, prefix):
    with train(prefix, ["--multi_gpu", "--num_processes", "2"]) as (command, process):
        everything = [command, *command.children(recursive=True)]
        assert len(everything) >= 3
        command.terminate()
        assert ended(everything)
        assert process.wait() == 143
    assert (tmp_path / "ended-0").exists()
    assert "Traceback" not in Path(tmp_path / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="one process"),
        pytest.param(["--multi_gpu", "--num_processes", "2"], id="two", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_left_of_a_killed_train_command(train, options):
    with train((), options) as (command, _):
        everything = [command, *command.children(recursive=True)]
        command.kill()
        assert ended(everything)


def test_another_thread_installs_no_handler():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(exit_on_signals).result()()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        restore = exit_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.value.code == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


DROPPED = {
    "finalizer": "class A:\n def __del__(self): work()\na = A(); del a",
    "finalizer that catches all": "class A:\n def __del__(self):\n  try: work()\n  except: pass\na = A(); del a",
    "callback": "import weakref\nclass A: pass\na = A(); r = weakref.ref(a, lambda _: work()); del a",
}


@pytest.mark.parametrize("code", DROPPED.values(), ids=DROPPED)
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_whose_exit_python_drops_is_repeated(code, num_signals):
    code = f"""
import time
from trl_qarl.processes import exit_on_signals
exit_on_signals()
def work():
    print("at work", flush=True)
    end = time.monotonic() + 1
    while time.monotonic() < end: pass
{code}
try:
    time.sleep(60)
finally:
    print("cleaned up", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "at work\n"
        for _ in range(num_signals):
            process.terminate()
        try:
            assert process.wait(60) == 143 and process.stdout.read() == "cleaned up\n"
        finally:
            process.kill()


def test_a_missed_signal_is_sent_again():
    code = """
import signal, time
from trl_qarl.processes import exit_on_signals
send = signal.pthread_kill
signal.pthread_kill = lambda *_: setattr(signal, "pthread_kill", send)
exit_on_signals()
class A:
    def __del__(self): signal.raise_signal(signal.SIGTERM)
A()
time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 143


def test_a_signal_during_the_start_waits_for_its_handler():
    late = "import time; time.sleep(1); import trl_qarl.processes as p; p.exit_on_signals(); time.sleep(60)"
    code = f"import os, sys, trl_qarl.processes as p; p.become([sys.executable, '-c', {late!r}], os.environ)"
    process = psutil.Popen([sys.executable, "-c", code])
    while late not in process.cmdline():
        time.sleep(0.01)
    process.terminate()
    assert process.wait(30) == 143


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone does it")
def test_a_child_ends_with_its_parent(tmp_path):
    code = (
        "import subprocess, sys, time\nfrom trl_qarl.processes import as_child\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "subprocess.Popen(as_child([sys.executable, '-c', code])).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert ended([child])


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("prefix", [as_process_1])
def test_a_server_ends_by_sigterm_before_it_is_up(tiny_model, tmp_path, prefix):
    """vLLM has a handler of its own once it is up; process 1 without one would not hear of the signal until then."""
    options = ["--model", tiny_model, "--port", str(free_port()), "--transfer_dir", str(tmp_path / "transfer")]

    def is_up(server):
        return server and "vllm.entrypoints.openai.api_server" in server.cmdline()

    with running(tmp_path, prefix, ["vllm-serve", *options], is_up) as (server, process):
        time.sleep(2)
        everything = [server, *server.children(recursive=True)]
        server.terminate()
        assert ended(everything, 30)
        assert process.wait() == 143
