"""Names that our sources take from another package, read from the sources, so that no list goes out of date."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import trl_qarl


ROOT = Path(trl_qarl.__file__).parent


def imported_names(package):
    """`(module, name)` of what is imported from `package`, in functions too; `None` stands for a module."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == package:
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, None) for alias in node.names if alias.name.split(".")[0] == package}
    assert found, f"nothing is imported from {package}"
    return sorted(found, key=str)


def resolve(module, name):
    """The object that `from module import name` gives."""
    loaded = import_module(module)
    if name is None or hasattr(loaded, name):
        return loaded if name is None else getattr(loaded, name)
    return import_module(f"{module}.{name}")


def without_place(overrider, *packages):
    """
    Methods of the class `overrider` marked `@override` that no class of `packages` has above it any more; and those
    that no longer take what they took, as `name(parameter)`.
    """
    lost = []
    for name, member in vars(overrider).items():
        function = inspect.unwrap(member.fget if isinstance(member, property) else getattr(member, "__func__", member))
        if not getattr(function, "__override__", False):
            continue
        bases = [base for base in overrider.__mro__[1:] if name in vars(base)]
        above = [vars(base)[name] for base in bases if base.__module__.split(".")[0] in packages]
        if not above:
            lost.append(name)
            continue
        ours = inspect.signature(function).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values()):
            continue
        theirs = inspect.signature(getattr(above[0], "__func__", above[0])).parameters
        lost += [
            f"{name}({parameter})"
            for parameter in theirs
            if parameter not in ours and parameter not in ("args", "kwargs")
        ]
    return lost


def takes(function, *parameters):
    """Those of `parameters` that `function` does not take."""
    signature = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.values()):
        return []
    return [name for name in parameters if name not in signature]
