"""The grid file: its cells, their names, the command of each, and what an evaluation answers."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..objectives.registry import OBJECTIVES
from ..options import CHOICES
from ..quantization.schemes import SCHEMES


AXES = ("quantize_learner", "objective", "scheme", "lora_mode", "seed")
KEYS = ("command", "train", "grid", "cells", "evaluate")

_CHOICES = {"objective": OBJECTIVES, "scheme": SCHEMES, "lora_mode": CHOICES["lora_mode"]}


def load_grid(path: str | Path) -> dict[str, Any]:
    """Read and check a grid, without its cells. `ValueError` is raised if the file is not YAML, has unknown or missing
    keys, or names a program that is not installed."""
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    shape = f"{path} must be a mapping with `train` or `command` and `grid` or `cells`, not {config!r}."
    _require(isinstance(config, dict), shape)
    _check_names("key", config, KEYS)
    for first, second in (("train", "command"), ("grid", "cells")):
        found = f"`{first}` and `{second}`" if first in config else f"neither `{first}` nor `{second}`"
        _require((first in config) != (second in config), f"{path} has {found}; give exactly one of them.")
    train = config.get("train", {})
    _require(isinstance(train, dict), f"`train` must map options of `trl-qarl train` to values, not {train!r}.")
    for name in ("output_dir", "resume_from_checkpoint"):
        _require(name not in train, f"`train` sets `{name}`, which compare sets for every cell; remove it.")
    for key in [key for key in ("command", "evaluate") if key in config]:
        words = config[key]
        shape = f"`{key}` must be a list of words such as ['{{python}}', 'train.py'], not {words!r}."
        _require(isinstance(words, list) and words, shape)
        # A placeholder names nothing that can be looked up.
        is_there = "{" in str(words[0]) or shutil.which(str(words[0]))
        _require(is_there, f"`{key}` starts with {words[0]!r}, which is not an executable; install it or fix it.")
    return config


def expand_grid(config: dict[str, Any]) -> list[dict[str, str | int]]:
    """
    Return the cells of a grid: the product of the axes under `grid`, the last of which varies fastest, or the list
    under `cells`. In a product the scheme `bf16` has one cell for all values of `quantize_learner`. `ValueError` is
    raised for unknown axes and values, equal cells, and cells that the command cannot be built for.
    """
    cells, train = config.get("cells"), config.get("train", {})
    if "grid" in config:
        grid = config["grid"]
        is_mapping = isinstance(grid, dict) and grid and all(isinstance(of, list) and of for of in grid.values())
        _require(is_mapping, f"`grid` must map {', '.join(AXES)} to lists with at least one value, not {grid!r}.")
        _check_names("axis", grid, AXES)
        axes, learner = [axis for axis in AXES if axis in grid], grid.get("quantize_learner", [None])[0]
        cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*map(grid.get, axes))]
        cells = [of for of in cells if of.get("scheme") != "bf16" or of.pop("quantize_learner", learner) == learner]
    is_list = isinstance(cells, list) and cells and all(isinstance(cell, dict) and cell for cell in cells)
    _require(is_list, f"`cells` must be a list of mappings such as {{scheme: w4a16, seed: 0}}, not {cells!r}.")
    names: list[str] = []
    for cell in cells:
        _check_names("axis", cell, AXES)
        for axis, value in cell.items():
            _check_value(axis, value, is_ours="train" in config)
            both = f"`{axis}` is both an axis and an option under `train`; remove it from `train`."
            _require(axis not in train, both)
        names.append(cell_name(cell))
        _require(names.count(names[-1]) == 1, f"The cell {names[-1]} occurs twice; remove one of them.")
        build_command(config, cell, Path("DIR"))
        if "evaluate" in config:
            build_command(config, cell, Path("DIR"), key="evaluate")
    # Cells that differ along an axis without a placeholder would all be the same run.
    varying = [axis for axis in AXES if len({cell.get(axis) for cell in cells}) > 1]
    for name in ("output_dir", *varying) if "command" in config else ():
        missing = f"`command` has no {{{name}}}, so its cells would not differ in it; add the placeholder."
        _require(f"{{{name}}}" in " ".join(map(str, config["command"])), missing)
    return cells


def label_parts(config: Mapping[str, Any]) -> list[str]:
    """Return what a run is called, from the settings that it has of `quantize_learner`, `objective`, `scheme` and
    `lora_mode`, such as `["rollout-only", "tbpo", "w4a16"]` or `["bf16", "grpo", "lora_merged"]`."""
    is_bf16 = config.get("scheme") == "bf16"
    learner = None if "quantize_learner" not in config else "QaRL" if config["quantize_learner"] else "rollout-only"
    scheme, lora = None if is_bf16 else config.get("scheme"), config.get("lora_mode")
    parts = ["bf16" if is_bf16 else learner, config.get("objective"), scheme, lora and f"lora_{lora}"]
    return [str(part) for part in parts if part is not None]


def cell_name(cell: Mapping[str, str | int]) -> str:
    """Return the name of a cell's directory: what the report calls it and its seed, such as
    `QaRL-tbpo-w4a16-seed0`."""
    return "-".join(label_parts(cell) + ([f"seed{cell['seed']}"] if "seed" in cell else []))


def build_command(
    config: dict[str, Any], cell: Mapping[str, Any], output_dir: Path, *, resume: bool = False, key: str = "command"
) -> list[str]:
    """Return the arguments that train, or with `key="evaluate"` evaluate, one cell of [`expand_grid`] in its own
    directory; with `resume` from the last checkpoint there."""
    if key not in config:
        words = [sys.executable, "-m", "trl_qarl.cli", "train"]
        given = {"output_dir": output_dir, "resume_from_checkpoint": resume or None}
        for name, value in {**config["train"], **cell, **given}.items():
            if value is not None:
                value = json.dumps(value, default=str) if isinstance(value, dict) else value
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words
    given = {"output_dir": output_dir, "resume_from_checkpoint": resume, "python": sys.executable}
    # The default of `QaRLConfig`, for the cells of bf16 in a grid that sets it for others.
    values = {"quantize_learner": True, **cell, **given}

    def fill(match: re.Match[str]) -> str:
        can_be = f"cell {cell_name(cell)} does not set; it can be {', '.join(f'{{{name}}}' for name in values)}."
        _require(match[1] in values, f"`{key}` has the placeholder {match[0]}, which {can_be}")
        value = values[match[1]]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [re.sub(r"\{(\w+)\}", fill, str(word)) for word in config[key]]


def check_evaluation(text: str) -> dict[str, dict[str, int]]:
    """Read what an evaluation answered, `{name: {"correct": int, "total": int}}` with at least one name; anything else
    raises `ValueError`."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        scores = json.loads(text)
        if scores and all(0 <= score["correct"] <= score["total"] > 0 for score in scores.values()):
            return scores
    raise ValueError(f'the answer must be {{"greedy": {{"correct": 1, "total": 2}}}} or alike, not {text[:80]!r}')


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_names(kind: str, names: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for name in names:
        _require(name in allowed, f"Unknown {kind} {name!r}; it can be {', '.join(allowed)}.")


def _check_value(axis: str, value: Any, is_ours: bool) -> None:
    if axis == "seed":
        is_valid, valid = type(value) is int and value >= 0, "integers from 0"
    elif axis == "quantize_learner":
        is_valid, valid = isinstance(value, bool), "true or false"
    elif is_ours:
        is_own = axis == "objective" and re.fullmatch(r"[\w.]+:\w+", str(value))
        is_valid, valid = is_own or str(value) in _CHOICES[axis], f"one of {', '.join(_CHOICES[axis])}"
        valid += ", or your own as 'module:Name'" if axis == "objective" else ""
    else:
        # The value becomes part of a directory's name.
        is_valid = isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value)
        valid = "names of letters, digits, '_', '-' and '.', in YAML with quotes"
    _require(is_valid, f"`{axis}` must be {valid}, not {value!r}.")
