"""What a setting is called and which colour it has: the same on the page of `trl-qarl report`, in its figures and in the docs."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..objectives.registry import OBJECTIVES


__all__ = ["COLORS", "choose_colors", "name_parts", "setting_color"]

COLORS = {
    "blue": ("#0072b2", "#4aa8e0"),
    "sky": ("#56b4e9", "#9ad7f7"),
    "orange": ("#e69f00", "#f0b840"),
    "vermillion": ("#d55e00", "#f08a45"),
    "ink": ("#1a1a1a", "#e8e8e8"),
    "grey": ("#767676", "#a0a0a0"),
    "green": ("#009e73", "#2fc79b"),
    "pink": ("#cc79a7", "#e39cc3"),
    "purple": ("#6a51a3", "#a893d9"),
    "brown": ("#8c6d31", "#c4a25d"),
    "teal": ("#1b7f8c", "#52b9c6"),
}
"""On a light and on a dark page. The first eight are Okabe and Ito's but for their yellow, and grey."""

_FIXED = {
    ("QaRL", "tbpo"): "blue",
    ("rollout-only", "tbpo"): "orange",
    ("bf16", "tbpo"): "grey",
    **{("QaRL", objective): "sky" for objective in ("grpo", "grpo-tis")},
    **{("rollout-only", objective): "vermillion" for objective in ("grpo", "grpo-tis")},
    **{("bf16", objective): "ink" for objective in ("grpo", "grpo-tis")},
}
_SPARE = ("green", "pink", "purple", "brown", "teal")
_WORDS = ("positive", "only", "on", "policy", "dual", "clip")


def name_parts(config: Mapping[str, Any]) -> list[str]:
    """
    Return what a setting is called, from those of `quantize_learner`, `objective`, `scheme` and `lora_mode` that it
    has.

    The scheme of a quantized run is named only where the others say nothing: a report adds it where schemes differ.

    Example:

    ```python
    >>> name_parts({"quantize_learner": False, "objective": "grpo-tis", "scheme": "w4a16"})
    ['rollout-only', 'GRPO-TIS']
    >>> name_parts({"quantize_learner": True, "objective": "tbpo", "scheme": "bf16"})
    ['bf16', 'TBPO']
    ```
    """
    kind, objective = _kind(config), config.get("objective")
    parts = [kind] if kind else []
    if objective is not None:
        words = str(objective).split("-")
        parts.append("-".join(word if word in _WORDS else word.upper() for word in words))
    if "lora_mode" in config:
        parts.append("LoRA" if config["lora_mode"] == "adapter" else f"{config['lora_mode']} LoRA")
    return parts or ([str(config["scheme"])] if "scheme" in config else [])


def setting_color(config: Mapping[str, Any]) -> str:
    """Return the key of [`COLORS`] for a setting, always the same one."""
    kind, objective = _kind(config), str(config.get("objective"))
    if (kind, objective) in _FIXED:
        return _FIXED[kind, objective]
    if kind is None and objective == "None":
        return "blue"
    kinds = (None, "QaRL", "rollout-only", "bf16")
    position = OBJECTIVES.index(objective) if objective in OBJECTIVES else len(OBJECTIVES)
    return _SPARE[(position + 2 * kinds.index(kind)) % len(_SPARE)]


def choose_colors(configs: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """
    Choose colour and line style of each setting of a report: the first with a colour keeps it, others of the same name
    take the colours that are free, and further line styles when none is left.
    """
    configs = list(configs)
    wanted = [setting_color(config) for config in configs]
    free = [color for color in (*_SPARE, *COLORS) if color not in wanted]
    free = list(dict.fromkeys(free))
    chosen: list[tuple[str, str]] = []
    for color in wanted:
        if (color, "-") in chosen and free:
            color = free.pop(0)
        uses = sum(used == color for used, _ in chosen)
        chosen.append((color, ("-", "--", "-.", ":")[uses % 4]))
    return chosen


def _kind(config: Mapping[str, Any]) -> str | None:
    if config.get("scheme") == "bf16":
        return "bf16"
    if "quantize_learner" in config:
        return "QaRL" if config["quantize_learner"] else "rollout-only"
    return None
