"""The grid file: its cells, their names and the command of each."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checks.refused import LORA_MODES
from ..objectives.registry import OBJECTIVES
from ..quantization.schemes import SCHEMES
from .groups import label_parts


__all__ = ["AXES", "KEYS", "build_command", "cell_name", "expand_grid", "load_grid"]

AXES = ("quantize_learner", "objective", "scheme", "lora_mode", "seed")
KEYS = ("command", "train", "grid", "cells", "evaluate")

_CHOICES = {"objective": OBJECTIVES, "scheme": tuple(SCHEMES), "lora_mode": LORA_MODES}


def load_grid(path: str | Path) -> dict[str, Any]:
    """
    Read and check a grid, without its cells.

    Raises:
        ValueError: if the file is not YAML, has unknown or missing keys, or names a program that is not installed.
    """
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a mapping with `train` or `command` and `grid` or `cells`, not {config!r}.")
    _check_names("key", config, KEYS)
    for pair in (("train", "command"), ("grid", "cells")):
        if sum(key in config for key in pair) != 1:
            raise ValueError(f"{path} has {_describe_pair(pair, config)}; give exactly one of them.")
    if "train" in config:
        train = config["train"]
        if not isinstance(train, dict):
            raise ValueError(f"`train` must map options of `trl-qarl train` to values, not {train!r}.")
        for name in ("output_dir", "resume_from_checkpoint"):
            if name in train:
                raise ValueError(f"`train` sets `{name}`, which compare sets for every cell; remove it from the file.")
        for name, value in train.items():
            values = value if isinstance(value, list) else [value]
            is_mapping = isinstance(value, dict) and all(map(_is_plain, value.values()))
            if not (is_mapping or all(map(_is_plain, values))):
                raise ValueError(
                    f"`train` sets `{name}` to {value!r}, which no option of a command line can hold: give text, "
                    "numbers, true, false, a list or a mapping of them (a date in quotes), or write it to a file for "
                    "`trl-qarl train --config`."
                )
    for key in ("command", "evaluate"):
        command = config.get(key)
        if key in config and not (
            isinstance(command, list) and command and all(isinstance(word, str | int | float) for word in command)
        ):
            raise ValueError(f"`{key}` must be a list of words such as ['{{python}}', 'train.py'], not {command!r}.")
        # A placeholder names nothing that can be looked up.
        if command and "{" not in str(command[0]) and shutil.which(str(command[0])) is None:
            raise ValueError(
                f"`{key}` starts with {command[0]!r}, which is not an executable; install it or fix the path."
            )
    return config


def expand_grid(config: dict[str, Any]) -> list[dict[str, str | int]]:
    """
    Return the cells of a grid: the product of the axes under `grid`, the last of which varies fastest, or the list
    under `cells`. In a product the scheme `bf16` has one cell for all values of `quantize_learner`, which then has
    nothing to act on.

    Example:

    ```python
    >>> expand_grid({"train": {}, "grid": {"scheme": ["w4a16"], "seed": [0, 1]}})
    [{'scheme': 'w4a16', 'seed': 0}, {'scheme': 'w4a16', 'seed': 1}]
    ```

    Raises:
        ValueError: for an unknown axis, an axis without values, a value that cannot name a directory, two equal cells,
            a cell with scheme `bf16` and `quantize_learner=False`, or one that the command cannot be built for.
    """
    if "cells" in config:
        cells = config["cells"]
        if not (isinstance(cells, list) and cells and all(isinstance(cell, dict) and cell for cell in cells)):
            raise ValueError(f"`cells` must be a list of mappings such as {{scheme: w4a16, seed: 0}}, not {cells!r}.")
        for cell in cells:
            _check_names("axis", cell, AXES)
    else:
        grid = config["grid"]
        if not (isinstance(grid, dict) and grid):
            raise ValueError(f"`grid` must map {', '.join(AXES)} to lists of values, not {grid!r}.")
        _check_names("axis", grid, AXES)
        for axis, values in grid.items():
            if not (isinstance(values, list) and values):
                raise ValueError(f"`{axis}` must be a list with at least one value, not {values!r}.")
        cells = list(_product(grid))
    cells = [{axis: cell[axis] for axis in AXES if axis in cell} for cell in cells]
    names: set[str] = set()
    for cell in cells:
        for axis, value in cell.items():
            _check_value(axis, value)
            if "train" in config and axis in _CHOICES:
                _check_choice(axis, value)
            if axis in config.get("train", ()):
                raise ValueError(f"`{axis}` is both an axis and an option under `train`; remove it from `train`.")
        options = {**config.get("train", {}), **cell}
        if options.get("scheme") == "bf16" and options.get("quantize_learner", True) is False:
            raise ValueError(
                f"The cell {cell_name(cell)} has scheme bf16 and quantize_learner false, but bf16 has no low-bit "
                "weights for the rollout alone to run; remove `quantize_learner`, or name a quantized scheme."
            )
        if cell_name(cell) in names:
            raise ValueError(f"The cell {cell_name(cell)} occurs twice; remove one of them.")
        names.add(cell_name(cell))
        build_command(config, cell, Path("DIR"))
    _check_placeholders(config, cells)
    return cells


def cell_name(cell: dict[str, str | int]) -> str:
    """Return the name of a cell's directory: what the report calls it and its seed, such as `QaRL-tbpo-w4a16-seed0`."""
    return "-".join(label_parts(cell) + ([f"seed{cell['seed']}"] if "seed" in cell else []))


