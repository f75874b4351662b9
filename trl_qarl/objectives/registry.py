"""Lookup of objectives by name or import path, and checks of their options. The names need no torch."""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from .objective import LOSS_TYPES, TBPO_OPTIONS, Objective


OBJECTIVES = ("tbpo", *LOSS_TYPES)
"""TBPO, and TRL's own losses by their `loss_type` names."""


def get_objective(config: Any) -> Objective | None:
    """
    Return the objective of a [`QaRLConfig`], by its `loss_type` of [`OBJECTIVES`]; `None` for a loss of TRL.
    `"module:Class"` names a subclass of [`Objective`] in a module that can be imported from the current folder or the
    environment, and `objective_kwargs` are its arguments. `ValueError` is raised if there is no such objective, or if
    it does not take them.
    """
    name, options = config.loss_type, config.objective_kwargs
    if ":" in name:
        return _of_user(name, options or {})
    if name not in OBJECTIVES:
        raise ValueError(
            f"loss_type={name!r} is unknown. Choose one of {list(OBJECTIVES)}, or name your own as 'module:Class'. GSPO is "
            "loss_type='grpo' with importance_sampling_level='sequence'."
        )
    if options:
        raise ValueError(
            f"objective_kwargs={dict(options)!r} is for an objective of your own ('module:Class'); options of loss_type={name!r} are "
            "those of QaRLConfig. Remove it."
        )
    if name in LOSS_TYPES:
        return None
    from .tbpo import TBPO

    return TBPO()


def _of_user(name: str, options: Mapping[str, Any]) -> Objective:
    module_name, _, attribute = name.partition(":")
    # As TRL does for reward functions: an installed script does not search the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"loss_type={name!r} cannot be imported: {error}. Write 'module:Class'.") from error
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(
            f"loss_type={name!r} is not a class that the trainer can use. Name a subclass of `trl_qarl.objectives.objective.Objective`."
        )
    try:
        return found(**options)
    except TypeError as error:
        raise ValueError(f"loss_type={name!r} does not take objective_kwargs={dict(options)!r}: {error}.") from error


def problems_of_objective(config: Any) -> Iterator[str]:
    """Yield problems of a configuration's objective, and options of another one."""
    try:
        objective = get_objective(config)
    except ValueError as error:
        yield str(error)
        return
    for name in TBPO_OPTIONS if config.loss_type != "tbpo" else ():
        if getattr(config, name) != getattr(type(config), name):
            yield (
                f"{name}={getattr(config, name)!r} belongs to loss_type='tbpo', but loss_type={config.loss_type!r}. "
                "Remove it or change the loss type."
            )
    if objective is not None:
        yield from objective.problems(config)
