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
        file = Path(os.environ[FAULT_FILE])
        return (
            1 in (self.vllm_config.parallel_config.data_parallel_index, self.rank)
            and file.exists()
            and file.read_text() == fault
        )

    def _spoil(self) -> None:
        with torch.no_grad():
            self.model_runner.model.get_parameter(TENSOR).data.mul_(2)

    def qarl_begin(self):
        if self._meets("spoiled before"):
            self._spoil()
        return super().qarl_begin()

    def qarl_clear_cache(self):
        if self._meets("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().qarl_clear_cache()

    def qarl_finish(self, fingerprints):
        if self._meets("spoiled during"):
            fingerprints = fingerprints | {TENSOR: "something else"}
        super().qarl_finish(fingerprints)
