import signal
import socket
import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from testing_utils import dead_prefix, is_running
from testing_utils.web_servers import wait_until
from trl_qarl.engines import server_process as serve
from trl_qarl.engines.server_process import ServerProcess, free_port
from trl_qarl.wire import transfer_dir
from trl_qarl.wire.protocol import TRANSFER_DIR_VARIABLE
from trl_qarl.wire.transfer_dir import owned_prefix


def test_the_next_server_clears_what_a_killed_trainer_left(tmp_path, monkeypatch):
    """A trainer that is killed leaves its folder with a chunk of weights in it."""
    monkeypatch.setattr(transfer_dir, "transfer_bases", lambda: [tmp_path])
    left = tmp_path / f"{dead_prefix()}token"
    left.mkdir()
    (left / "chunk").write_bytes(b"weights")
    mine = tmp_path / f"{owned_prefix()}token"
    server = child_that_sleeps(tmp_path, mine)
    server.start()
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "server.log"])
    server.stop()
    assert list(tmp_path.iterdir()) == [tmp_path / "server.log"]


def child_that_sleeps(directory, transfer_dir):
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "--port", str(free_port())]
    return ServerProcess(argv, {TRANSFER_DIR_VARIABLE: str(transfer_dir)}, directory / "server.log")


def test_a_taken_port_is_refused_before_the_start(tmp_path):
    server = child_that_sleeps(tmp_path, tmp_path / "transfer")
    port = int(server.argv[-1])
    refused = pytest.raises(ValueError, match=f"in use .*, {port}[)][)]. Change `vllm_server_port`")
    with socket.create_server(("127.0.0.1", port)), refused:
        server.start()
    assert list(tmp_path.iterdir()) == []


HOLDS_A_QUEUE = """
    import multiprocessing, os, time
    from multiprocessing import shared_memory

    def engine(pipe):
        pipe.send((os.getpid(), shared_memory.SharedMemory(create=True, size=8).name))
        time.sleep(60)

    if __name__ == "__main__":
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        context.Process(target=engine, args=(theirs,)).start()
        print(*ours.recv(), flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_killed_servers_shared_memory_goes(tmp_path):
    """vLLM's message queues, which the processes of an engine share."""
    (script := tmp_path / "script.py").write_text(textwrap.dedent(HOLDS_A_QUEUE))
    somebody_elses = shared_memory.SharedMemory(create=True, size=8)
    server = child_that_sleeps(tmp_path, tmp_path / "transfer")
    server.argv[1:3] = [str(script)]
    try:
        server.start()
        wait_until(lambda: len(server.log_file.read_text().split()) == 2, 60, server.log_file.read_text)
        engine, queue = server.log_file.read_text().split()
        engine, queue = int(engine), Path("/dev/shm", queue)
        server._process.kill()
        server._process.wait()
        assert is_running(engine) and queue.exists()
        group = server._process.pid
        server.stop()
        assert not is_running(engine) and not queue.exists()
        assert not serve._members(group)
        assert Path("/dev/shm", somebody_elses.name).exists()
    finally:
        server.stop()
        somebody_elses.close()
        somebody_elses.unlink()


STARTS_A_SERVER = """
    import signal, sys, time
    # What a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from pathlib import Path
    from trl_qarl.engines.server_process import ServerProcess, free_port
    {before}
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "--port", str(free_port())]
    environment = {{"TRL_QARL_TRANSFER_DIR": {directory!r} + "/transfer"}}
    server = ServerProcess(argv, environment, Path({directory!r}, "server.log"))
    server.start()
    try:
        print(server._process.pid, flush=True)
        # Python handles a signal that comes just before a sleep after the sleep.
        for _ in range(600):
            time.sleep(0.1)
    finally:
        print("cleaned up", flush=True)
        time.sleep(1)
        print("whole", flush=True)
"""


THEIRS = "signal.signal(signal.SIGTERM, lambda *a: (print('theirs', flush=True), sys.exit(7)))"


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    ("signals", "before", "said", "codes"),
    [
        pytest.param([signal.SIGTERM], "", "", [143], marks=pytest.mark.slow),
        # `timeout` sends it to the process and then to its group.
        pytest.param([signal.SIGTERM, signal.SIGTERM], "", "", [143], marks=pytest.mark.slow),
        pytest.param([signal.SIGINT], "", "", [1, -signal.SIGINT], marks=pytest.mark.slow),
        # A handler of the user's own stays.
        ([signal.SIGTERM], THEIRS, "theirs ", [7]),
    ],
    ids=["SIGTERM", "SIGTERM twice", "SIGINT", "handled"],
)
def test_a_terminated_trainer_ends_its_server(tmp_path, signals, before, said, codes):
    script = textwrap.dedent(STARTS_A_SERVER).format(directory=str(tmp_path), before=before)
    command, pipes = [sys.executable, "-c", script], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    pid = int(process.stdout.readline())
    assert (tmp_path / "transfer").is_dir()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=60)
    assert output.split() == f"{said}cleaned up whole".split() and process.returncode in codes
    assert not is_running(pid) and not (tmp_path / "transfer").exists()


def test_the_handler_of_sigterm_goes_with_the_server(tmp_path, monkeypatch):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    server = child_that_sleeps(tmp_path, tmp_path / "transfer")
    server.start()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    server.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setattr(sys, "executable", "there-is-no-such-program")
    with pytest.raises(FileNotFoundError, match=sys.executable):
        server.start()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not (tmp_path / "transfer").exists()


def test_a_free_port_is_outside_the_ephemeral_range():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first for _ in range(20))
