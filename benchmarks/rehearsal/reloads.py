"""
A publication to vLLM's CUDA code on a machine without a GPU (`benchmarks/rehearsal/fake_gpu.py`): its model loader,
its worker's weight updates, our transport, transfer engine and publisher are the real ones. For a process of its own.
"""

import contextlib
import gc
import tempfile
from pathlib import Path
from types import MethodType, SimpleNamespace

from rehearsal import fake_gpu


NUM_PUBLICATIONS = 4


def start(dtype_name: str = "bfloat16") -> None:
    """Turn this process into one of vLLM's for GPUs."""
    fake_gpu.install_in_cpu_wheel()
    import torch

    from trl_qarl.vllm_plugin import register, worker  # noqa: F401

    # vLLM imports the worker's extension when a worker starts.
    register()
    torch.set_num_threads(1)


def rehearse(arch: str, scheme: str, capability: tuple[int, int], nccl: bool = False, **overrides) -> dict:
    """
    Publish four times to an engine with dummy weights, the last time a single layer, and load an export of the same
    learner afresh.

    Returns:
        `kernels` by their numbers of layers; `sent`, how many tensors of each publication; `num_tensors` reachable
        from a layer; `different` and `one_sided`, names of those that a fresh load has otherwise or does not have;
        `numbers` of layers likewise, with both values; `moved`, names of tensors that do not lie where a CUDA graph
        would have captured them, and `stale` of those where something else lies; `unnamed`, how many tensors the
        garbage collector finds that have no name.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from testing_utils import MIXTURES, make_tiny_mixture, make_tiny_model
    from trl_qarl import export_checkpoint, prepare_model
    from trl_qarl.checkpoint.layout import quantization_config
    from trl_qarl.quantization.inventory import Inventory
    from trl_qarl.sync.publisher import Publisher
    from trl_qarl.vllm_plugin.engine_tensors import kernels_in_use
    from trl_qarl.wire.fingerprint import fingerprint

    fake_gpu.capability = tuple(capability)
    with tempfile.TemporaryDirectory() as folder:
        path = (make_tiny_mixture if arch in MIXTURES else make_tiny_model)(folder, arch, **overrides)
        learner = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if scheme != "bf16":
            prepare_model(learner, scheme, scale_dtype=torch.bfloat16)
        quantization = quantization_config(Inventory.of(learner)) or None
        model, config = _load(path, quantization, load_format="dummy", nccl=nccl)
        transport = _transport(model, config, nccl)
        publisher = Publisher(learner, torch.bfloat16, transport)
        captured = _tensors(model)
        addresses = {name: tensor.data_ptr() for name, tensor in captured.items()}
        sent = []
        for number in range(NUM_PUBLICATIONS):
            if number:
                is_last = number == NUM_PUBLICATIONS - 1
                _move_masters(learner.model.layers[1] if is_last else learner, seed=number)
            sent.append(publisher.publish(str(number))["publish/tensors"])
        export = export_checkpoint(
            learner, Path(folder) / "export", AutoTokenizer.from_pretrained(path), torch.bfloat16
        )
        fresh, _ = _load(str(export), quantization, load_format="safetensors", nccl=nccl)
    ours, theirs = _tensors(model), _tensors(fresh)
    values = [{name: fingerprint(tensor) for name, tensor in side.items()} for side in (ours, theirs)]
    both = ours.keys() & theirs.keys()
    named = {tensor.untyped_storage().data_ptr() for tensor in ours.values()}
    result = {
        "kernels": kernels_in_use(model),
        "sent": sent,
        "num_tensors": len(ours),
        "different": sorted(name for name in both if values[0][name] != values[1][name]),
        "one_sided": sorted(ours.keys() ^ theirs.keys()),
        "numbers": sorted(_numbers(model) ^ _numbers(fresh)),
        "moved": sorted(
            name for name, address in addresses.items() if name not in ours or ours[name].data_ptr() != address
        ),
        "stale": sorted(name for name in both & captured.keys() if fingerprint(captured[name]) != values[1][name]),
        "unnamed": len({tensor.untyped_storage().data_ptr() for tensor in _found_by_collector(model)} - named),
    }
    del model, fresh, transport, publisher, captured, ours, theirs
    gc.collect()
    return result


def _load(path: str, quantization: dict | None, load_format: str, nccl: bool):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from trl_qarl.engines.gpu_kernels import kernel_arguments
    from trl_qarl.wire.protocol import FILE_BACKEND, NCCL_BACKEND

    is_dummy = load_format == "dummy"
    config = EngineArgs(
        model=path,
        dtype="bfloat16",
        load_format=load_format,
        hf_overrides={"quantization_config": quantization} if is_dummy and quantization else {},
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        # Graphs without compiling, whose modules look up operations that fuse others.
        compilation_config={"mode": 0, "cudagraph_mode": "FULL"},
        weight_transfer_config={"backend": NCCL_BACKEND if nccl else FILE_BACKEND},
        **kernel_arguments(quantization, "bfloat16", on_cpu=False),
    ).create_engine_config()
    config.device_config.device = torch.device("cpu")
    with set_current_vllm_config(config):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        else:
            address = f"file://{tempfile.mkdtemp()}/store"
            parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
        model = get_model_loader(config.load_config).load_model(config, config.model_config)
    return model, config


def _transport(model, config, nccl: bool):
    """`InProcessEngine` to a worker of vLLM that has a model and nothing to run it with."""
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    from trl_qarl.engines.in_process import InProcessEngine
    from trl_qarl.vllm_plugin.worker import WorkerExtension

    class RehearsedWorker(WorkerExtension, Worker):
        def __init__(self):
            self.vllm_config, self.device = config, torch.device("cpu")
            self.model_runner = SimpleNamespace(model=model, lora_config=None, reset_lora_state=lambda: None)
            self._weight_update_active = self._weight_update_is_draft = False
            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                config.weight_transfer_config, config, self.device, model
            )

        def __del__(self):
            """Ends nothing: this worker has none of what a whole one ends."""

    engine = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=RehearsedWorker()),
        abort_request=lambda *args, **kwargs: None,
        output_processor=SimpleNamespace(request_states=[]),
        reset_encoder_cache=lambda: None,
    )
    llm = SimpleNamespace(
        llm_engine=engine,
        reset_prefix_cache=lambda: True,
        reset_mm_cache=lambda: None,
        update_weight_version=lambda version: None,
    )
    transport = InProcessEngine(llm)
    if nccl:
        transport.send = MethodType(_broadcast, transport)
    return transport


class _Queue:
    """A communicator of trainer and worker in one process: what one broadcasts the other receives later."""

    def __init__(self):
        self.sent, self.is_receiving = [], False

    def broadcast(self, tensor, src, stream=None):
        if self.is_receiving:
            tensor.copy_(self.sent.pop(0))
        else:
            self.sent.append(tensor.clone())


def _broadcast(transport, tensors) -> None:
    """Send a chunk as TRL's client and receive it as vLLM's worker do, both of them over a [`_Queue`]."""
    import torch
    from trl.generation.vllm_client import packed_nccl_broadcast_producer
    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    packed_tensor._get_streams = lambda index, count: (stream,) * count
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    queue, worker = _Queue(), transport._worker
    packed_nccl_broadcast_producer(iterator=iter(tensors), group=queue, src=0, post_iter_func=lambda item: item[1])
    queue.is_receiving = True
    engine = worker.weight_transfer_engine
    engine.model_update_group, engine.packed = queue, True
    worker.update_weights(
        {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
    )
    assert not queue.sent


def _move_masters(module, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            size = 0.05 * parameter.std().clamp(min=1e-2)
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def _tensors(model) -> dict:
    """Tensors that are reachable from a layer, by name, at their present addresses."""
    from trl_qarl.vllm_plugin.addresses import reachable_tensors

    return {
        name: tensor.detach().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for name, tensor in reachable_tensors(model)
        if tensor.numel()
    }


def _numbers(model) -> set:
    """Numbers that a layer keeps, such as scales of attention."""
    return {
        (f"{prefix}.{name}", value)
        for prefix, layer in model.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, float)
    }


def _found_by_collector(model):
    """
    Tensors that the garbage collector reaches from a layer's attributes, through whatever is neither shared nor a
    module.
    """
    import torch

    skipped = (torch.nn.Module, type, type(torch), type(_tensors))
    for layer in model.modules():
        seen, todo = (
            set(),
            [value for name, value in vars(layer).items() if name not in ("_modules", "vllm_config", "kv_cache")],
        )
        while todo:
            value = todo.pop()
            if id(value) in seen or isinstance(value, skipped):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if value.numel():
                    yield value
            elif not type(value).__module__.startswith(("vllm.config", "transformers", "torch.")):
                todo += gc.get_referents(value)
