"""
Plugin for vLLM, called in every vLLM process through the entry point `vllm.general_plugins`.

It registers the weight-transfer engines of [`trl_qarl.vllm_plugin.weight_transfer`] by name, which has no effect until
a `--weight-transfer-config` names one, and kernels that are chosen only in an engine that uses them
([`trl_qarl.vllm_plugin.linear_kernels`], [`trl_qarl.vllm_plugin.experts`], [`trl_qarl.vllm_plugin.cpu_attention`]). In
servers of this package it returns the answers of all replicas ([`trl_qarl.vllm_plugin.replicas`]).
"""

import multiprocessing
import os
import signal
import threading
import time

from ..wire.handshake import TOKEN_FILE_VARIABLE, take_token
from ..wire.protocol import FILE_BACKEND, NCCL_BACKEND, TRANSFER_DIR_VARIABLE


__all__ = ["register"]

_LEAVE_SECONDS = 30.0

_watcher: threading.Thread | None = None


def register() -> None:
    """Register with vLLM; calling it again changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    from .replicas import hear_every_replica

    # Before vLLM starts the process of its engine, which would inherit the secret.
    if take_token() or TOKEN_FILE_VARIABLE in os.environ:
        hear_every_replica()
    _end_with_parent()
    for backend, name in ((FILE_BACKEND, "FileChannel"), (NCCL_BACKEND, "NCCLChannel")):
        if backend not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(backend, "trl_qarl.vllm_plugin.weight_transfer", name)
    if current_platform.is_cpu():
        import torch

        from .cpu_attention import register_attention
        from .experts import register_experts
        from .linear_kernels import register_kernels

        # Linux requires a process to ask for AMX. vLLM's INT4 kernel does not ask, which would end the process with
        # "illegal instruction".
        torch.cpu._init_amx()
        register_kernels(PlatformEnum.CPU)
        register_experts()
        register_attention()
        _wait_without_spinning()
    elif current_platform.is_cuda():
        from .linear_kernels import register_kernels

        register_kernels(PlatformEnum.CUDA)


def _wait_without_spinning() -> None:
    """Have processes of vLLM sleep after two milliseconds without a message. By default they poll shared memory for a
    second after each message (`SpinCondition`), on a core that the learner needs."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0.002,)


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
