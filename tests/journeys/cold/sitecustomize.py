"""Changes a process that trains, before it does, where `JOURNEYS_COLD=1` starts new interpreters."""

import sys


if {"trl_qarl.scripts.train", "train.py"} & {*sys.orig_argv}:
    import ranks

    ranks.prepare()
