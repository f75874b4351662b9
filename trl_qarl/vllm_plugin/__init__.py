"""
Plugin for vLLM, called in every vLLM process through the entry point `vllm.general_plugins`.

It registers the weight-transfer engines of [`trl_qarl.vllm_plugin.weight_transfer`] by name, which has no effect until
a `--weight-transfer-config` names one, and kernels that are chosen only in an engine that uses them
([`trl_qarl.vllm_plugin.linear_kernels`], [`trl_qarl.vllm_plugin.expert_kernels`],
[`trl_qarl.vllm_plugin.cpu_attention`]). Some models are put right in every engine
([`trl_qarl.vllm_plugin.corrected`]). In servers of this package, calls of workers return the answers of all
replicas (`--data-parallel-size`): vLLM returns only the first one's, so an error from any other replica would be lost.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from itertools import chain
from typing import Any

from ..wire.handshake import TOKEN_FILE_VARIABLE, take_token
from ..wire.protocol import FILE_BACKEND, NCCL_BACKEND, TRANSFER_DIR_VARIABLE
from .corrected import MODELS


__all__ = ["call_every_replica", "register"]

_LEAVE_SECONDS = 30.0

_watcher: threading.Thread | None = None


def register() -> None:
    """Register with vLLM; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    from .shared_classes import register_classes

    # Before vLLM starts the process of its engine, which would inherit the secret.
    if take_token() or TOKEN_FILE_VARIABLE in os.environ:
        from vllm.v1.engine.core_client import DPLBAsyncMPClient

        # Overriding a method that vLLM has renamed would have no effect.
        assert "call_utility_async" in vars(DPLBAsyncMPClient)
        DPLBAsyncMPClient.call_utility_async = call_every_replica
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        if DPCoordinatorProc.run_coordinator is not run_coordinator:
            run_coordinator.original = DPCoordinatorProc.run_coordinator
            DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
    _end_with_parent()
    register_classes()
    for architecture, name in MODELS.items():
        known = ModelRegistry.models.get(architecture)
        # A class that has left vLLM, which runs the model by its Transformers backend.
        if known is not None and known.module_name == "vllm.model_executor.models.transformers":
            continue
        ModelRegistry.register_model(architecture, f"trl_qarl.vllm_plugin.corrected.{name}")
    for backend, name in ((FILE_BACKEND, "FileReceiver"), (NCCL_BACKEND, "NCCLReceiver")):
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "trl_qarl.vllm_plugin.weight_transfer", name)
    if current_platform.is_cpu():
        import torch
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        from .cpu_attention import register_attention
        from .cpu_layers import register_convolutions, register_norms, register_rotations
        from .cpu_scans import register_scans
        from .expert_kernels import register_experts
        from .linear_kernels import register_kernels

        # Linux requires a process to ask for AMX. vLLM's INT4 kernel does not ask, which would end the process with
        # "illegal instruction".
        torch.cpu._init_amx()
        register_kernels(PlatformEnum.CPU)
        register_experts()
        register_attention()
        register_convolutions()
        register_norms()
        register_rotations()
        register_scans()
        # Sleep after two milliseconds without a message. By default processes poll shared memory for a second after
        # each message, on a core that the learner needs.
        SpinCondition.__init__.__defaults__ = (0.002,)
    elif current_platform.is_cuda():
        from .linear_kernels import register_kernels

        register_kernels(PlatformEnum.CUDA)


async def call_every_replica(client: Any, method: str, *args: Any) -> Any:
    """Call a method of all engines of a server's `client` concurrently. Return the answers of all workers, replica by
    replica, for calls of workers; `True` if all answers are, for answers of type `bool`; else the common answer.
    `RuntimeError` names a replica that fails, or answers that differ; `EngineDeadError` means a dead engine."""
    from vllm.v1.engine.exceptions import EngineDeadError

    engines = client.core_engines

    async def call(number: int) -> Any:
        try:
            return await client._call_utility_async(method, *args, engine=engines[number])
        except EngineDeadError:
            raise
        except Exception as error:
            raise RuntimeError(f"Replica {number} of {len(engines)}: {error}") from error

    answers = await asyncio.gather(*map(call, range(len(engines))))
    if method == "collective_rpc":
        return list(chain.from_iterable(answers))
    if all(isinstance(answer, bool) for answer in answers):
        return all(answers)
    if any(answer != answers[0] for answer in answers):
        raise RuntimeError(f"The {len(answers)} replicas answer {method!r} differently: {answers}.")
    return answers[0]


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's process between the replicas of a server, and end it with the server. It loads no plugins."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    _end_with_parent()
    # A spawned process knows vLLM's function only.
    getattr(run_coordinator, "original", DPCoordinatorProc.run_coordinator)(*args, **kwargs)


def _end_with_parent() -> None:
    """End the engine's process with the server that started it. By default it keeps running, with its memory and
    device, after the server is killed."""
    global _watcher
    parent = multiprocessing.parent_process()
    is_ours = TOKEN_FILE_VARIABLE in os.environ or TRANSFER_DIR_VARIABLE in os.environ
    if parent is None or not is_ours or _watcher is not None:
        return

    def watch():
        parent.join()
        # SIGTERM first, so that the process removes its shared memory.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LEAVE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    _watcher = threading.Thread(target=watch, name="trl-qarl-parent", daemon=True)
    _watcher.start()
