"""Checks of `objective` and the options of its loss: each function yields problems and changes nothing."""

from collections.abc import Iterator

from ..objectives.options import default
from ..objectives.registry import all_objectives, get_objective, problem_of_objective


__all__ = ["check_objective", "check_ratios"]


def check_objective(config) -> Iterator[str]:
    """Contradictions between given options and `objective`, before the objective sets anything."""
    if problem := problem_of_objective(config):
        yield problem
        return
    yield from get_objective(config).contradictions(config)


def check_ratios(config) -> Iterator[str]:
    """Options of the loss, once `objective` has set its own."""
    if problem_of_objective(config):
        return
    objective = get_objective(config)
    users: dict[str, list[str]] = {}
    for other in all_objectives().values():
        for name in other.own_options:
            users.setdefault(name, []).append(f"objective={other.name!r}")
    for name, owners in users.items():
        if name not in objective.own_options and getattr(config, name) != default(type(config), name):
            yield (
                f"{name}={getattr(config, name)!r} belongs to {' and '.join(owners)}, but "
                f"objective={config.objective!r}. Remove it or change the objective."
            )
    yield from objective.problems(config)
