"""
`python -m benchmarks.bench publish`: bytes, seconds and memory of a weight sync with a server in another process, or
an engine in this one.

First everything is sent, as after a step that changed every matrix. With learning rates, what changed is sent after
real training steps too: policy gradients on random answers, half of which were good.

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

from .engines import load_learner, make_prompts, open_engine, open_server


def measure_publish(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """One row per scheme for a weight sync of everything, and one per learning rate for one of what changed."""
    import torch

    dtype, rows = getattr(torch, args.dtype), []
    for scheme in schemes:
        model = load_learner(path, scheme, dtype)
        if args.in_process:
            with open_engine(model, dtype, max_num_seqs=1) as (_, publisher):
                rows += _measure_scheme(path, scheme, model, publisher, None, args)
        else:
            with open_server(model, dtype, make_channel=_channel_of(args)) as (_, publisher, pid):
                rows += _measure_scheme(path, scheme, model, publisher, pid, args)
    full = [row for row in rows if row["sent"] == "everything"]
    for row in full:
        if full[0]["scheme"] == "bf16":
            row["bytes / bf16"] = row["matrices MiB"] / full[0]["matrices MiB"]
            row["seconds / bf16"] = row["seconds"] / full[0]["seconds"]
    return rows


def _measure_scheme(path: str, scheme: str, model, publisher, pid: int | None, args) -> list[dict[str, Any]]:
    import psutil
    import torch

    from trl_qarl.quantization.swap import quantized_layers
    from trl_qarl.rollout.publisher import Publisher

    processes = [psutil.Process(), *(psutil.Process(pid).children(recursive=True) if pid else ())]

    def measure(publisher, prepare, repeats: int) -> dict[str, Any]:
        results, before = [], [_reset_peak(process.pid) for process in processes]
        rest = "waiting" if publisher.engine.works_meanwhile else "engine" if pid else "reload"
        for repeat in range(repeats):
            prepare()
            with _parts_timed(publisher.engine, pid is None) as seconds:
                result = publisher.publish(f"{time.monotonic_ns()}-{repeat}")
            results.append(result | _parts(result, seconds, rest))
        growth = [_peak(process.pid) - start for process, start in zip(processes, before, strict=True)]
        return _publish_row(model, publisher.dtype, results, growth)

    def everything():
        for layer in quantized_layers(model).values():
            layer.invalidate()
        publisher.forget()

    publisher.publish("warm-up")
    rows = [{"scheme": scheme, "sent": "everything"} | measure(publisher, everything, args.repeats)]
    print(rows[-1], flush=True)
    if args.learning_rates:
        changes = Publisher(model, publisher.dtype, publisher.engine, delta=True)
        rows_of_copies = measure(changes, lambda: None, 1)
        rows[0]["copy, trainer MiB"] = rows_of_copies["peak memory, trainer MiB"]
        rows[0]["copy, engine MiB"] = rows_of_copies["peak memory, engine MiB"]
    for rate in args.learning_rates:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
        # The first steps of AdamW are larger than those of a training.
        train(path, model, optimizer, publisher.dtype, args.updates, seed=args.updates)
        changes.publish(f"settled {rate}")
        train(path, model, optimizer, publisher.dtype, args.updates, seed=args.updates)
        row = measure(changes, lambda: None, 1)
        rows.append({"scheme": scheme, "sent": f"changes, {args.updates} updates at {rate:g}"} | row)
        print(rows[-1], flush=True)
    return rows


@contextmanager
def _parts_timed(engine, with_engine: bool) -> Iterator[dict[str, float]]:
    """Adds up the seconds spent in what a weight sync consists of, by the names of parts, while it is open."""
    from trl_qarl.rollout import channels, publisher
    from trl_qarl.wire import delta, patches

    functions = [(publisher, "fingerprints_of", "fingerprints"), (delta, "_deflate", "compress")]
    if with_engine:
        # The trainer's side imports nothing of what runs in vLLM.
        channel = sys.modules[type(engine._worker.weight_transfer_engine).__module__]
        functions += [(patches, "apply_delta", "apply")]
        functions += [(channel, name, "engine's fingerprints") for name in ("fingerprint", "live_fingerprints")]
    elif isinstance(engine.channel, channels.HTTPChannel):
        functions += [(channels, "save", "send"), (engine.channel, "_upload", "send")]
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


_PARTS = ("quantize", "fingerprints", "difference", "compress", "send", "apply", "engine's fingerprints")


def _parts(result: dict[str, float], seconds: dict[str, float], rest: str) -> dict[str, float]:
    """Seconds of each part under the names of columns; whoever does what is left is `rest`."""
    if "publish/delta_seconds" in result:
        seconds["difference"] = result["publish/delta_seconds"] - seconds["compress"]
    seconds[rest] = result["publish/seconds"] - sum(seconds.values())
    return {f"{name} s": seconds[name] for name in (*_PARTS, rest) if name in seconds}


def train(path: str, model, optimizer, dtype, updates: int, seed: int) -> None:
    """Make updates by policy gradients on four random answers each, of which two were good."""
    import torch

    from trl_qarl.quantization.gemm import has_fast_bf16

    from .engines import autocast

    if model.device.type == "cpu" and not has_fast_bf16():
        dtype = torch.float32
    draw = torch.Generator().manual_seed(seed)
    prompts = make_prompts(path, 8)
    for update in range(updates):
        prompt = torch.tensor([prompts[update % len(prompts)][-12:]] * 4)
        ids = torch.cat([prompt, torch.randint(model.config.vocab_size, (4, 4), generator=draw)], 1).to(model.device)
        with autocast(model, dtype):
            logits = model(ids[:, :-1]).logits[:, -4:].float()
        log_probs = torch.log_softmax(logits, -1).gather(2, ids[:, -4:, None])[..., 0].mean(1)
        (log_probs * torch.tensor([-1.0, 1.0, -1.0, 1.0], device=ids.device)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _channel_of(args):
    """What makes the way to the server: files, or HTTP with as many megabits per second as there are to be."""
    from trl_qarl.rollout.channels import FileChannel, HTTPChannel

    if args.megabits is None:
        return HTTPChannel if args.http else FileChannel

    class Throttled(HTTPChannel):
        """A line of so many megabits per second, as the client sees it."""

        _piece_bytes = 2**18

        def _upload(self, data):
            post = self.client.session.post

            def post_slowly(url, data, **request):
                start = time.monotonic()
                answer = post(url, data=data, **request)
                time.sleep(max(0.0, len(data) * 8e-6 / args.megabits - (time.monotonic() - start)))
                return answer

            with patch.object(self.client.session, "post", post_slowly):
                return super()._upload(data)

    return Throttled


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
