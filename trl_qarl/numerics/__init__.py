"""
The learner's forward in the engine's own arithmetic, so that both give a token the same log-prob, bit for bit.
"""

from .attach import (
    COVERED_CLASSES,
    attach_engine_numerics,
    check_engine_numerics,
    detach_engine_numerics,
    engine_numerics,
    has_engine_numerics,
)
from .ops import token_log_probs


__all__ = [
    "COVERED_CLASSES",
    "attach_engine_numerics",
    "check_engine_numerics",
    "detach_engine_numerics",
    "engine_numerics",
    "has_engine_numerics",
    "token_log_probs",
]
