"""
Special facts about families of models: rules that hold for every family, then one row for each family that needs more.

A dense family that transformers and vLLM both know needs no row. Rules are about names of layers, because engines and
checkpoints go by names. Imports neither torch nor vLLM.
"""

from dataclasses import dataclass


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Last components of the names of layers that vLLM fuses into one matrix, which has one scheme."""

ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""Components of the names of routers. They are compared whole, as `gate*` would also match `gate_proj`."""

RECURRENT_STEPS = ("dt_proj", "x_proj")
"""Last components of the names of layers that compute step sizes of a recurrence, of any number of outputs."""

MIN_RECURRENT_OUTPUTS = 128
"""Layers of a recurrence with fewer outputs compute a few numbers for each head, such as decays and step sizes. Their
errors add up over the tokens (https://github.com/microsoft/onnxruntime-genai/issues/2100)."""

STACKED = {"gate_proj": "gate_up_proj", "w1": "w13"}
"""Names with which vLLM takes the matrices of all experts at once, by the name of the first matrix of an expert."""

_OTHER_NAMES = "transformers 5.17 and vLLM 0.31 have different names for the tensors of its vision tower"


@dataclass(frozen=True)
class Family:
    """
    One family of models, by the class of its checkpoints.

    - `architecture`: name of transformers' class, as in `architectures` of a `config.json`.
    - `model_type`: the same in `model_type`.
    - `has_engine_numerics`: whether all its operations have engine numerics.
    - `has_compared_experts`: whether names, layouts and log-probs of its experts in vLLM were compared with the
      learner's.
    - `has_compared_pictures`: whether prompts, tensors and log-probs of its pictures were.
    - `problem_of_pictures`: the reason why its pictures cannot be trained with vLLM, where it is known.
    - `gguf`: its architecture in GGUF. For others llama.cpp's conversion changes tensors in ways that are not
      implemented.
    """

    architecture: str
    model_type: str
    has_engine_numerics: bool = False
    has_compared_experts: bool = False
    has_compared_pictures: bool = False
    problem_of_pictures: str | None = None
    gguf: str | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the names of transformers' classes, such as `Qwen2Moe`."""
        return self.architecture.partition("For")[0]


_ROWS = (
    Family("Gemma3ForConditionalGeneration", "gemma3", problem_of_pictures=_OTHER_NAMES),
    Family("Idefics3ForConditionalGeneration", "idefics3", has_compared_pictures=True),
    Family("LlamaForCausalLM", "llama", has_engine_numerics=True, gguf="llama"),
    Family("LlavaNextForConditionalGeneration", "llava_next", problem_of_pictures=_OTHER_NAMES),
    Family("MistralForCausalLM", "mistral", has_engine_numerics=True, gguf="llama"),
    Family("MixtralForCausalLM", "mixtral", has_engine_numerics=True, has_compared_experts=True),
    Family("Qwen2ForCausalLM", "qwen2", has_engine_numerics=True, gguf="qwen2"),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", has_engine_numerics=True, has_compared_experts=True),
    Family("Qwen2VLForConditionalGeneration", "qwen2_vl", has_compared_pictures=True),
    Family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", has_compared_pictures=True),
    Family("Qwen3ForCausalLM", "qwen3", has_engine_numerics=True, gguf="qwen3"),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", has_engine_numerics=True, has_compared_experts=True),
    Family("Qwen3VLForConditionalGeneration", "qwen3_vl", has_compared_pictures=True),
    Family("SmolVLMForConditionalGeneration", "smolvlm", has_compared_pictures=True),
)


def is_router(name: str) -> bool:
    """Return whether a module with this name chooses experts, or is a part of one that does (`mlp.gate.wg`)."""
    return any(part in ROUTER_NAMES or part.endswith("_router") for part in name.split("."))


FAMILIES = {row.architecture: row for row in _ROWS}
"""The rows, by architecture."""


def family_of(architecture: str) -> Family:
    """Return the row of an architecture, one without special facts if it has none."""
    return FAMILIES.get(architecture) or Family(architecture, "")


def with_fact(name: str) -> tuple[str, ...]:
    """Return the architectures whose rows have a fact, such as `"has_engine_numerics"`."""
    return tuple(architecture for architecture, row in FAMILIES.items() if getattr(row, name))


def gguf_architectures() -> dict[str, str]:
    """Return the architectures in GGUF, by model type."""
    return {row.model_type: row.gguf for row in _ROWS if row.gguf is not None}
