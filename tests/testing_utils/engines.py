"""Engines in this process and the learners that publish to them: what both say of the same tokens."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_qarl.quantization.swap import prepare_model


PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41, 42], [100 + i for i in range(40)]]


def make_publisher(path, scheme="w4a16", dtype=torch.float32, **swap):
    """A publisher of the model in a folder to an engine that was made for it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prepare_model(model, scheme, scale_dtype=dtype, **swap)
    return publish_to_engine(model, path, dtype)


def publish_to_engine(model, path, dtype, **arguments):
    """A publisher of `model`, with the tokenizer in the folder `path`, to an engine that is started for it."""
    from trl_qarl.engines.in_process import make_engine
    from trl_qarl.engines.spec import EngineSpec
    from trl_qarl.sync.publisher import Publisher

    arguments = {"max_model_len": 128, "max_num_seqs": 8, "max_logprobs": -1} | arguments
    engine = make_engine(EngineSpec.of(model, dtype), on_cpu=True, **arguments)
    return Publisher(model, dtype, engine, AutoTokenizer.from_pretrained(path))


def engine_model(publisher):
    """The engine's own model."""
    return publisher.engine._worker.model_runner.model


def engine_logps(llm) -> list[list[float]]:
    """Log-prob of each token of [`PROMPTS`] after its first."""
    from trl_qarl.engines.in_process import InProcessEngine

    return [InProcessEngine(llm).score(prompt) for prompt in PROMPTS]


@torch.no_grad()
def learner_logps(model, dtype=torch.float32) -> list[list[float]]:
    """The same of the learner."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            logits = model(ids).logits[0, :-1]
        rows.append(torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None])[:, 0].tolist())
    return rows


def differences(a, b) -> torch.Tensor:
    return (torch.tensor(sum(a, [])) - torch.tensor(sum(b, []))).abs()


def mismatch(publisher) -> float:
    """Largest difference of engine and learner, in nats."""
    return differences(engine_logps(publisher.engine.llm), learner_logps(publisher.model)).max().item()


def update_masters(model, seed, size=0.02):
    """Move whatever is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
