"""
`python -m benchmarks.bench alignment`: log-probs of sampled tokens, engine against learner.

It samples at temperature 1 from an engine that was given the learner's tensors, and scores the same tokens with two
learners: the quantized one, whose forward uses the same tensors, with `numerics="fast"` and, in bfloat16, with
`"engine"`; and one in high precision. One column is the difference of a learner from *itself* when its embeddings are
rounded once more: two programs that round differently anywhere cannot be expected closer than that. Of a mixture, one
is the share of selections of experts, one for each token and layer, that are not those of the learner with engine
numerics.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from .engines import TOPICS, autocast, join_names, kernels_run, load_learner, make_prompts, open_engine, open_server


if TYPE_CHECKING:
    from trl_qarl.quantization.schemes import QuantScheme


def measure_alignment(path: str, schemes: "Sequence[str | QuantScheme]", args) -> list[dict[str, Any]]:
    """
    One row per dtype, scheme and learner: share of equal log-probs, mean and max of |dlogp| and k3, over at least
    `args.tokens` tokens.
    """
    import torch

    from trl_qarl.quantization.schemes import SCHEMES, get_scheme
    from trl_qarl.quantization.swap import restore_model

    rows = []
    for dtype_name in args.dtypes:
        dtype, floor = getattr(torch, dtype_name), None
        for scheme in map(get_scheme, schemes):
            model = load_learner(path, scheme, dtype)
            # On a GPU the engine has to be another one for its arithmetic to be repeated.
            is_repeated = model.device.type == "cuda" and getattr(args, "numerics", "fast") == "engine"
            with (
                _engine_numerics(model, dtype) if is_repeated else nullcontext(),
                (
                    open_server(model, dtype)
                    if args.rollout == "server"
                    else open_engine(model, dtype, max_num_seqs=len(TOPICS))
                ) as (sampler, publisher),
            ):
                publisher.publish("0")
                samples = _sample(sampler, path, args.tokens, args.new_tokens)
                engine_kernels = publisher.engine.describe()["kernels"]
            learners = ["high precision", "quantized"] if scheme.is_quantized else ["unquantized"]
            if is_repeated or _can_use_engine_numerics(model, dtype):
                learners.append(f"{learners[-1]}, engine numerics")
            measured, engine_routes = {}, []
            for learner in reversed(learners):
                is_exact = "engine" in learner
                if learner == "high precision":
                    restore_model(model)
                with _engine_numerics(model, dtype) if is_exact else nullcontext(), _routes(model) as routes:
                    logps = _learner_logps(model, samples, dtype)
                measured[learner] = _mismatch(logps, [logp for *_, row in samples for logp in row])
                engine_routes = routes if is_exact else engine_routes
                if engine_routes:
                    measured[learner]["flipped routes"] = _flipped(routes, engine_routes)
                if learner != "high precision" and not is_exact:
                    with _one_rounding(model, dtype):
                        other = _learner_logps(model, samples, dtype)
                    measured[learner]["mean, itself rounded once more"] = _mismatch(logps, other)["mean"]
                measured[learner]["learner kernels"] = join_names(kernels_run(model))
            floor = floor if scheme.is_quantized else measured["unquantized"]["mean"]
            for learner in learners:
                row = {"dtype": dtype_name, "scheme": scheme.name, "group size": scheme.group_size, "learner": learner}
                row |= measured[learner]
                row["mean / unquantized"] = None if floor is None else row["mean"] / floor
                row["engine kernels"] = join_names(engine_kernels)
                rows.append(row)
                print({key: value for key, value in row.items() if "kernels" not in key}, flush=True)
            if scheme == SCHEMES["w4a16"] and args.rollout == "colocate":
                rows.append(_same_weights_unquantized(path, scheme, dtype, args, floor))
                print(rows[-1], flush=True)
    return rows


def summarize_alignment(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per dtype, scheme and group size of what [`measure_alignment`] returns: its learners side by side."""
    summary: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        name = _SUMMARIZED.get(row["learner"])
        if name is None:
            continue
        keys = [key for key in ("dtype", "scheme", "group size") if key in row]
        line = summary.setdefault(tuple(row[key] for key in keys), {key: row[key] for key in (*keys, "tokens")})
        line |= {f"{name}: {key}": row[key] for key in ("equal", "mean", "max", "k3", "flipped routes") if key in row}
    return list(summary.values())


_SUMMARIZED = {
    "high precision": "unaligned",
    "quantized": "fast",
    "unquantized": "fast",
    "quantized, engine numerics": "engine",
    "unquantized, engine numerics": "engine",
}


