"""Processes that tests start, which end with the test run however it ends."""

import subprocess

from trl_qarl.processes import as_child


def start(command, **options) -> subprocess.Popen:
    """
    `subprocess.Popen(command)`. On Linux SIGTERM ends the process when this one is gone: a run that is cut off tears
    nothing down, and a server would go on for good, a training until it is done.
    """
    return subprocess.Popen(as_child(command), **options)
