"""Check of `trl-qarl doctor --engine`: starts a tiny engine, publishes weights to it and samples."""

import itertools
import tempfile

import torch

from ..quantization.plan import QuantPlan, get_plan
from ..quantization.swap import prepare_model
from .checks import Finding


def check_engine(plan: QuantPlan) -> list[Finding]:
    """Start vLLM in this process with a tiny random model, publish to it, which includes an audit, and sample one
    prompt twice. Every error becomes a finding."""
    try:
        return _try_engine(plan)
    except Exception as error:
        # vLLM raises any kind of error, which must not hide the other findings.
        line = next(iter(str(error).splitlines()), "")
        return [Finding("error", f"vLLM failed: {type(error).__name__}: {line}", "see the log above")]


def _try_engine(plan: QuantPlan) -> list[Finding]:
    from ..quantization.gemm import has_fast_bf16
    from ..rollout.in_process import make_engine
    from ..rollout.publisher import Publisher
    from ..rollout.spec import EngineSpec

    on_cpu = not torch.cuda.is_available()
    # `w4a8` runs only in bfloat16.
    dtype = torch.float32 if on_cpu and not has_fast_bf16() else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        model = _tiny_model(folder).to("cpu" if on_cpu else "cuda")
        prepare_model(model, _in_small(plan), scale_dtype=dtype)
        engine = make_engine(
            EngineSpec.of(model, dtype),
            on_cpu=on_cpu,
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            max_model_len=64,
            max_num_seqs=4,
            gpu_memory_utilization=0.1,
        )
        try:
            publisher = Publisher(model, dtype, engine)
            kernels = publisher.check_engine()["kernels"]
            result = publisher.publish("doctor")
            samples = sample_twice(engine)
        finally:
            engine.close()
    text = (
        f"vLLM took {result['publish/tensors']:.0f} tensors of a tiny {plan.name} model in {result['publish/seconds']:.1f} s "
        f"and holds every one of them; it runs {', '.join(kernels) or 'unquantized'}"
    )
    different = Finding("ok", "2 samples of one prompt differ")
    if samples[0] == samples[1]:
        # Groups of equal completions have no advantage.
        equal = "2 samples of one prompt are equal: a group of equal completions teaches nothing"
        different = Finding("error", equal, "remove a seed from the engine's arguments and environment")
    return [Finding("ok", text), different]


def _in_small(plan: QuantPlan) -> QuantPlan:
    """Return a plan that gives every scheme of `plan` to the two layers of [`_tiny_model`], whose names differ."""
    if plan.is_uniform or not plan.is_quantized:
        return plan
    parts = [f"re:.*layers.{layer}.{part}.*" for layer in (0, 1) for part in ("self_attn", "mlp")]
    return get_plan(dict(zip(parts, itertools.cycle(plan.schemes))))


def _tiny_model(folder: str):
    """Return a random Llama of two layers with sizes that every scheme accepts, and save it in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def sample_twice(engine) -> list[list[int]]:
    """Return the token ids of two samples of one prompt."""
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
    return engine.generate([[3, 4, 5, 6]], **sampling)["completion_ids"]
