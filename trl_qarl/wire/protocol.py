"""Names, paths, replies and the error of a weight sync, for trainer, server and vLLM's processes. No imports."""

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


def values_of(replies: list, call: str = "") -> list:
    """
    Return the values in workers' replies ([`~trl_qarl.vllm_plugin.worker.replying`]) to the call with this number.
    [`PublishError`] is raised for refusals, and for replies to another call.
    """
    if not all(isinstance(reply, dict) and reply.get("call") == call for reply in replies):
        raise PublishError(
            "A worker of the server has replied to an earlier call: one of vLLM's own methods has failed on another rank, "
            "which leaves replies in a queue (vllm#57846). The server's log names the failure. Start the server again."
        )
    num_replicas = len({reply["replica"] for reply in replies})
    if refusals := [
        f"Replica {reply['replica']} of {num_replicas}: {reply['refused']}" if num_replicas > 1 else reply["refused"]
        for reply in replies
        if "refused" in reply
    ]:
        raise PublishError("\n".join(dict.fromkeys(refusals)))
    return [reply["value"] for reply in replies]


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
