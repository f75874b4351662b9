"""
Models of transformers that learner and engine share, where vLLM has no class of its own (SmolLM3, OLMo 2, StarCoder2).

vLLM's Transformers backend changes transformers' class itself: `__init__` then asks for vLLM's configuration, and
`__call__` reads attributes that only the engine's model has, and skips hooks
(https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/transformers/base.py). Here both apply to
the engine's models alone.
"""

from functools import wraps
from typing import Any


def register_classes() -> None:
    """Have vLLM's decorator leave other models of a class as they are; calling it again changes nothing."""
    from vllm.compilation import decorators

    theirs = decorators._support_torch_compile
    if not hasattr(theirs, "__wrapped__"):
        decorators._support_torch_compile = _for_engines_alone(theirs)


def _for_engines_alone(decorate: Any) -> Any:
    from vllm.config.vllm import get_current_vllm_config_or_none

    @wraps(decorate)
    def decorate_for_engines(cls: type, *args: Any, **kwargs: Any) -> type:
        init, call = cls.__init__, cls.__call__
        decorate(cls, *args, **kwargs)
        # Decorated before, or a class of vLLM's own.
        if cls.__init__ is init or cls.__module__.startswith("vllm."):
            return cls
        engine_init, engine_call = cls.__init__, cls.__call__

        @wraps(init)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            is_engine = get_current_vllm_config_or_none() is not None
            (engine_init if is_engine else init)(self, *args, **kwargs)

        @wraps(call)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            is_engine = "do_not_compile" in vars(self)
            return (engine_call if is_engine else call)(self, *args, **kwargs)

        cls.__init__, cls.__call__ = __init__, __call__
        return cls

    return decorate_for_engines
