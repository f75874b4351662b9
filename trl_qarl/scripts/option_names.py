"""
Names of options: both spellings, slips, and those of `trl-qarl train` without importing what defines them.

The parser of `train` is made of dataclasses of TRL and transformers, whose import takes seconds. [`names_of_train`]
reads their sources instead. It may know more names than the parser, never fewer: a name that it does not know is a
slip, and whatever else is wrong the parser says.
"""

import ast
from argparse import ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path


__all__ = ["check_names", "names_of_train", "option_names", "spell"]

# Where the dataclasses of the parser are. Their bases must be among them.
_DATACLASSES = {
    "transformers/training_args.py": ("TrainingArguments",),
    "trl/trainer/base_config.py": ("_BaseConfig",),
    "trl/trainer/grpo_config.py": ("GRPOConfig",),
    "trl/trainer/model_config.py": ("ModelConfig",),
    "trl/scripts/utils.py": ("ScriptArguments", "DatasetMixtureConfig"),
    "trl/scripts/grpo.py": ("GRPOScriptArguments",),
    "trl_qarl/qarl_config.py": ("QaRLConfig",),
    "trl_qarl/scripts/train.py": ("ScriptArguments", "ModelArguments"),
}
_LAUNCHER = "accelerate/commands/launch.py"


def option_names(parser: ArgumentParser) -> set[str]:
    """Return the long options of a parser, with their dashes."""
    return {name for name in parser._option_string_actions if name.startswith("--")}


def spell(argv: list[str], known: Iterable[str]) -> list[str]:
    """Return `argv` with dashes in names of options for underscores, or the reverse, where only that is in `known`."""
    spellings = {name.replace("-", "_"): name for name in known}
    spellings |= {name: name for name in known}
    words = [word.partition("=") for word in argv]
    return [
        spellings.get(name, spellings.get(name.replace("-", "_"), name)) + rest + value for name, rest, value in words
    ]


def check_names(argv: list[str], known: Iterable[str]) -> None:
    """
    Raise for the first option in `argv` that is neither in `known` nor begins one that is, as argparse completes it.

    argparse would first complain of what is missing, and knows no "did you mean".

    Raises:
        ValueError: with what was probably meant.
    """
    for word in argv:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            matches = get_close_matches(name.replace("-", "_"), [option.replace("-", "_") for option in known], n=1)
            hint = f" Did you mean `--{matches[0][2:]}`?" if matches else ""
            raise ValueError(f"Unknown option `{name}`.{hint}")


def names_of_train() -> set[str] | None:
    """
    Return the long options of `trl-qarl train` and of `accelerate launch` in both spellings, read from their
    sources; `None` if a release has moved them.
    """
    try:
        names = _strings_of_options(_LAUNCHER) | {"--config", "--accelerate_config", "--help"}
        known = {name for classes in _DATACLASSES.values() for name in classes}
        for file, wanted in _DATACLASSES.items():
            found = {node.name: node for node in ast.walk(_parse(file)) if isinstance(node, ast.ClassDef)}
            for node in map(found.__getitem__, wanted):
                if not {ast.unparse(base) for base in node.bases} <= known:
                    return None
                names |= _fields(node)
    except (KeyError, OSError, SyntaxError):
        return None
    return names | {"--" + name[2:].replace("_", "-") for name in names}


def _parse(file: str) -> ast.Module:
    package, _, rest = file.partition("/")
    # The specification of a package at the top is found without importing it.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(package)
    return ast.parse(Path(spec.submodule_search_locations[0], rest).read_text(encoding="utf-8"))


def _fields(node: ast.ClassDef) -> set[str]:
    """Return the options of a dataclass: `--no_x` too for each that may be one of true and false."""
    fields = {
        statement.target.id: ast.unparse(statement.annotation)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return {f"--{name}" for name in fields} | {f"--no_{name}" for name, type_ in fields.items() if "bool" in type_}


def _strings_of_options(file: str) -> set[str]:
    nodes = ast.walk(_parse(file))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in strings if text.startswith("--") and text[2:].replace("-", "_").isidentifier()}
