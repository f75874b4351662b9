"""The table of objectives. Its names need no torch."""

from functools import cache

from .objective import Objective


__all__ = ["OBJECTIVES", "all_objectives", "get_objective"]

OBJECTIVES = (
    "tbpo",
    "grpo-tis",
    "positive-only",
    "on-policy",
    "dual-clip",
    "gspo",
    "mis-gspo",
    "icepop",
    "kpop",
    "geo-mask",
    "bypass",
    "dppo-tv",
    "acr",
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "sapo",
    "luspo",
    "vespo",
)
"""TBPO, the paper's comparison, what others use against the mismatch, and TRL's own losses by their `loss_type` names."""


@cache
def all_objectives() -> dict[str, Objective]:
    """Return the objectives by name, in the order of [`OBJECTIVES`]."""
    from .others import BYPASS, GEO_MASK, ICEPOP, KPOP
    from .presets import COMPARISON, TRLS_LOSSES
    from .tbpo import TBPO
    from .token_losses import ACR, DPPO_TV

    objectives = (TBPO, *COMPARISON, ICEPOP, KPOP, GEO_MASK, BYPASS, DPPO_TV, ACR, *TRLS_LOSSES)
    return {objective.name: objective for objective in objectives}


def get_objective(name: str) -> Objective:
    """Return the objective that `objective=name` chooses, one of [`OBJECTIVES`]."""
    return all_objectives()[name]
