"""
The part of this package that vLLM loads: entry point `vllm.general_plugins`, called in every vLLM process.

It registers the weight-transfer engines of [`trl_qarl.vllm_plugin.weight_transfer`] by name, which costs nothing until
a `--weight-transfer-config` names one, and kernels that are chosen only in an engine that uses them
([`trl_qarl.vllm_plugin.linear_kernels`], [`trl_qarl.vllm_plugin.experts`], [`trl_qarl.vllm_plugin.cpu_attention`]),
and has our servers hear all their replicas ([`trl_qarl.vllm_plugin.replicas`]).
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

    # Before vLLM starts its engine's process, which would inherit the secret.
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

        # Linux lets a process use AMX once it has asked. vLLM's INT4 kernel uses it without asking, and the process
        # ends with "illegal instruction".
        torch.cpu._init_amx()
        register_kernels(PlatformEnum.CPU)
        register_experts()
        register_attention()
        _wait_without_spinning()
    elif current_platform.is_cuda():
        from .linear_kernels import register_kernels

        register_kernels(PlatformEnum.CUDA)


def _wait_without_spinning() -> None:
    """
    Have processes of vLLM sleep when no message has come for two milliseconds. vLLM's own poll shared memory for a
    second after each (`SpinCondition`), on a core that the learner computes on.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (0.002,)


def _end_with_parent() -> None:
    """
    Have an engine's process end when the server that has started it is gone. vLLM's own keeps running if the server
    was killed, and keeps memory and device.
    """
    global _watcher
    parent = multiprocessing.parent_process()
    is_ours = TOKEN_FILE_VARIABLE in os.environ or TRANSFER_DIR_VARIABLE in os.environ
    if parent is None or not is_ours or _watcher is not None:
        return

    def watch():
        parent.join()
        # SIGTERM first, so that it removes its shared memory.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LEAVE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    _watcher = threading.Thread(target=watch, name="trl-qarl-parent", daemon=True)
    _watcher.start()
