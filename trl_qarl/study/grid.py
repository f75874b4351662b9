"""The grid file: its cells, their names and the command of each."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..objectives.registry import OBJECTIVES
from ..options import CHOICES
from ..quantization.schemes import SCHEMES
from .groups import label_parts


__all__ = ["AXES", "KEYS", "build_command", "cell_name", "expand_grid", "load_grid"]

AXES = ("quantize_learner", "objective", "scheme", "lora_mode", "seed")
KEYS = ("command", "train", "grid", "cells", "evaluate")

_CHOICES = {"objective": OBJECTIVES, "scheme": tuple(SCHEMES), "lora_mode": CHOICES["lora_mode"]}


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
    for name, value in train.items():
        where = f"`train` sets `{name}`"
        is_ours = name in ("output_dir", "resume_from_checkpoint")
        _require(not is_ours, f"{where}, which compare sets for every cell; remove it from the file.")
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        _require(
            all(one is None or isinstance(one, str | int | float) for one in values),
            f"{where} to {value!r}, which no option of a command line can hold: give text, numbers, true, false, a list or a mapping "
            "of them (a date in quotes), or write it to a file for `trl-qarl train --config`.",
        )
    for key in [key for key in ("command", "evaluate") if key in config]:
        words = config[key]
        is_list = isinstance(words, list) and words and all(isinstance(word, str | int | float) for word in words)
        _require(is_list, f"`{key}` must be a list of words such as ['{{python}}', 'train.py'], not {words!r}.")
        # A placeholder names nothing that can be looked up.
        is_there = "{" in str(words[0]) or shutil.which(str(words[0])) is not None
        _require(
            is_there, f"`{key}` starts with {words[0]!r}, which is not an executable; install it or fix the path."
        )
    return config


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def expand_grid(config: dict[str, Any]) -> list[dict[str, str | int]]:
    """
    Return the cells of a grid: the product of the axes under `grid`, the last of which varies fastest, or the list
    under `cells`. In a product the scheme `bf16` has one cell for all values of `quantize_learner`. `ValueError` is
    raised for unknown axes and values, equal cells, and cells that the command cannot be built for.
    """
    if "cells" in config:
        cells = config["cells"]
        is_list = isinstance(cells, list) and cells and all(isinstance(cell, dict) and cell for cell in cells)
        _require(is_list, f"`cells` must be a list of mappings such as {{scheme: w4a16, seed: 0}}, not {cells!r}.")
        for cell in cells:
            _check_names("axis", cell, AXES)
    else:
        grid = config["grid"]
        is_mapping = isinstance(grid, dict) and grid
        _require(is_mapping, f"`grid` must map {', '.join(AXES)} to lists of values, not {grid!r}.")
        _check_names("axis", grid, AXES)
        for axis, values in grid.items():
            is_list = isinstance(values, list) and values
            _require(is_list, f"`{axis}` must be a list with at least one value, not {values!r}.")
        cells = list(_product(grid))
    cells = [{axis: cell[axis] for axis in AXES if axis in cell} for cell in cells]
    train = config.get("train", {})
    names: set[str] = set()
    for cell in cells:
        for axis, value in cell.items():
            _check_value(axis, value, is_ours="train" in config)
            both = f"`{axis}` is both an axis and an option under `train`; remove it from `train`."
            _require(axis not in train, both)
        name, options = cell_name(cell), {"quantize_learner": True, **train, **cell}
        _require(
            options.get("scheme") != "bf16" or options["quantize_learner"] is not False,
            f"The cell {name} has scheme bf16 and quantize_learner false, but bf16 has no low-bit weights for only the rollout to "
            "run; remove `quantize_learner`, or name a quantized scheme.",
        )
        _require(name not in names, f"The cell {name} occurs twice; remove one of them.")
        names.add(name)
        build_command(config, cell, Path("DIR"))
    # Cells that differ along an axis without a placeholder would all be the same run.
    words = " ".join(map(str, config.get("command", ())))
    varying = [axis for axis in AXES if len({cell.get(axis) for cell in cells}) > 1]
    for name in ("output_dir", *varying) if words else ():
        missing = f"`command` has no {{{name}}}, so its cells would not differ in it; add the placeholder."
        _require(f"{{{name}}}" in words, missing)
    return cells


def cell_name(cell: dict[str, str | int]) -> str:
    """Return the name of a cell's directory: what the report calls it and its seed, such as
    `QaRL-tbpo-w4a16-seed0`."""
    return "-".join(label_parts(cell) + ([f"seed{cell['seed']}"] if "seed" in cell else []))


def build_command(
    config: dict[str, Any],
    cell: dict[str, str | int],
    output_dir: Path,
    *,
    resume: bool = False,
    key: str | None = None,
) -> list[str]:
    """Return the arguments that train, or with `key="evaluate"` evaluate, one cell of [`expand_grid`] in its own
    directory; with `resume` from the last checkpoint there."""
    if key is None and "train" in config:
        options = {**config["train"], **cell, "output_dir": str(output_dir)}
        if resume:
            options["resume_from_checkpoint"] = True
        words = [word for name, value in options.items() for word in _option(name, value)]
        return [sys.executable, "-m", "trl_qarl.cli", "train", *words]
    key = key or "command"
    values = {
        # The default of `QaRLConfig`, for the cells of bf16 in a grid that sets it for others.
        "quantize_learner": True,
        **cell,
        "output_dir": str(output_dir),
        "resume_from_checkpoint": str(resume).lower(),
        "python": sys.executable,
    }

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(
                f"`{key}` has the placeholder {match[0]}, which cell {cell_name(cell)} does not set; "
                f"it can be {', '.join(f'{{{name}}}' for name in values)}."
            )
        value = values[match[1]]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [re.sub(r"\{(\w+)\}", fill, str(word)) for word in config[key]]


def _product(grid: dict[str, list]) -> Iterator[dict[str, Any]]:
    axes = [axis for axis in AXES if axis in grid]
    for values in itertools.product(*(grid[axis] for axis in axes)):
        cell = dict(zip(axes, values, strict=True))
        if cell.get("scheme") == "bf16" and "quantize_learner" in cell:
            if cell["quantize_learner"] != grid["quantize_learner"][0]:
                continue
            del cell["quantize_learner"]
        yield cell


def _check_names(kind: str, names: dict[str, Any], allowed: tuple[str, ...]) -> None:
    for name in names:
        _require(name in allowed, f"Unknown {kind} {name!r}; it can be {', '.join(allowed)}.")


def _check_value(axis: str, value: Any, is_ours: bool) -> None:
    if axis == "seed":
        _require(type(value) is int and value >= 0, f"`seed` must be integers from 0, not {value!r}.")
    elif axis == "quantize_learner":
        _require(isinstance(value, bool), f"`quantize_learner` must be true or false, not {value!r}.")
    else:
        # The value becomes part of a directory's name.
        is_name = isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value)
        allowed = "letters, digits, '_', '-' and '.'"
        _require(is_name, f"`{axis}` must be names of {allowed}, not {value!r}; quote it in YAML.")
        is_known = not is_ours or value in _CHOICES[axis]
        _require(is_known, f"`{axis}` has the value {value!r}; it can be {', '.join(_CHOICES[axis])}.")


def _option(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    yield f"--{name}"
    if isinstance(value, list):
        yield from map(str, value)
    else:
        yield json.dumps(value) if isinstance(value, dict) else str(value)
