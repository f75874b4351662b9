"""Names, paths, headers and the error of a weight sync, for trainer, server and vLLM's processes. No imports."""

SESSION_PATH = "/qarl/session"
STATE_PATH = "/qarl/state"
SESSION_HEADER = "x-qarl-session"
TRANSFER_DIR_VARIABLE = "TRL_QARL_TRANSFER_DIR"
CPU_WEIGHTS_VARIABLE = "TRL_QARL_CPU_WEIGHTS"

FILE_BACKEND = "qarl"
NCCL_BACKEND = "qarl_nccl"
NORMS = "trl_qarl"
"""Name of the norms of an engine on a CPU among vLLM's implementations."""


class PublishError(RuntimeError):
    """A publication failed; the engine does not generate until a complete one succeeds."""


GATE = "trl_qarl.vllm_plugin.gate.PublicationGate"
WORKER_EXTENSION = "trl_qarl.vllm_plugin.worker.WorkerExtension"


def is_adapter_tensor(name: str) -> bool:
    """Return whether a published tensor is A or B of a LoRA adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def load_order(name: str) -> int:
    """Return a sort key for the tensors of a layer. vLLM counts the shapes of the experts' gate and up projections
    twice and would consider the layer complete too early, so they are loaded last."""
    return 2 * name.endswith(("gate_up_proj_shape", "w13_shape")) or int(
        name.endswith(("down_proj_shape", "w2_shape"))
    )
