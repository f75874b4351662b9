"""A worker extension by which one replica or rank goes wrong, as the file in `TEST_FAULT_FILE` says."""

import os
import signal
from pathlib import Path

import torch

from trl_qarl.vllm_plugin.worker import WorkerExtension


FAULT_FILE = "TEST_FAULT_FILE"
TENSOR = "model.norm.weight"


class FaultyReplica(WorkerExtension):
    def _meets(self, fault: str) -> bool:
        file, number = (
            Path(os.environ[FAULT_FILE]),
            max(self.vllm_config.parallel_config.data_parallel_index, self.rank),
        )
        return file.exists() and file.read_text() in (f"{fault} {number}", f"{fault} everywhere")

    def _spoil(self) -> None:
        with torch.no_grad():
            self.model_runner.model.get_parameter(TENSOR).data.mul_(2)

    def qarl_begin(self, **call):
        if self._meets("spoiled before"):
            self._spoil()
        return super().qarl_begin(**call)

    def qarl_clear_cache(self, **call):
        if self._meets("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().qarl_clear_cache(**call)

    def qarl_finish(self, fingerprints, **call):
        if self._meets("spoiled during"):
            fingerprints = fingerprints | {TENSOR: "something else"}
        return super().qarl_finish(fingerprints, **call)
