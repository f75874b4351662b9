"""
`python -m benchmarks.bench publish`: bytes, seconds and memory of a weight sync with a server in another process.
Everything is sent, as after a step that changed every matrix.

Seconds are those of the whole and of its parts: the functions of the trainer's side are timed where they are called.
The engine works while the trainer quantizes, and what is left is what the trainer waits for it.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .engines import load_learner, open_server


def measure_publish(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """One row per scheme."""
    import torch

    dtype, rows = getattr(torch, args.dtype), []
    for scheme in schemes:
        model = load_learner(path, scheme, dtype)
        with open_server(model, dtype) as (_, publisher, pid):
            rows.append(_measure_scheme(scheme, model, publisher, pid, args.repeats))
    for row in rows:
        if rows[0]["scheme"] == "bf16":
            row["bytes / bf16"] = row["matrices MiB"] / rows[0]["matrices MiB"]
            row["seconds / bf16"] = row["seconds"] / rows[0]["seconds"]
    return rows


def _measure_scheme(scheme: str, model, publisher, pid: int, repeats: int) -> dict[str, Any]:
    import psutil

    from trl_qarl.quantization.swap import quantized_layers

    processes = [psutil.Process(), *psutil.Process(pid).children(recursive=True)]

    publisher.publish("warm-up")
    results, before = [], [_reset_peak(process.pid) for process in processes]
    for repeat in range(repeats):
        for layer in quantized_layers(model).values():
            layer.invalidate()
        publisher.forget()
        with _parts_timed() as seconds:
            result = publisher.publish(f"{time.monotonic_ns()}-{repeat}")
        seconds["waiting"] = result["publish/seconds"] - sum(seconds.values())
        results.append(result | {f"{part} s": seconds[part] for part in ("quantize", "fingerprints", "waiting")})
    growth = [_peak(process.pid) - start for process, start in zip(processes, before, strict=True)]
    row = {"scheme": scheme} | _publish_row(model, publisher.dtype, results, growth)
    print(row, flush=True)
    return row


@contextmanager
def _parts_timed() -> Iterator[dict[str, float]]:
    """Adds up the seconds of the trainer's parts of a weight sync, by their names, while it is open."""
    from trl_qarl.sync import publisher

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

    timed_fingerprints = timed(publisher.fingerprints_of, "fingerprints")
    with patch.multiple(publisher, iter_checkpoint_layers=timed_layers, fingerprints_of=timed_fingerprints):
        yield seconds


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
