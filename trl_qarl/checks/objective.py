"""What is wrong with `objective` and the options of its loss: each function yields its problems and changes nothing."""

from collections.abc import Iterator

from ..objectives.options import default
from ..objectives.registry import OBJECTIVES, all_objectives, get_objective


__all__ = ["check_objective", "check_ratios", "refused_by_objective"]


def check_objective(config) -> Iterator[str]:
    """Contradictions of what was given with `objective`, before it sets anything."""
    if config.objective not in OBJECTIVES:
        yield f"Unknown objective {config.objective!r}. Choose one of {list(OBJECTIVES)}."
        return
    yield from get_objective(config.objective).contradictions(config)


def refused_by_objective(config) -> Iterator[tuple[str, str]]:
    """Options as they were given that have no meaning for the objective, and why."""
    if config.objective in OBJECTIVES:
        yield from get_objective(config.objective).refused(config)


def check_ratios(config) -> Iterator[str]:
    """Options of the loss, once `objective` has set its own."""
    if config.objective not in OBJECTIVES:
        return
    objective = get_objective(config.objective)
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