def _same_weights_unquantized(path: str, scheme: "QuantScheme", dtype, args, floor: float | None) -> dict[str, Any]:
    """Return the floor of this very policy: its dequantized weights in an ordinary engine and an ordinary learner."""
    import torch

    from trl_qarl.quantization.swap import quantized_layers, restore_model

    model = load_learner(path, scheme, dtype)
    with torch.no_grad():
        for layer in quantized_layers(model).values():
            for weight in layer.quantized_weights.values():
                weight.parameter.copy_(weight.low_bit_weight().dequantize(dtype).view_as(weight.parameter))
    restore_model(model)
    with open_engine(model, dtype, max_num_seqs=len(TOPICS)) as (llm, publisher):
        publisher.publish("0")
        samples = _sample(llm, path, args.tokens, args.new_tokens)
    logps = _learner_logps(model, samples, dtype)
    row = {
        "dtype": str(dtype).removeprefix("torch."),
        "scheme": scheme.name,
        "group size": scheme.group_size,
        "learner": "its weights, unquantized on both sides",
    }
    row |= _mismatch(logps, [logp for *_, sampled in samples for logp in sampled])
    with _one_rounding(model, dtype):
        row["mean, itself rounded once more"] = _mismatch(logps, _learner_logps(model, samples, dtype))["mean"]
    return row | {
        "mean / unquantized": None if floor is None else row["mean"] / floor,
        "engine kernels": "unquantized",
    }


@contextmanager
def _engine_numerics(model, dtype) -> Iterator[None]:
    from trl_qarl.bitwise.attach import attach_engine_numerics, detach_engine_numerics

    attach_engine_numerics(model, dtype)
    try:
        yield
    finally:
        detach_engine_numerics(model)


def _can_use_engine_numerics(model, dtype) -> bool:
    from trl_qarl.bitwise import cpu
    from trl_qarl.bitwise.availability import check_engine_numerics

    if model.device.type != "cpu":
        # The engine of these rows is an ordinary one, which a learner on a GPU cannot repeat.
        return False
    try:
        check_engine_numerics(model, dtype)
    except ValueError:
        return False
    # Without vLLM's kernels a learner repeats itself alone, and no engine.
    if reason := cpu.reason_against():
        print(f"No row with engine numerics: {reason}.")
    return reason is None


def _sample(sampler, path: str, num_tokens: int, new_tokens: int) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompts, completions of at most `new_tokens` and their log-probs from `sampler`, an engine or the client of a
    server."""
    samples: list[tuple[list[int], list[int], list[float]]] = []
    prompts = make_prompts(path, len(TOPICS))
    generate = _generate_in_process if hasattr(sampler, "llm_engine") else _generate_in_server
    while sum(len(tokens) for _, tokens, _ in samples) < num_tokens:
        # Without a seed, of which vLLM can die on a CPU; an engine that has just been started repeats itself.
        samples += zip(prompts, *generate(sampler, prompts, new_tokens), strict=True)
    return samples


def _generate_in_process(llm, prompts, new_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=1.0, max_tokens=new_tokens, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in completions]
    return tokens, [
        [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
        for completion, ids in zip(completions, tokens, strict=True)
    ]


def _generate_in_server(client, prompts, new_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    output = client.generate(prompts, max_tokens=new_tokens)
    return output["completion_ids"], [[entry[0] for entry in row] for row in output["logprobs"]]


def _learner_logps(model, samples, dtype) -> list[float]:
    """Log-prob of every sampled token, in order, scored a sequence at a time."""
    import torch

    logps: list[float] = []
    for prompt, completion, _ in samples:
        ids = torch.tensor([prompt + completion], device=model.device)
        with torch.no_grad(), autocast(model, dtype):
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logps += torch.log_softmax(logits.float(), -1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return logps


@contextmanager
def _routes(model) -> Iterator[list[Any]]:
    """While open, the experts `(tokens, k)` that each router chooses, sorted, are appended to a list."""
    from trl_qarl.bitwise.modules import Router, operation_for

    routes: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: routes.append(output[2].sort(-1).values))
        for module in model.modules()
        if operation_for(module, "fused") is Router
    ]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


def _flipped(routes: list[Any], others: list[Any]) -> float:
    import torch

    differs = [(ours != theirs).any(-1) for ours, theirs in zip(routes, others, strict=True)]
    return torch.cat(differs).double().mean().item()


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

    from trl_qarl.telemetry.mismatch import mismatch_metrics, mismatch_sums

    a, b = torch.tensor([learner]), torch.tensor([engine])
    metrics = mismatch_metrics(*mismatch_sums(a, b, torch.ones_like(a)))
    return {
        "tokens": a.numel(),
        "equal": (a == b).double().mean().item(),
        "mean": metrics["mismatch/abs_logp_mean"],
        "max": metrics["mismatch/abs_logp_max"],
        "k3": metrics["mismatch/k3"],
    }
