"""Checks of model, rewards and dataset of `trl-qarl train`, before anything is launched."""

import os
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any


REWARDS = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"]
# Endings of files that `--dataset_name` may name, and the builder of `datasets` that reads them.
DATA_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def check_inputs(options: Mapping[str, Any]) -> None:
    """Check the given options, by name, as far as possible without torch: `ValueError` is raised if model, reward or
    dataset is missing, and for a reward or a local dataset that does not exist."""
    if not options.get("model_name_or_path"):
        raise ValueError("No model: give `--model_name_or_path`.")
    check_rewards(options.get("reward_funcs") or [], options.get("reward_model_name_or_path"))
    _check_dataset(options.get("dataset_name"), options.get("dataset_config"), options.get("datasets"))


def check_rewards(names: list[str] | str, reward_model: str | None) -> None:
    if not names and not reward_model:
        raise ValueError("No reward: give `--reward_funcs` or `--reward_model_name_or_path`.")
    for name in as_list(names):
        module_path = name.rpartition(".")[0]
        if name not in REWARDS and not module_path:
            raise ValueError(
                f"Unknown reward function {name!r}. Choose one of {REWARDS}, or give a dotted import path such as "
                f"`my_rewards.{name}`."
            )
        package = module_path.partition(".")[0]
        # A YAML file may set PYTHONPATH for the training process.
        folders = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        if package and not (find_spec(package) or PathFinder.find_spec(package, folders)):
            raise ValueError(f"Could not import reward function {name!r}: No module named {package!r}.")


def as_list(names: list[str] | str) -> list[str]:
    # A YAML file may name one reward without a list, and TRL's parser does not convert it.
    return [names] if isinstance(names, str) else [*map(str, names)]


def _check_dataset(name: str | None, config: str | None, mixture: Any) -> None:
    if mixture and name:
        raise ValueError("Both `datasets` and `dataset_name` are given. Remove one of them.")
    if mixture:
        return
    if not name:
        raise ValueError("No dataset: give `--dataset_name`, or `datasets` in the YAML file.")
    path = Path(name)
    if path.is_dir():
        return
    if path.suffix in DATA_FILES:
        if not path.is_file():
            raise ValueError(f"--dataset_name={name!r}: there is no such file.")
        if config is not None:
            raise ValueError(f"--dataset_config={config!r}: a file has no configurations. Remove it.")
    elif path.is_file():
        raise ValueError(f"--dataset_name={name!r} is a file that ends in none of {[*DATA_FILES]}.")
    elif path.is_absolute() or name.startswith(("./", "../")):
        raise ValueError(f"--dataset_name={name!r}: there is no such file or folder.")
