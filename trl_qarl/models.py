"""
Special facts about families of models: rules that hold for every family, then one row for each family that needs more.

A dense family that transformers and vLLM both know needs no row. Rules are about names of layers, because engines and
checkpoints go by names. Imports neither torch nor vLLM.
"""

from dataclasses import dataclass


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Last components of the names of layers that vLLM fuses into one matrix, which has one scheme."""

ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
"""Components of the names of routers. They are compared whole, as `gate*` would also match `gate_proj`."""

MIN_INPUTS = 32
"""Layers with fewer inputs, less than the smallest group, mix streams of a model (Gemma 3n's `correction_coefs`).
They stay in high precision."""

RECURRENT_STEPS = ("dt_proj", "x_proj")
"""Last components of the names of Mamba 1's layers that compute step sizes, of any number of outputs."""

MIN_RECURRENT_OUTPUTS = 128
"""Layers of a recurrence with fewer outputs compute a few numbers for each head, such as decays and step sizes. Their
errors add up over the tokens (https://github.com/microsoft/onnxruntime-genai/issues/2100)."""

IN_FLOAT32 = "e_score_correction_bias"
"""Last component of the names of routers' biases, which vLLM keeps in float32: they decide between scores that 16 bits
do not tell apart."""

_OTHER_NAMES = "transformers 5.17 and vLLM 0.31 have different names for the tensors of its vision tower"

_DIFFERENT = "its log-probs in plain vLLM 0.31 and plain transformers 5.17 differ by 0.4 nats in float32"
_REORDERED = (
    "vLLM's loader reorders the rows of its fused `query_key_value` by heads, also those of `weight_shape`, which has two "
    "numbers (models/{}.py)"
)


@dataclass(frozen=True)
class Family:
    """
    One family of models, by the class of its checkpoints.

    - `architecture`: name of transformers' class, as in `architectures` of a `config.json`.
    - `model_type`: the same in `model_type`.
    - `has_engine_numerics`: whether all its operations have engine numerics.
    - `problem_with_vllm`: the reason why vLLM cannot run it, with the upstream issue.
    - `problem_on_cpu`: the same for vLLM on CPUs.
    - `problem_of_float32`: the reason why an engine in float32 computes something in bfloat16.
    - `has_longer_window`: whether vLLM's layers with a sliding window see one more token than transformers' (Cohere 2:
      https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/commandr.py).
    - `has_compared_pictures`: whether prompts, tensors and log-probs of its pictures were.
    - `problem_of_pictures`: the reason why its pictures cannot be trained with vLLM, where it is known.
    - `gguf`: its architecture in GGUF. For others llama.cpp's conversion changes tensors in ways that are not
      implemented.
    """

    architecture: str
    model_type: str
    has_engine_numerics: bool = False
    problem_with_vllm: str | None = None
    problem_on_cpu: str | None = None
    problem_of_float32: str | None = None
    has_longer_window: bool = False
    has_compared_pictures: bool = False
    problem_of_pictures: str | None = None
    gguf: str | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the names of transformers' classes, such as `Qwen2Moe`."""
        return self.architecture.partition("For")[0]


_ROWS = (
    Family(
        "BloomForCausalLM",
        "bloom",
        problem_with_vllm=_REORDERED.format("bloom"),
    ),
    Family(
        "ApertusForCausalLM",
        "apertus",
        problem_of_float32="vLLM keeps the parameters of its activation in bfloat16 (`XIELU` in layers/activation.py)",
    ),
    Family("Cohere2ForCausalLM", "cohere2", has_longer_window=True),
    Family("Gemma3ForConditionalGeneration", "gemma3", problem_of_pictures=_OTHER_NAMES),
    Family(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        problem_on_cpu=_DIFFERENT,
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        problem_with_vllm=_REORDERED.format("gpt_neox"),
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        problem_with_vllm="vLLM 0.31 renames its experts within its loader (models/gpt_oss.py), and its reload leaves the sinks of its "
        "attention as they were",
    ),
    Family("Idefics3ForConditionalGeneration", "idefics3", has_compared_pictures=True),
    Family("Lfm2ForCausalLM", "lfm2", problem_on_cpu=_DIFFERENT),
    Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        problem_on_cpu="its convolutions have a width of 3, and vLLM's kernels support only a width of 4 (`causal_conv1d_weight_pack`)",
    ),
    Family("LlamaForCausalLM", "llama", has_engine_numerics=True, gguf="llama"),
    Family("LlavaNextForConditionalGeneration", "llava_next", problem_of_pictures=_OTHER_NAMES),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        problem_with_vllm="vLLM 0.31 calls its experts `mlp.experts` where checkpoints have `block_sparse_moe.experts` "
        "(models/minimax_m2.py), so a scheme that names experts does not reach them",
    ),
    Family("MistralForCausalLM", "mistral", has_engine_numerics=True, gguf="llama"),
    Family("MixtralForCausalLM", "mixtral", has_engine_numerics=True),
    Family(
        "PhimoeForCausalLM",
        "phimoe",
        problem_with_vllm="vLLM 0.31 makes its router a plain linear layer (`isinstance(child_module, nn.Linear)` in "
        "models/transformers/base.py), and has its own class only as PhiMoEForCausalLM (models/registry.py)",
    ),
    Family("Qwen2ForCausalLM", "qwen2", has_engine_numerics=True, gguf="qwen2"),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", has_engine_numerics=True),
    Family("Qwen2VLForConditionalGeneration", "qwen2_vl", has_compared_pictures=True),
    Family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", has_compared_pictures=True),
    Family("Qwen3ForCausalLM", "qwen3", has_engine_numerics=True, gguf="qwen3"),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", has_engine_numerics=True),
    Family("Qwen3VLForConditionalGeneration", "qwen3_vl", has_compared_pictures=True),
    Family("SmolVLMForConditionalGeneration", "smolvlm", has_compared_pictures=True),
    Family(
        "Zamba2ForCausalLM",
        "zamba2",
        problem_with_vllm="vLLM 0.31 names its shared blocks and their adapters unlike checkpoints, so a low-bit layer cannot be told from "
        "others (models/zamba2.py)",
    ),
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