def build_command(
    config: dict[str, Any],
    cell: dict[str, str | int],
    output_dir: Path,
    *,
    resume: bool = False,
    key: str | None = None,
) -> list[str]:
    """
    Return the arguments that train, or with `key="evaluate"` evaluate, one cell.

    Args:
        config (`dict`):
            Grid of [`load_grid`].
        cell (`dict`):
            One of [`expand_grid`].
        output_dir (`Path`):
            The cell's own directory.
        resume (`bool`, *optional*, defaults to `False`):
            Continue from the last checkpoint in `output_dir`.
        key (`str`, *optional*):
            `"command"` or `"evaluate"`; by default what trains.
    """
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
        if name not in allowed:
            raise ValueError(f"Unknown {kind} {name!r}; it can be {', '.join(allowed)}.")


def _check_value(axis: str, value: Any) -> None:
    if axis == "seed" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"`seed` must be integers from 0, not {value!r}.")
    if axis == "quantize_learner" and not isinstance(value, bool):
        raise ValueError(f"`quantize_learner` must be true or false, not {value!r}.")
    # The value becomes part of a directory's name.
    if axis in _CHOICES and not (isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value)):
        raise ValueError(
            f"`{axis}` must be names of letters, digits, '_', '-' and '.', not {value!r}; quote it in YAML."
        )


def _check_choice(axis: str, value: str) -> None:
    if value not in _CHOICES[axis]:
        raise ValueError(f"`{axis}` has the value {value!r}; it can be {', '.join(_CHOICES[axis])}.")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _check_placeholders(config: dict[str, Any], cells: list[dict]) -> None:
    """Raise for an axis without a placeholder: cells that differ along it would all be the same run."""
    if "command" not in config:
        return
    words = " ".join(map(str, config["command"]))
    varying = [axis for axis in AXES if len({cell.get(axis) for cell in cells}) > 1]
    for name in ("output_dir", *varying):
        if f"{{{name}}}" not in words:
            raise ValueError(f"`command` has no {{{name}}}, so its cells would not differ in it; add the placeholder.")


def _describe_pair(pair: tuple[str, ...], config: dict[str, Any]) -> str:
    return " and ".join(f"`{key}`" for key in pair) if pair[0] in config else f"neither `{pair[0]}` nor `{pair[1]}`"


def _option(name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    yield f"--{name}"
    if isinstance(value, list):
        yield from map(str, value)
    else:
        yield json.dumps(value) if isinstance(value, dict) else str(value)
