"""Names, paths, replies and the error of a weight sync, for trainer, server and vLLM's processes. Imports nothing."""

from collections.abc import Iterator, Sequence
from typing import Any


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


SHARED_BY_SHARDS = "weight_shape"
"""End of the names of tensors of which a fused layer of vLLM keeps that of the last shard; experts have
`w13_weight_shape`."""
EACH = ".*."
"""Stands for the number of an expert in the name of a tensor `(E, ...)` that stacks a tensor of all `E` experts."""


def is_parameter(matrix: str) -> bool:
    """Return whether the name of a matrix is the beginning of parameters' names in vLLM, whose loader of gpt-oss reads
    `experts.0.w13_weight_packed`, and no shapes."""
    return matrix.endswith("_")


def tensor_name(matrix: str, key: str) -> str:
    """Return the name in a checkpoint of a tensor of a matrix, such as `weight_packed`."""
    return f"{matrix}{'' if is_parameter(matrix) else '.'}{key}"


def stacked_name(matrices: Sequence[str], key: str) -> str:
    """Return the name of the tensor that stacks `key` of the matrices of all experts, from the names of these:
    `mlp.experts.*.gate_proj|up_proj.weight_scale` has `mlp.experts.0.gate_proj.weight_scale` in its first rows."""
    prefix = matrices[0].rsplit(".", 2)[0]
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in matrices)
    return tensor_name(f"{prefix}{EACH}{'|'.join(leaves)}", key)


def names_of_experts(name: str, num_experts: int) -> list[list[str]]:
    """Return the names in a checkpoint of the tensors that a [`stacked_name`] stands for, by expert and row."""
    prefix, _, rest = name.partition(EACH)
    leaves, dot, key = rest.rpartition(".")
    return [[f"{prefix}.{expert}.{leaf}{dot}{key}" for leaf in leaves.split("|")] for expert in range(num_experts)]


def tensors_of_experts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint, with their names, that a `tensor` with a [`stacked_name`] stands for."""
    for names, rows in zip(names_of_experts(name, len(tensor)), tensor, strict=True):
        # A shape has a row for each matrix.
        parts = rows if name.endswith(SHARED_BY_SHARDS) else rows.chunk(len(names))
        yield from zip(names, parts, strict=True)


def load_order(name: str) -> int:
    """Return a sort key for the tensors of a layer. vLLM counts the shapes of the experts' gate and up projections
    twice and would consider the layer complete too early, so they are loaded last."""
    return 1 + ("|" in name) if EACH in name and name.endswith("weight_shape") else 0


ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


def engine_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` with which vLLM serves an adapter of this rank; a smaller adapter is padded
    with 0. `ValueError` is raised if there is none."""
    if rank > ENGINE_RANKS[-1]:
        raise ValueError(
            f"An adapter of rank {rank} cannot be served: the largest rank in vLLM is {ENGINE_RANKS[-1]}. Use a smaller `r`."
        )
    return min(largest for largest in ENGINE_RANKS if rank <= largest)
