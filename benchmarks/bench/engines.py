"""Real models, prompts and engines for the modes of `python -m benchmarks.bench` that need vLLM."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shapes import has_weights, random_model


if TYPE_CHECKING:
    from trl_qarl.quantization.schemes import QuantScheme


START_SECONDS = 300
"""Time for a server to start."""

TOPICS = [
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


def make_chats(count: int) -> list[list[dict[str, str]]]:
    texts = [f"Explain {TOPICS[i % len(TOPICS)]} in a few sentences." for i in range(count)]
    return [[{"role": "user", "content": text}] for text in texts]


def fill_up(path: str, chats: list[list[dict[str, str]]], num_tokens: int) -> list[list[dict[str, str]]]:
    """The same conversations, each question said again and again until its prompt has about `num_tokens` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    filled = []
    for [message] in chats:
        ids = tokenizer(f" {message['content']}", add_special_tokens=False)["input_ids"]
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"]
        missing = max(num_tokens - len(prompt), 0)
        more = tokenizer.decode((ids * (missing // len(ids) + 1))[:missing])
        filled.append([{**message, "content": message["content"] + more}])
    return filled


def make_prompts(path: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    chats = make_chats(count)
    if tokenizer.chat_template is None:
        return [tokenizer(chat[0]["content"])["input_ids"] for chat in chats]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


def load_learner(path: str, scheme: "str | QuantScheme", dtype):
    """Float32 master weights, as a trainer holds them, prepared for `scheme`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trl_qarl.quantization.swap import prepare_model

    if has_weights(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    else:
        model = random_model(AutoConfig.from_pretrained(path), torch.float32).eval()
        model.config.name_or_path = model.name_or_path = path
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    prepare_model(model, scheme, scale_dtype=dtype)
    return model


def _memory_of_engine(model, dtype) -> float:
    """Return the share of a GPU's memory for the weights, unquantized, and 8 GiB more for keys, values and
    activations."""
    import torch

    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize + 8 * 2**30
    return max(0.15, needed / torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0.15


def make_bench_engine(model, dtype, max_num_seqs: int):
    import torch

    from trl_qarl.engines.in_process import make_engine
    from trl_qarl.engines.spec import EngineSpec
    from trl_qarl.sync.publisher import Publisher

    engine = make_engine(
        EngineSpec.of(model, dtype),
        on_cpu=not torch.cuda.is_available(),
        distributed_executor_backend="uni",
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=_memory_of_engine(model, dtype),
    )
    return engine.llm, Publisher(model, dtype, engine)


@contextmanager
def open_engine(model, dtype, max_num_seqs: int) -> Iterator[tuple[Any, Any]]:
    import gc

    engine = make_bench_engine(model, dtype, max_num_seqs)
    try:
        yield engine
    finally:
        engine[0].llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


@contextmanager
def open_server(model, dtype) -> Iterator[tuple[Any, Any]]:
    """A server in another process: its client and the publisher to it."""
    import torch

    from trl_qarl.engines.client import QaRLClient
    from trl_qarl.engines.server import ServerEngine
    from trl_qarl.engines.server_command import build_server_command
    from trl_qarl.engines.server_process import ServerProcess, free_port
    from trl_qarl.engines.spec import EngineSpec
    from trl_qarl.sync.channels import FileChannel
    from trl_qarl.sync.publisher import Publisher

    port, on_cpu = free_port(), not torch.cuda.is_available()
    memory = [] if on_cpu else ["--gpu-memory-utilization", str(_memory_of_engine(model, dtype))]
    argv, environment = build_server_command(
        EngineSpec.of(model, dtype),
        port=port,
        on_cpu=on_cpu,
        # NCCL refuses two processes on one GPU.
        transport="file",
        vllm_args=["--max-model-len", "512", *memory],
    )
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(argv, environment, Path(folder) / "server.log")
        server.start()
        try:
            server.wait(f"http://127.0.0.1:{port}", START_SECONDS)
            client = QaRLClient(f"http://127.0.0.1:{port}", token=server.token)
            publisher = Publisher(model, dtype, ServerEngine(client, FileChannel(client)))
            publisher.check_engine()
            yield client, publisher
            client.close_session()
        finally:
            server.stop()


def pad(pairs, device):
    import torch

    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    batch, mask = torch.zeros(len(pairs), length, dtype=torch.long), torch.zeros(len(pairs), length, dtype=torch.long)
    for row, (prompt, completion) in enumerate(pairs):
        ids = prompt + completion
        batch[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), 1
    return batch.to(device), mask.to(device)


def autocast(model, dtype):
    import torch

    return torch.autocast(model.device.type, dtype, enabled=dtype is not torch.float32)


def kernels_run(model) -> dict[str, int]:
    """Kernels that ran in the last forward of a quantized model and the number of layers that used each."""
    from trl_qarl.quantization.swap import quantized_layers

    names = (layer.kernel_name for layer in quantized_layers(model).values())
    return dict(Counter(name for name in names if name is not None))


def join_names(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "unquantized"
