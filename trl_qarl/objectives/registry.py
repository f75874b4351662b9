"""Table of objectives, and lookup of user-defined objectives by import path. The names need no torch."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from .objective import Objective
from .options import LOSS_TYPES


OBJECTIVES = (
    "tbpo",
    *("grpo-tis", "positive-only", "on-policy", "dual-clip", "gspo", "mis-gspo"),
    *("icepop", "kpop", "geo-mask", "bypass", "dppo-tv", "acr"),
    *LOSS_TYPES,
)
"""TBPO, the paper's comparison, methods of other projects against the mismatch, and TRL's own losses by their
`loss_type` names."""


@cache
def all_objectives() -> dict[str, Objective]:
    """Return the objectives by name, in the order of [`OBJECTIVES`]."""
    from .others import OTHERS
    from .presets import COMPARISON, TRLS_LOSSES
    from .tbpo import TBPO

    return {objective.name: objective for objective in (TBPO, *COMPARISON, *OTHERS, *TRLS_LOSSES)}


def get_objective(config: Any) -> Objective:
    """Return the objective of a [`QaRLConfig`], with the errors of [`find_objective`]."""
    return find_objective(config.objective, config.objective_kwargs)


def find_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """
    Return an objective by its name: one of [`OBJECTIVES`], or `"module:Name"` for an [`Objective`], or a subclass, in
    a module that can be imported from the current folder or the environment. `options` are arguments of the class in
    addition to `name`. `ValueError` is raised if there is no such objective, or if it does not take the options.
    """
    if ":" in name:
        try:
            text = json.dumps(dict(options or {}), sort_keys=True)
        except TypeError as error:
            raise ValueError(f"objective_kwargs={options!r}: {error}. Give values that JSON can hold.") from error
        return _of_user(name, text)
    if name not in OBJECTIVES:
        raise ValueError(
            f"Unknown objective {name!r}. Choose one of {list(OBJECTIVES)}, or name your own as 'module:Name'."
        )
    if options:
        raise ValueError(
            f"objective_kwargs={dict(options)!r} is for an objective of your own ('module:Name'); options of objective={name!r} are "
            "those of QaRLConfig. Remove it."
        )
    return all_objectives()[name]


@cache
def _of_user(name: str, options: str) -> Objective:
    module_name, _, attribute = name.partition(":")
    # As TRL does for reward functions: an installed script does not search the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"objective={name!r} cannot be imported: {error}. Write 'module:Name'.") from error
    if isinstance(found, type) and issubclass(found, Objective):
        try:
            return found(name=name, **json.loads(options))
        except TypeError as error:
            raise ValueError(f"objective={name!r} does not take objective_kwargs={options}: {error}.") from error
    if not isinstance(found, Objective):
        raise ValueError(
            f"objective={name!r} is a {type(found).__name__}. It must be a `trl_qarl.objectives.objective.Objective` or a subclass."
        )
    if options != "{}":
        raise ValueError(
            f"objective={name!r} is an instance, which takes no objective_kwargs={options}. Name its class."
        )
    return found


def options_of_others(config: Any, objective: Objective) -> Iterator[str]:
    """Yield a problem for each option that was given and is used only by other objectives."""
    users: dict[str, list[str]] = {}
    for other in all_objectives().values():
        for name in other.own_options:
            users.setdefault(name, []).append(f"objective={other.name!r}")
    for name, owners in users.items():
        if name not in objective.own_options and getattr(config, name) != getattr(type(config), name):
            yield (
                f"{name}={getattr(config, name)!r} belongs to {' and '.join(owners)}, but "
                f"objective={config.objective!r}. Remove it or change the objective."
            )
