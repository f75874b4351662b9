"""Descriptions of models, tokenizers and quantization configurations, which learner and engine compare."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..quantization.schemes import SCHEMES, QuantScheme


__all__ = [
    "CANARY_TOKENS",
    "PICTURE_OPTIONS",
    "config_differences",
    "describe_model",
    "describe_pictures",
    "describe_tokenizer",
    "differences",
    "group_name",
    "model_differences",
    "sample_token_ids",
    "scheme_of_group",
]

# Of weights and activations.
_ARGS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")


def config_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return what differs between the `quantization_config` of learner and engine, empty for an unquantized model, in
    a way that changes numbers, as `"setting: ours, theirs"`."""
    lines = differences(("quant_method", "format"), ours, theirs)
    our_groups, their_groups = (list(config.get("config_groups", {}).values()) for config in (ours, theirs))
    if len(our_groups) != len(their_groups):
        lines.append(f"config_groups: learner {len(our_groups)}, engine {len(their_groups)}")
    for our_group, their_group in zip(our_groups, their_groups, strict=False):
        if sorted(our_group["targets"]) != sorted(their_group["targets"]):
            lines.append(f"targets: learner {our_group['targets']}, engine {their_group['targets']}")
        for part in ("weights", "input_activations"):
            lines += differences(_ARGS, our_group.get(part) or {}, their_group.get(part) or {}, f"{part}.")
    if set(ours.get("ignore", [])) != set(theirs.get("ignore", [])):
        lines.append(
            f"exclude list: learner {sorted(ours.get('ignore', []))}, engine {sorted(theirs.get('ignore', []))}"
        )
    return lines


def differences(
    names: Iterable[str], ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return those of the named settings that differ, as `"setting: ours, theirs"`."""
    return [
        f"{prefix}{name}: learner {ours.get(name)!r}, engine {theirs.get(name)!r}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def group_name(index: int, scheme: QuantScheme) -> str:
    """Key of a group of a `quantization_config`, which readers ignore: it names a grid other than its container's
    own."""
    grid = scheme.grid
    if grid is None or (grid.num_bits == scheme.container.num_bits and not grid.has_signed_scales):
        return f"group_{index}"
    return f"group_{index}-{grid.name}"


def scheme_of_group(name: str, group: Mapping[str, Any]) -> QuantScheme | None:
    """
    Return the scheme that wrote a group of a `quantization_config` under its [`group_name`], whose bits are those of
    the container or, after `trl-qarl export --compact`, of the grid; `None` if it is none of [`SCHEMES`].
    """

    def fits(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> bool:
        if not ours or not theirs:
            return bool(ours) == bool(theirs)
        return all(theirs.get(name) == value for name, value in ours.items())

    weights = group["weights"]
    for scheme in SCHEMES.values():
        size = weights.get("group_size") if scheme.group_size is not None else None
        num_bits = (scheme.container.num_bits, scheme.grid.num_bits) if scheme.is_quantized else ()
        if (
            weights.get("num_bits") in num_bits
            and group_name(0, scheme).partition("-")[2] == name.partition("-")[2]
            and fits(weights, scheme.weight_args(size) | {"num_bits": weights["num_bits"]})
            and fits(group.get("input_activations"), scheme.activation_args)
            and (scheme.group_size is None or size in scheme.group_sizes)
        ):
            return scheme
    return None


CANARY_TOKENS = 48
"""Tokens that learner and engine score after each publication."""

# Words, digits, spaces, punctuation and scripts that tokenizers take apart in different ways.
_SAMPLE_TEXT = (
    "The sum of 1234 and 5678.9 is 6912.9, so x**2 <= 10  holds.\n\tdef f(x): return {'a': [x, -x]}\n"
    "Größe, naïve, 東京は晴れ, Привет, مرحبا, 🙂"
)

# Neither changes what a forward computes: names, where the model came from, training, generation, and what is compared
# elsewhere.
_NOT_NUMERIC = frozenset(
    [
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "quantization_config",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)


def describe_model(config) -> dict[str, Any]:
    """Return what of the configuration of a text model (`get_text_config()`), or of a vision tower, decides its
    numbers, as JSON has it."""
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _NOT_NUMERIC and not name.startswith("_") and "dropout" not in name
    }
    if settings.get("sliding_window") == 0:
        # vLLM changes one into the other.
        settings["sliding_window"] = None
    return json.loads(json.dumps(settings, default=str))


def describe_pictures(config, image_processor: Any, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the numbers that a model computes from a picture, as JSON has it; empty for a model of text.
    `engine` has options of vLLM's `MultiModalConfig`, of which the learner's are [`PICTURE_OPTIONS`]."""
    vision = getattr(config, "vision_config", None)
    if vision is None or image_processor is None:
        return {}
    settings = {name: value for name, value in image_processor.to_dict().items() if name not in _NOT_OF_PICTURES}
    settings = {name: value for name, value in settings.items() if not name.startswith("_")}
    described = {"tower": describe_model(vision), "image processor": settings, **engine}
    return json.loads(json.dumps(described, default=str))


PICTURE_OPTIONS = {
    "mm_device_do_normalize": False,
    "mm_encoder_attn_dtype": None,
    "mm_encoder_tp_mode": "weights",
    "mm_processor_kwargs": None,
}
"""
Options of vLLM's `MultiModalConfig` that change what a picture becomes: pictures are normalized by the processor, as
the learner's are, with no other settings, and each rank has a part of the tower's weights, which an audit can compare.
"""

# Where the settings came from, and how tensors are returned.
_NOT_OF_PICTURES = frozenset(["auto_map", "device", "disable_grouping", "processor_class", "return_tensors"])


def describe_tokenizer(tokenizer) -> dict[str, Any]:
    """Size of the vocabulary, end-of-sequence token, and a hash of the encoding of a fixed text."""
    ids = sample_token_ids(tokenizer)
    return {
        "vocabulary size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "encoding of a fixed text": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
    }


def sample_token_ids(tokenizer) -> list[int]:
    """Token ids of a fixed text, without special tokens."""
    return list(tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False))


def model_differences(kind: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return what differs between two descriptions of a model or a tokenizer, as `"kind.setting: ours, theirs"`, but
    for settings that one side does not have: versions of transformers differ in which ones they write."""
    return [
        f"{kind}.{name}: learner {ours[name]!r}, engine {theirs[name]!r}"
        for name in sorted(ours.keys() & theirs.keys())
        if _without_nothing(ours[name]) != _without_nothing(theirs[name])
    ]


def _without_nothing(value: Any) -> Any:
    """Nested settings without those that are `None`, which is the same as not being there."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nothing(part) for name, part in value.items() if part is not None}
