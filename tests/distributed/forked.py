"""Processes as `torchrun` starts them, forked from one that has imported everything, which takes longest."""

import atexit
import gc
import importlib
import os
import signal
import sys
import traceback
from contextlib import suppress

from trl_qarl.engines.server_process import free_port


def fork_rank(rank, count, port, function, *arguments):
    """A process that calls `function`, with what `torchrun` would tell it, as one of `count`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    # As an interpreter that ends.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(count, function, *arguments):
    """Call `function` in each of `count` processes, which all end as soon as one fails."""
    for name in ("trl_qarl.trainer.qarl_trainer", "peft"):
        with suppress(ImportError):
            importlib.import_module(name)
    # A collection in a rank must not walk, and copy, what is shared.
    gc.freeze()
    port = str(free_port())
    ranks = {fork_rank(rank, count, port, function, *arguments) for rank in range(count)}
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            # The other one would wait for it.
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
