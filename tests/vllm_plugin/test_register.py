"""Effects of the plugin in every process of a server, without vLLM."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from testing_utils import is_running
from trl_qarl.wire.handshake import TOKEN_FILE_VARIABLE
from trl_qarl.wire.protocol import TRANSFER_DIR_VARIABLE


SERVER = """
    import multiprocessing, os, signal, sys, time
    from trl_qarl import vllm_plugin

    def engine(pipe):
        if sys.argv[2] == "deaf":
            vllm_plugin._LEAVE_SECONDS = 0.5
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        vllm_plugin._end_with_parent()
        vllm_plugin._end_with_parent()
        pipe.send(os.getpid())
        time.sleep(60)

    if __name__ == "__main__":
        vllm_plugin._end_with_parent()
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.get_context(sys.argv[1]).Process(target=engine, args=(theirs,)).start()
        print(ours.recv(), flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    ("method", "hearing", "variable", "ends"),
    [
        ("spawn", "hears", TOKEN_FILE_VARIABLE, True),
        ("fork", "hears", TRANSFER_DIR_VARIABLE, True),
        ("spawn", "deaf", TOKEN_FILE_VARIABLE, True),
        # Somebody else's vLLM is none of our business.
        ("spawn", "hears", "HOME", False),
    ],
)
def test_an_engine_ends_with_the_server_that_started_it(tmp_path, method, hearing, variable, ends):
    (script := tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    ours = (TOKEN_FILE_VARIABLE, TRANSFER_DIR_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {variable: str(tmp_path)}
    command = [sys.executable, str(script), method, hearing]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    engine = int(server.stdout.readline())
    try:
        time.sleep(1)
        assert is_running(engine)
        server.kill()
        server.wait()
        deadline = time.monotonic() + (10 if ends else 2)
        while is_running(engine) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_running(engine) is not ends
    finally:
        server.kill()
        if is_running(engine):
            os.kill(engine, signal.SIGKILL)
