"""
Options as a command line gives them: both spellings of their names, and what is wrong with names and values.

Nothing heavy is loaded. The options of `train` are those of TRL, transformers and accelerate too, and are read from the
sources of these packages.
"""

import ast
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..objectives.registry import OBJECTIVES
from ..quantization.schemes import SCHEMES


__all__ = ["Option", "check", "check_yaml", "field_calls", "options_of", "options_of_train", "spell"]

PACKAGE = Path(__file__).parent.parent
# Of each file the class whose fields are options.
OWN_CLASSES = {"qarl_config.py": "QaRLConfig", "scripts/train.py": "ScriptArguments"}
CLASSES = {
    "trl/trainer/grpo_config.py": "GRPOConfig",
    "trl/trainer/base_config.py": "_BaseConfig",
    "trl/trainer/model_config.py": "ModelConfig",
    "trl/scripts/utils.py": ("ScriptArguments", "DatasetMixtureConfig"),
    "trl/scripts/grpo.py": "GRPOScriptArguments",
    "transformers/training_args.py": "TrainingArguments",
}
LAUNCHER = "accelerate/commands/launch.py"
# Of the launchers, here and in TRL. `env` is a key of the YAML file.
OTHERS = ("config", "accelerate_config", "help", "help_all", "env")


class Option(NamedTuple):
    """Values that an option allows (`None`: any), and whether it takes several."""

    choices: tuple[str, ...] | None = None
    is_list: bool = False


def options_of(parser: ArgumentParser, argv: list[str]) -> dict[str, Option]:
    """Long options of a parser, or of the one of its subcommands that `argv` names, without their dashes."""
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            names = [word for word in argv if word in action.choices]
            return options_of(action.choices[names[0]], argv) if names else {}
    return {
        name[2:]: Option(tuple(map(str, action.choices)) if action.choices else None, action.nargs in ("+", "*"))
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def options_of_train() -> dict[str, Option] | None:
    """Options of `trl-qarl train`, or `None` where the sources of a package are not where they are looked for."""
    options = {name: Option() for name in OTHERS}
    for file, classes in (*OWN_CLASSES.items(), *CLASSES.items()):
        path = PACKAGE / file if file in OWN_CLASSES else _find(file)
        if path is None:
            return None
        for name, arguments in field_calls(path, (classes,) if isinstance(classes, str) else classes):
            # A subclass comes before its base.
            options.setdefault(name, Option(_choices(arguments)))
    path = _find(LAUNCHER)
    if path is None:
        return None
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                    options.setdefault(argument.value[2:].replace("-", "_"), Option())
    return options


def field_calls(path: Path, classes: Iterable[str]) -> Iterator[tuple[str, dict[str | None, ast.expr]]]:
    """Names of the fields of dataclasses in a source file, with the arguments of their `field(...)`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.ClassDef) and node.name in classes):
            continue
        for entry in node.body:
            is_field = isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            if is_field and isinstance(entry.value, ast.Call) and not entry.target.id.startswith("_"):
                yield entry.target.id, {keyword.arg: keyword.value for keyword in entry.value.keywords}


def _find(file: str) -> Path | None:
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    paths = [Path(folder, rest) for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in paths if path.is_file()), None)


def _choices(arguments: Mapping[str | None, ast.expr]) -> tuple[str, ...] | None:
    """Allowed values where the source says them in a form that can be read without running it."""
    metadata = arguments.get("metadata")
    for key, value in zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ():
        if isinstance(key, ast.Constant) and key.value == "choices":
            known = {"list(SCHEMES)": SCHEMES, "list(OBJECTIVES)": OBJECTIVES}
            try:
                return tuple(map(str, known.get(ast.unparse(value)) or ast.literal_eval(value)))
            except ValueError:
                return None
    return None


def spell(argv: list[str], options: Mapping[str, Option]) -> list[str]:
    """`argv` with each known option in the spelling of `options`: `--group-size` as `--group_size`."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        known = _known(name[2:], options) if name.startswith("--") else None
        words.append(f"--{known}{equals}{value}" if known else word)
    return words


def check(argv: list[str], options: Mapping[str, Option], cutoff: float = 0.6, passes_unknown: bool = False) -> None:
    """
    Refuse names that no option has, and values that an option does not allow.

    Args:
        argv (`list[str]`):
            Arguments of a command.
        options (`Mapping[str, Option]`):
            Its options, by their names without dashes.
        cutoff (`float`, *optional*, defaults to `0.6`):
            How much a known name must resemble an unknown one, from 0 to 1, to be suggested.
        passes_unknown (`bool`, *optional*, defaults to `False`):
            Whether unknown options are another program's. Only what resembles one of `options` is refused then.

    Raises:
        ValueError: naming all of them, with what was probably meant.
    """
    problems = []
    for name, values in _given(argv):
        known = _known(name, options)
        if known is not None:
            option = options[known]
            values = values if option.is_list else values[:1]
            problems += [text for value in values for text in _check_value(f"--{name} {value}", value, option)]
        elif not (name.startswith("no") and _known(name[3:], options)) and not _abbreviates(name, options):
            hint = _suggest(name.replace("-", "_"), options, "--", cutoff)
            if hint or not passes_unknown:
                problems.append(f"Unknown option `--{name}`.{hint}")
    if problems:
        raise ValueError(" ".join(problems))


def check_yaml(path: str, options: Mapping[str, Option]) -> None:
    """
    The same for the keys and values of a YAML file.

    Raises:
        ValueError: naming all wrong keys and values, or where the file is not YAML or holds no mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; it must map options to values, such as `scheme: w4a16`."
        )
    problems = []
    for name, value in content.items():
        if name in options:
            problems += _check_value(f"{name}: {value}", str(value), options[name])
        else:
            problems.append(f"Unknown option `{name}`.{_suggest(str(name), options, '', 0.6)}")
    if problems:
        raise ValueError(f"{path}: {' '.join(problems)}")


def _given(argv: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Names of the options in `argv` without their dashes, with the words that follow each."""
    for index, word in enumerate(argv):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            for following in argv[index + 1 :] if not equals else ():
                if following.startswith("--"):
                    break
                values.append(following)
            yield name, values


def _known(name: str, options: Mapping[str, Option]) -> str | None:
    """The spelling of `name` in `options`, `None` if neither is one."""
    spellings = (name, name.replace("-", "_"), name.replace("_", "-"))
    return next((spelling for spelling in spellings if spelling in options), None)


def _abbreviates(name: str, options: Mapping[str, Option]) -> bool:
    """Whether argparse completes it, or says that it is ambiguous."""
    return any(option.startswith((name, name.replace("-", "_"))) for option in options)


def _check_value(given: str, value: str, option: Option) -> Iterator[str]:
    if option.choices is not None and value not in option.choices:
        hint = _suggest(value.lower(), option.choices, "", 0.6)
        yield f"`{given}` is none of {', '.join(option.choices)}.{hint}"


def _suggest(name: str, known: Iterable[Any], prefix: str, cutoff: float) -> str:
    matches = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean `{prefix}{matches[0]}`?" if matches else ""
