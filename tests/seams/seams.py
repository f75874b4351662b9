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


def resolve(module, name=None):
    """The object that `from module import name` gives, or an attribute of it if the `name` has dots."""
    found = import_module(module)
    for part in name.split(".") if name else ():
        found = getattr(found, part) if hasattr(found, part) else import_module(f"{module}.{part}")
    return found


def rows(table):
    """Lines of a table without its comments: a place, and what it has."""
    return [line.split(maxsplit=1) for line in table.splitlines() if line and not line.startswith("#")]


def lacking(place, *parts):
    """Those of `parts` that the source of `module:name` does not have."""
    source = inspect.getsource(inspect.unwrap(resolve(*place.split(":"))))
    return [part for part in parts if part not in source]


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
