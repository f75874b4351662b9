"""
`python -m benchmarks.bench publish`: bytes, seconds and memory of a weight sync with a server in another process, or
an engine in this one. Everything is sent, as after a step that changed every matrix.

Seconds are those of the whole and of its parts: the functions of the trainer's side are timed where they are called,
and what is left is the engine's. Through shared memory the engine works while the trainer quantizes, and what is left
is what the trainer waits for it. Those of an engine in this process are timed too, so that what is left is its reload.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .engines import load_learner, open_engine, open_server


def measure_publish(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """One row per scheme."""
    import torch

    dtype, rows = getattr(torch, args.dtype), []
    for scheme in schemes:
        model = load_learner(path, scheme, dtype)
        if args.in_process:
            with open_engine(model, dtype, max_num_seqs=1) as (_, publisher):
                rows.append(_measure_scheme(scheme, model, publisher, None, args.repeats))
        else:
            with open_server(model, dtype) as (_, publisher, pid):
                rows.append(_measure_scheme(scheme, model, publisher, pid, args.repeats))
    for row in rows:
        if rows[0]["scheme"] == "bf16":
            row["bytes / bf16"] = row["matrices MiB"] / rows[0]["matrices MiB"]
            row["seconds / bf16"] = row["seconds"] / rows[0]["seconds"]
    return rows


def _measure_scheme(scheme: str, model, publisher, pid: int | None, repeats: int) -> dict[str, Any]:
    import psutil

    from trl_qarl.quantization.swap import quantized_layers

    processes = [psutil.Process(), *(psutil.Process(pid).children(recursive=True) if pid else ())]

    publisher.publish("warm-up")
    results, before = [], [_reset_peak(process.pid) for process in processes]
    rest = "waiting" if publisher.engine.works_meanwhile else "engine" if pid else "reload"
    for repeat in range(repeats):
        for layer in quantized_layers(model).values():
            layer.invalidate()
        publisher.forget()
        with _parts_timed(publisher.engine, pid is None) as seconds:
            result = publisher.publish(f"{time.monotonic_ns()}-{repeat}")
        results.append(result | _parts(result, seconds, rest))
    growth = [_peak(process.pid) - start for process, start in zip(processes, before, strict=True)]
    row = {"scheme": scheme} | _publish_row(model, publisher.dtype, results, growth)
    print(row, flush=True)
    return row


@contextmanager
def _parts_timed(engine, with_engine: bool) -> Iterator[dict[str, float]]:
    """Adds up the seconds spent in what a weight sync consists of, by the names of parts, while it is open."""
    from trl_qarl.sync import publisher

    functions = [(publisher, "fingerprints_of", "fingerprints")]
    if with_engine:
        # The trainer's side imports nothing of what runs in vLLM.
        channel = sys.modules[type(engine._worker.weight_transfer_engine).__module__]
        functions += [(channel, name, "engine's fingerprints") for name in ("fingerprint", "live_fingerprints")]
    seconds: dict[str, float] = defaultdict(float)

    def timed(function: Callable, part: str) -> Callable:
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - start

        return call

    layers = publisher.iter_checkpoint_layers

    def timed_layers(*args, **kwargs):
        following = timed(layers(*args, **kwargs).__next__, "quantize")
        while True:
            try:
                layer = following()
            except StopIteration:
                return
            yield layer

    with ExitStack() as stack:
        stack.enter_context(patch.object(publisher, "iter_checkpoint_layers", timed_layers))
        for owner, name, part in functions:
            stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
        yield seconds


_PARTS = ("quantize", "fingerprints", "engine's fingerprints")


def _parts(result: dict[str, float], seconds: dict[str, float], rest: str) -> dict[str, float]:
    """Seconds of each part under the names of columns; whoever does what is left is `rest`."""
    seconds[rest] = result["publish/seconds"] - sum(seconds.values())
    return {f"{name} s": seconds[name] for name in (*_PARTS, rest) if name in seconds}


def _publish_row(model, dtype, results: list[dict[str, float]], growth: list[int]) -> dict[str, Any]:
    from trl_qarl.checkpoint.layout import iter_checkpoint_tensors
    from trl_qarl.quantization.swap import quantized_layers

    layers = quantized_layers(model)
    sizes = {name: tensor.nbytes for name, tensor in iter_checkpoint_tensors(model, dtype)}
    embeddings = sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
    median = {name: statistics.median(result[name] for result in results) for name in results[0]}
    return {
        "matrices MiB": (sum(sizes.values()) - embeddings) / 2**20,
        "embeddings MiB": embeddings / 2**20,
        "quantized layers": len(layers),
        "MiB sent": median["publish/megabytes"],
        "seconds": median["publish/seconds"],
        **{name: value for name, value in median.items() if name.endswith(" s")},
        "peak memory, trainer MiB": growth[0] / 2**20,
        "peak memory, engine MiB": max(growth[1:], default=0) / 2**20,
    }


def _reset_peak(pid: int) -> int:
    """Forget a process's peak resident memory and return what it holds now, in bytes (Linux)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def _peak(pid: int) -> int:
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
