"""Descriptions of models, tokenizers and quantization configurations, which learner and engine compare."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..quantization.schemes import SCHEMES, QuantScheme


# Compared settings of weights and activations.
_ARGS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")


def config_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differences between the `quantization_config` of learner and engine, empty for an unquantized model,
    that change numbers, as `"setting: ours, theirs"`."""
    lines = differences("", ours, theirs, ("quant_method", "format"))
    our_groups, their_groups = (list(config.get("config_groups", {}).values()) for config in (ours, theirs))
    if len(our_groups) != len(their_groups):
        lines.append(f"config_groups: learner {len(our_groups)}, engine {len(their_groups)}")
    for our_group, their_group in zip(our_groups, their_groups, strict=False):
        if sorted(our_group["targets"]) != sorted(their_group["targets"]):
            lines.append(f"targets: learner {our_group['targets']}, engine {their_group['targets']}")
        for part in ("weights", "input_activations"):
            lines += differences(f"{part}.", our_group.get(part) or {}, their_group.get(part) or {}, _ARGS)
    if set(ours.get("ignore", [])) != set(theirs.get("ignore", [])):
        lines.append(
            f"exclude list: learner {sorted(ours.get('ignore', []))}, engine {sorted(theirs.get('ignore', []))}"
        )
    return lines


def differences(
    prefix: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Iterable[str] | None = None
) -> list[str]:
    """Return the settings that differ, as `"setting: ours, theirs"` after a `prefix`. Only `names` are compared, by
    default those of both sides, because versions of transformers write different settings."""
    return [
        f"{prefix}{name}: learner {ours.get(name)!r}, engine {theirs.get(name)!r}"
        for name in (sorted(ours.keys() & theirs.keys()) if names is None else names)
        if _without_nothing(ours.get(name)) != _without_nothing(theirs.get(name))
    ]


def _without_nothing(value: Any) -> Any:
    """Drop nested settings that are `None`, which are equal to missing ones."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nothing(part) for name, part in value.items() if part is not None}


def group_name(index: int, scheme: QuantScheme) -> str:
    """Return the key of a group of a `quantization_config`, which readers ignore. It names a grid of fewer bits than
    the container's."""
    grid = scheme.grid
    is_coarse = grid is not None and grid.num_bits < scheme.container.num_bits
    return f"group_{index}-{grid.name}" if is_coarse else f"group_{index}"


def scheme_of_group(name: str, group: Mapping[str, Any]) -> QuantScheme | None:
    """Return the scheme of a group of a `quantization_config` with its [`group_name`]; `None` if it is not in
    [`SCHEMES`]."""

    def fits(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> bool:
        if not ours or not theirs:
            return bool(ours) == bool(theirs)
        return all(theirs.get(name) == value for name, value in ours.items())

    weights = group["weights"]
    for scheme in SCHEMES.values():
        size = weights.get("group_size") if scheme.group_size is not None else None
        if (
            scheme.is_quantized
            and group_name(0, scheme).partition("-")[2] == name.partition("-")[2]
            and fits(weights, scheme.weight_args(size))
            and fits(group.get("input_activations"), scheme.activation_args)
            and (scheme.group_size is None or size in scheme.group_sizes)
        ):
            return scheme
    return None


CANARY_TOKENS = 48
"""Tokens that learner and engine score after each publication."""

# Words, digits, spaces, punctuation and scripts that tokenizers split in different ways.
_SAMPLE_TEXT = (
    "The sum of 1234 and 5678.9 is 6912.9, so x**2 <= 10  holds.\n\tdef f(x): return {'a': [x, -x]}\n"
    "Größe, naïve, 東京は晴れ, Привет, مرحبا, 🙂"
)

# Settings without effect on a forward, or compared elsewhere.
_WITHOUT_EFFECT = """
architectures auto_map bos_token_id dtype eos_token_id id2label initializer_range label2id name_or_path
output_attentions output_hidden_states pad_token_id quantization_config return_dict tie_word_embeddings torch_dtype
transformers_version use_cache
"""
_NOT_NUMERIC = frozenset(_WITHOUT_EFFECT.split())

_KINDS_OF_LAYERS = {"attention": "full_attention", "conv": "linear_attention", "mamba": "linear_attention"}


def describe_model(config) -> dict[str, Any]:
    """Return the settings of a text model (`get_text_config()`), or of a vision tower, that affect its numbers, in a
    form for JSON."""
    # Engines drop and add some of a part, such as `mrope_section` of a model of text. Angles are compared too.
    settings = {
        path: value
        for name, part in config.to_dict().items()
        for path, value in _flat(name, part).items()
        if not any(each in _NOT_NUMERIC or each.startswith("_") or "dropout" in each for each in path.split("."))
    }
    # vLLM's own names of DeepSeek's kinds.
    if str(settings.get("rope_parameters.rope_type")).startswith("deepseek_"):
        del settings["rope_parameters.rope_type"]
    if settings.get("sliding_window") == 0:
        # 0 and `None` both stand for no window, and vLLM replaces one by the other.
        settings["sliding_window"] = None
    if kinds := settings.get("layer_types"):
        # transformers renames them in configurations that it does not know, such as vLLM's of LFM2's mixture.
        settings["layer_types"] = [_KINDS_OF_LAYERS.get(kind, kind) for kind in kinds]
    # Servers refuse to answer with infinity, which is a limit of step sizes in state-space models.
    return json.loads(json.dumps(settings, default=str), parse_constant=str)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for part, each in value.items() for key, leaf in _flat(f"{name}.{part}", each).items()}


