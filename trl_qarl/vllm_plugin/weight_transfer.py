"""
vLLM's side of publication: transfer engines that receive a learner's tensors and reload the model with them.

The file transport takes the name of a safetensors file in the directory with which the server was started. Requests
are untrusted: names with separators, links and other formats are refused, and nothing is unpickled.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.utils.torch_utils import set_default_torch_dtype

from ..wire.protocol import TRANSFER_DIR_VARIABLE, load_order
from ..wire.transfer_dir import confined_path
from .adapters import on_bare_model
from .audited_reload import AuditedReload
from .cpu_sampling import register_sampling


__all__ = ["FileChannel", "NCCLChannel"]


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """
    Args:
        file (`str`):
            Name of a safetensors file in the transfer directory.
    """

    file: str


class FileChannel(AuditedReload, WeightTransferEngine[WeightTransferInitInfo, FileUpdateInfo]):
    """Reads weights from safetensors files in one directory, in shared memory or a shared filesystem."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Read once; the environment of a running process can change.
        self._directory = os.environ.get(TRANSFER_DIR_VARIABLE)
        if self.device.type == "cpu":
            register_sampling()

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: the directory is the server's."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one file. The base class would synchronize an accelerator, also on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        path = confined_path(self._directory, update_info.file)
        with safe_open(path, framework="pt", device=str(self.device)) as file:
            # Tensors are sorted by dtype in the file.
            self.load((name, file.get_tensor(name)) for name in sorted(file.offset_keys(), key=load_order))

    def shutdown(self) -> None:
        """Do nothing."""


class NCCLChannel(AuditedReload, NCCLWeightTransferEngine):
    """vLLM's NCCL transfer with the same checks."""

    @on_bare_model
    def receive_weights(self, update_info) -> None:
        with set_default_torch_dtype(self.model_config.dtype), self._watched_loading():
            super().receive_weights(update_info)
