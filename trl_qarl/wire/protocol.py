"""Names, paths, headers and the error of a weight sync, shared by trainer, server and vLLM's processes. Imports
nothing."""

__all__ = [
    "CPU_WEIGHTS_VARIABLE",
    "FILE_BACKEND",
    "GATE",
    "NCCL_BACKEND",
    "SESSION_HEADER",
    "SESSION_PATH",
    "STATE_PATH",
    "TRANSFER_DIR_VARIABLE",
    "UPLOAD_HEADER",
    "UPLOAD_PATH",
    "WORKER_EXTENSION",
    "PublishError",
    "is_adapter_tensor",
    "load_order",
]

SESSION_PATH = "/qarl/session"
STATE_PATH = "/qarl/state"
UPLOAD_PATH = "/qarl/upload"
SESSION_HEADER = "x-qarl-session"
UPLOAD_HEADER = "x-qarl-upload"
TRANSFER_DIR_VARIABLE = "TRL_QARL_TRANSFER_DIR"
CPU_WEIGHTS_VARIABLE = "TRL_QARL_CPU_WEIGHTS"

FILE_BACKEND = "qarl"
NCCL_BACKEND = "qarl_nccl"


class PublishError(RuntimeError):
    """A publication did not land; the engine does not generate until a complete one does."""


GATE = "trl_qarl.vllm_plugin.gate.PublicationGate"
WORKER_EXTENSION = "trl_qarl.vllm_plugin.worker.WorkerExtension"


def is_adapter_tensor(name: str) -> bool:
    """Return whether a published tensor is A or B of a LoRA adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def load_order(name: str) -> int:
    """
    Return a key by which the tensors of a layer are sorted before vLLM loads them. It counts the shapes of gate and up
    projections of experts twice, and takes a layer for complete that early, so these come last.
    """
    return 2 * name.endswith(("gate_up_proj_shape", "w13_shape")) or int(
        name.endswith(("down_proj_shape", "w2_shape"))
    )