Rotation = tuple[float, list[float]]
"""Factor of a rotary embedding, and the angles in radians by which each pair of features turns from one position to
the next, without those that do not turn."""


def rotations_in_tables(modules: Iterable[Any]) -> list[Rotation]:
    """Return the rotary embeddings of an engine, each once, from the tables of cosines and sines of its `modules`."""
    found = {}
    for module in modules:
        table = getattr(module, "cos_sin_cache", None)
        # Some have a method, or none of their own.
        if getattr(table, "ndim", None) == 2:
            cosines, sines = table[1].float().chunk(2)
            found[id(table)] = table[0, 0].item(), [angle for angle in sines.atan2(cosines).tolist() if angle]
    return list(found.values())


def rotation_differences(ours: Sequence[Rotation], theirs: Sequence[Rotation]) -> list[str]:
    """Return the rotary embeddings of an engine that the learner does not have, up to the rounding of tables in 16
    bits; none if one of the sides has no table."""

    def agree(one: Rotation, other: Rotation) -> bool:
        numbers = [*zip([one[0], *one[1]], [other[0], *other[1]], strict=False)]
        return len(one[1]) == len(other[1]) and all(math.isclose(*pair, rel_tol=2**-6) for pair in numbers)

    if not ours:
        return []
    return [
        f"rotary embedding: the learner has {_describe(ours)}, the engine {_describe([each])}"
        for each in theirs
        if not any(agree(each, known) for known in ours)
    ]


def _describe(rotations: Iterable[Rotation]) -> str:
    return " and ".join(
        f"{len(angles)} pairs with angles of {max(angles, default=0):.4g} to {min(angles, default=0):.4g} and factor {factor:.4g}"
        for factor, angles in rotations
    )


def window_differences(config: Any, theirs: Sequence[int], context: int) -> list[str]:
    """Return how the sliding windows of an engine's layers, 0 for those without one, differ from those of a text model
    with this configuration in sequences of this length; none if one of the sides does not tell its layers."""
    kinds = {*(getattr(config, "layer_types", None) or ())} & {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None) or 0
    ours = {window if kind == "sliding_attention" else 0 for kind in kinds}
    ours, engines = ({each if each < context else 0 for each in side} for side in (ours, theirs))
    if not (ours and engines) or ours == engines:
        return []
    return [f"sliding windows of layers (0 is none): the learner has {sorted(ours)}, the engine {sorted(engines)}"]


def describe_pictures(config, image_processor: Any, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the numbers of a picture, in a form for JSON; empty for a model of text.
    `engine` has options of vLLM's `MultiModalConfig`; the learner's are [`PICTURE_OPTIONS`]."""
    vision = getattr(config, "vision_config", None)
    if vision is None or image_processor is None:
        return {}
    settings = {name: value for name, value in image_processor.to_dict().items() if name not in _NOT_OF_PICTURES}
    settings = {name: value for name, value in settings.items() if not name.startswith("_")}
    tower = describe_model(vision)
    # vLLM's class of Qwen3.5's has another.
    tower.pop("model_type", None)
    described = {"tower": tower, "image processor": settings, **engine}
    return json.loads(json.dumps(described, default=str))


PICTURE_OPTIONS = {
    "mm_device_do_normalize": False,
    "mm_encoder_attn_dtype": None,
    "mm_encoder_tp_mode": "weights",
    "mm_processor_kwargs": None,
}
"""
Options of vLLM's `MultiModalConfig` with effect on pictures. With these values the processor normalizes pictures, as
in the learner, and each rank has a part of the tower's weights, which an audit can compare.
"""

# Origin of the settings, and form of the returned tensors.
_NOT_OF_PICTURES = frozenset(["auto_map", "device", "disable_grouping", "processor_class", "return_tensors"])


def describe_tokenizer(tokenizer) -> dict[str, Any]:
    """Return the size of the vocabulary, the end-of-sequence token, and a hash of the encoding of a fixed text."""
    ids = sample_token_ids(tokenizer)
    return {
        "vocabulary size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "encoding of a fixed text": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
    }


def sample_token_ids(tokenizer) -> list[int]:
    """Return the token ids of a fixed text, without special tokens."""
    return list(tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False))
