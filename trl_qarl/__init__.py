"""
QaRL for TRL: reinforcement learning whose learner computes with the same low-bit weights as the rollout engine.

Public names are loaded on first use, so that `import trl_qarl` and `trl-qarl --help` load neither torch nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .packages import problem_of_torchvision, quiet_torchao


__all__ = [
    "QaRLConfig",
    "QaRLTrainer",
    "QuantScheme",
    "QuantizedLinear",
    "SwapReport",
    "__version__",
    "convert_model",
    "export_checkpoint",
    "get_scheme",
    "load_engine",
    "prepare_model",
    "restore_model",
]

_MODULES = {
    "QaRLConfig": "trainer.qarl_config",
    "QaRLTrainer": "trainer.qarl_trainer",
    "QuantScheme": "quantization.schemes",
    "QuantizedLinear": "quantization.linear",
    "SwapReport": "quantization.swap",
    "convert_model": "quantization.swap",
    "export_checkpoint": "checkpoint.export",
    "get_scheme": "quantization.schemes",
    "load_engine": "engines.in_process",
    "prepare_model": "quantization.swap",
    "restore_model": "quantization.swap",
}

# For type checkers and editors; `__getattr__` does the same at run time.
if TYPE_CHECKING:
    from .checkpoint.export import export_checkpoint
    from .engines.in_process import load_engine
    from .quantization.linear import QuantizedLinear
    from .quantization.schemes import QuantScheme, get_scheme
    from .quantization.swap import SwapReport, convert_model, prepare_model, restore_model
    from .trainer.qarl_config import QaRLConfig
    from .trainer.qarl_trainer import QaRLTrainer


# On import: a call would come after the import of transformers, which imports torchao.
quiet_torchao()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except Exception as error:
        if problem := problem_of_torchvision():
            raise ImportError(problem) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
