"""
`trl-qarl train`: the counterpart of `trl/scripts/grpo.py` for [`QaRLTrainer`] and [`QaRLConfig`]. In addition it reads
data files, reports an invalid configuration in one line, and ends with an export.
"""

import importlib
import os
import re
import signal
import sys
import traceback
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from glob import escape
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..checks.names import RENAMED, is_no_folder, problems_of_names
from ..checks.problems import Problems, collect, quote_options, raise_problems
from ..processes import Signaled, end_with_parent, exit_on_signals
from .command_line import (
    EXIT_PUSH_FAILED,
    configuration_errors,
    describe_export,
    end_with,
    option_names,
    unknown_options,
)


if TYPE_CHECKING:
    from trl import TrlParser


USAGE = "trl-qarl train --model_name_or_path MODEL --dataset_name DATASET --reward_funcs FUNC [FUNC ...] [options]"
DESCRIPTION = "Train a quantized policy; takes everything `trl grpo` takes, plus QaRLConfig's options."
EPILOG = (
    "`--config FILE` names a YAML file with any of the options; the command line wins. Options may be spelled with dashes too, "
    "as in --model-name-or-path. `--help-all` lists every option of TRL and transformers as well. Options unknown to all of "
    "them, and `--accelerate_config`, go to `accelerate launch`."
)
REWARDS = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"]
# Endings of files that `--dataset_name` may name, and the builder of `datasets` that reads them.
DATA_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
# Options without effect unless another one is given.
_ONLY_WITH = {
    "use_peft": (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
        *("lora_modules_to_save", "use_rslora", "use_dora"),
    ),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
}
_PATHS = {
    *("model_name_or_path", "reward_model_name_or_path", "dataset_name", "export_dir", "resume_from_checkpoint"),
    "vllm_token_file",
}
# Shown by `--help` before the options of QaRLConfig.
MAIN_OPTIONS = (
    *("model_name_or_path", "dataset_name", "reward_funcs", "scheme", "use_vllm", "vllm_mode"),
    *("output_dir", "export_dir", "resume_from_checkpoint"),
)


def make_parser(prog: str | None = None) -> "TrlParser":
    """Return the parser of the options of `trl grpo`, with [`QaRLConfig`] for `GRPOConfig`, and of `--export_dir`."""
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    from ..trainer.qarl_config import QaRLConfig

    text = "Folder of the low-bit policy after training, `none` for nowhere; by default in `output_dir`, named after the scheme."

    @dataclass
    class ScriptArguments(GRPOScriptArguments):
        export_dir: str | None = field(default=None, metadata={"help": text})

    @dataclass
    class ModelArguments(ModelConfig):
        # TRL's default is 0.05, with which rollout, scoring and loss would see different policies.
        lora_dropout: float = field(default=0.0, metadata={"help": "LoRA dropout."})

    types = (ScriptArguments, QaRLConfig, ModelArguments, DatasetMixtureConfig)
    # A usage line of 300 options would bury the error below it.
    return TrlParser(types, prog=prog, usage=USAGE, description=DESCRIPTION, epilog=EPILOG)


def known_options(*parsers: ArgumentParser) -> set[str]:
    """Return the long options of the `parsers` of `trl-qarl train` and of `accelerate launch`, with their dashes."""
    return {"--config", "--accelerate_config"}.union(*map(option_names, parsers))


def arrange_help(parser: "TrlParser", with_inherited: bool) -> None:
    """Sort the help of `parser`: first `MAIN_OPTIONS`, then QaRLConfig's options, then, `with_inherited`, the rest."""
    from trl import GRPOConfig

    from ..options import own_options
    from ..trainer.qarl_config import QaRLConfig

    own = own_options(QaRLConfig, GRPOConfig)
    order = ["help", *MAIN_OPTIONS, *(name for name in own if name not in MAIN_OPTIONS)]
    for action in parser._actions:
        if action.dest not in order and not with_inherited:
            action.help = SUPPRESS
        # The text of the help describes the default.
        if action.default is None:
            action.default = SUPPRESS
        # The spelling with dashes is accepted but not shown.
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
    parser._optionals._group_actions.sort(
        key=lambda action: order.index(action.dest) if action.dest in order else len(order)
    )


def read_options(
    argv: list[str], parser: "TrlParser", launch_parser: ArgumentParser, launches: bool = False
) -> tuple[list[Any], list[str], list[str]]:
    """
    Return the options of `argv`, and of the YAML file that it names, as instances of the parser's dataclasses; then
    those of `accelerate launch` in the file, and those in `argv`, which are read if this process `launches` the
    training. `ValueError` is raised with everything that is wrong: unknown names, values, options that are not
    honoured, and inputs that do not exist.
    """
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from ..checks.content import problems_of_content
    from ..checks.launch import as_launched

    known = known_options(parser, launch_parser)
    words, of_file = _read_file(argv)
    unknown: dict[str, Any] = {name.replace("-", "_"): value for name, value in unknown_options(words, known).items()}
    problems = []
    if "config" in of_file:
        # The launcher would take it for its own file.
        problems.append(f"config={of_file.pop('config')!r}: one YAML file does not read another. Copy its options.")
    if not isinstance(datasets := of_file.get("datasets") or [], list):
        problems.append(
            f"datasets={datasets!r} is of type {type(datasets).__name__}, and must be a list, each entry with a `path`. For one dataset give "
            "`dataset_name`."
        )
        # One is not missing.
        of_file["datasets"] = [{"path": str(datasets)}]
    unknown |= {name: value for name, value in of_file.items() if f"--{name}" not in known}
    problems += problems_of_names(unknown, {name[2:].replace("-", "_") for name in known})
    for name in RENAMED.keys() & unknown.keys():
        # The value is checked like one under the new name.
        of_file.setdefault(RENAMED[name], unknown[name])
    usual = {action.dest: action.default for action in parser._actions}
    config_remaining = parser.set_defaults_with_config(**of_file)
    namespace, cli_remaining = _parse(parser, words, usual, of_file, problems)
    for before, word in zip(["", *cli_remaining], cli_remaining, strict=False):
        # accelerate would take it for the program to start.
        if not (word.startswith("-") or before.startswith("-")):
            fix = f"Write `--config {word}`" if word.endswith((".yaml", ".yml")) else "Remove it"
            problems.append(f"{word!r} is no option, nor the value of one. {fix}.")
    parsed, launch = [], nullcontext()
    if launches:
        try:
            launch_words = resolve_accelerate_config_argument([*config_remaining, *cli_remaining])
            launch = as_launched(_parse(launch_parser, [*launch_words, "--module", "train"], {}, {}, problems)[0])
        except (ValueError, OSError) as error:
            problems.append(str(error))
    with launch:
        for cls in parser.dataclass_types:
            parsed.append(made := cls.__new__(cls))
            try:
                made.__init__(**{each.name: getattr(namespace, each.name) for each in fields(cls) if each.init})
            except Problems as error:
                problems += error.problems
            except (ValueError, TypeError) as error:
                # TRL makes one of each of the `datasets` of a YAML file.
                problems.append(str(error).replace("DatasetConfig.__init__()", "`datasets`"))
            for name in _PATHS & vars(made).keys():
                # As transformers does for `output_dir`: a YAML file has no shell, and takes a number for one.
                value = getattr(made, name)
                if isinstance(value, list | dict) or (isinstance(value, bool) and name != "resume_from_checkpoint"):
                    problems.append(f"--{name}={value!r} is of type {type(value).__name__}, and must be one text.")
                    setattr(made, name, None)
                elif value is not None:
                    setattr(made, name, os.path.expanduser(str(value)))
    script_args, config, model_args, mixture = parsed
    of_inputs = [*_problems_of_inputs(script_args, model_args, mixture)]
    problems += of_inputs
    problems += _problems_of_loading(config, model_args)
    given = {word.partition("=")[0].replace("-", "_")[2:] for word in words if word.startswith("--")} | of_file.keys()
    problems += _problems_of_effect(model_args, usual, given)
    if problems:
        # The training process would find these, of rewards and local files, after the others are mended.
        rewards, train, evaluation, others = _read_inputs(script_args, config, mixture, only_local=True)
        others += problems_of_content(config, model_args.model_name_or_path, train, evaluation, rewards)
        raise_problems([*problems, *(problem for problem in others if problem not in of_inputs)])
    return parsed, config_remaining, cli_remaining


def _read_file(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return `argv` without the name of the YAML file, and the file's options. Sets the file's `env`, as TRL does."""
    import yaml

    if "--config" not in argv:
        return argv, {}
    place = argv.index("--config")
    if place + 1 == len(argv):
        raise ValueError("--config names no file.")
    if argv.count("--config") > 1:
        raise ValueError("--config was given twice. Give one file, and what differs as options.")
    path = argv[place + 1]
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
            file.seek(0)
            node = yaml.compose(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config={path!r} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config={path!r} must contain a YAML mapping.")
    if twice := sorted({*_repeated(node, lambda name: name.replace("-", "_"))}):
        # YAML takes the last one.
        raise ValueError(f"--config={path!r} has {twice} more than once. Keep one of each.")
    environment = content.pop("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"`env` in --config={path!r} must be a mapping.")
    os.environ.update({name: str(value) for name, value in environment.items()})
    return argv[:place] + argv[place + 2 :], {str(name).replace("-", "_"): value for name, value in content.items()}


def _repeated(node: Any, spell: Callable[[str], str] = str) -> Iterator[str]:
    """Yield the names that a mapping of a YAML file, or one inside it, has more than once. `spell` is for its own."""
    pairs = node.value if node.id == "mapping" else []
    names = [spell(key.value) for key, _ in pairs]
    yield from (name for name in names if names.count(name) > 1)
    for each in node.value if node.id == "sequence" else [value for _, value in pairs]:
        yield from _repeated(each)


def _parse(
    parser: ArgumentParser, words: list[str], usual: Mapping[str, Any], of_file: Mapping[str, Any], problems: list[str]
) -> tuple[Namespace, list[str]]:
    """Parse `words`; an option that argparse refuses, also `of_file`, adds a problem and gets its `usual` value."""

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    parser.error = refuse
    try:
        while True:
            try:
                return parser.parse_known_args(words)
            except _Refused as error:
                match = re.match(r"argument (--\w+)\S*: (.*)", str(error), re.DOTALL)
                if match is None:
                    raise_problems([*problems, f"{error}."])
                name, text = match.groups()
                problems.append(f"{name}: {text.rstrip('.')}.")
                kept = _without(words, name)
                if kept == words:
                    # The value is the YAML file's.
                    if name[2:] not in of_file:
                        raise_problems(problems)
                    parser.set_defaults(**{name[2:]: usual[name[2:]]})
                    of_file = {other: value for other, value in of_file.items() if other != name[2:]}
                words = kept
    finally:
        del parser.error


class _Refused(Exception):
    pass


def _without(words: list[str], name: str) -> list[str]:
    """Return `words` without an option, in any spelling, and its values."""
    kept, skips = [], False
    for word in words:
        if word.startswith("--"):
            skips = name.startswith(word.partition("=")[0].replace("-", "_").replace("__", "--", 1))
        if not skips:
            kept.append(word)
    return kept


def _problems_of_effect(model_args: Any, usual: Mapping[str, Any], given: Set[str]) -> Iterator[str]:
    """Yield a problem of options without effect, as theirs is missing. A recipe may say `use_peft: false`."""
    for name, others in _ONLY_WITH.items():
        values = {other: getattr(model_args, other) for other in others}
        unused = [other for other, value in values.items() if value != usual[other] or (value and other in given)]
        if unused and not getattr(model_args, name) and not {name, f"no_{name}"} & given:
            yield f"{quote_options(model_args, *unused)} has no effect without `--{name}`. Add it, or write `--{name} false`."


def _problems_of_loading(config: Any, model_args: Any) -> Iterator[str]:
    """Yield problems of the model's dtype and attention that loading would meet later."""
    from transformers.utils import is_flash_attn_2_available, is_kernels_available

    from ..checks.configuration import low_precision_masters

    if not model_args.use_peft:
        yield from low_precision_masters(config, model_args.dtype)
    attention = model_args.attn_implementation or ""
    if attention.startswith("flash_attention"):
        if config.use_cpu:
            yield f"attn_implementation={attention!r} runs on GPUs only, and use_cpu=True. Remove it."
        elif not (is_flash_attn_2_available() or is_kernels_available()):
            yield f"attn_implementation={attention!r} needs the package `flash-attn` or `kernels`. Install one, or remove it."


def _problems_of_inputs(script_args: Any, model_args: Any, mixture: Any) -> Iterator[str]:
    """Yield a problem of a model, a reward or a dataset that is missing or does not exist here; none is read."""
    if not (model := model_args.model_name_or_path):
        yield "No model: give `--model_name_or_path`."
    elif is_no_folder(model):
        yield f"--model_name_or_path={model!r} is not a folder."
    yield from _problems_of_rewards(script_args.reward_funcs or [], script_args.reward_model_name_or_path)
    yield from _problems_of_dataset(script_args, mixture)


def _problems_of_rewards(names: list[str] | str, reward_model: str | None) -> Iterator[str]:
    if not names and not reward_model:
        yield "No reward: give `--reward_funcs` or `--reward_model_name_or_path`."
    for name in _as_list(names):
        if {*":/"} & {*name} or name.endswith(".py"):
            module, _, function = name.strip("./").replace("/", ".").partition(":")
            path = f"{module.removesuffix('.py')}.{function or 'FUNCTION'}"
            yield f"The reward function {name!r} is no dotted import path. Write it as `{path}`."
            continue
        module_path = name.rpartition(".")[0]
        if name not in REWARDS and not module_path:
            yield f"Unknown reward function {name!r}. Choose one of {REWARDS}, or give a path such as `my_rewards.{name}`."
        package = module_path.partition(".")[0]
        # A YAML file may set PYTHONPATH for the training process.
        folders = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        if package and not (find_spec(package) or PathFinder.find_spec(package, folders)):
            yield f"Could not import reward function {name!r}: No module named {package!r}."


def _as_list(names: list[str] | str) -> list[str]:
    # A YAML file may name one reward without a list, and TRL's parser does not convert it.
    return [names] if isinstance(names, str) else [*map(str, names)]


def _problems_of_dataset(script_args: Any, mixture: Any) -> Iterator[str]:
    name, config = script_args.dataset_name, script_args.dataset_config
    if mixture.datasets and name:
        yield "Both `datasets` and `dataset_name` are given. Remove one of them."
    if mixture.datasets:
        return
    if not name:
        yield "No dataset: give `--dataset_name`, or `datasets` in the YAML file."
        return
    path = Path(name)
    if path.is_dir():
        return
    if path.suffix in DATA_FILES:
        if not path.is_file():
            yield f"--dataset_name={name!r}: there is no such file."
        elif not path.stat().st_size:
            yield f"--dataset_name={name!r} is empty. Give a file with a row for each prompt."
        if config is not None:
            yield f"--dataset_config={config!r}: a file has no configurations. Remove it."
    elif path.is_file():
        yield f"--dataset_name={name!r} is a file that ends in none of {[*DATA_FILES]}."
    elif path.is_absolute() or name.startswith(("./", "../")):
        yield f"--dataset_name={name!r}: there is no such file or folder."


def get_reward_funcs(names: list[str] | str, reward_model_name_or_path: str | None = None) -> list[str | Callable]:
    """
    Return reward functions by name, as in `trl grpo`: TRL's names, or dotted import paths, for which the working
    directory comes first. A reward model, which the trainer loads, comes before them. `ValueError` is raised for
    other names, for failed imports, and without any reward.
    """
    raise_problems(_problems_of_rewards(names, reward_model_name_or_path))
    sys.path.insert(0, os.getcwd())
    reward_funcs: list[str | Callable] = [reward_model_name_or_path] if reward_model_name_or_path else []
    for name in _as_list(names):
        module, _, attribute = (f"trl.rewards.{name}" if name in REWARDS else name).rpartition(".")
        try:
            reward = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            # Of a module that is there, or of its own code.
            kind = "" if isinstance(error, ModuleNotFoundError | AttributeError) else f"{type(error).__name__}: "
            raise ValueError(f"Could not import reward function {name!r}: {kind}{error}.") from error
        if name == "get_soft_overlong_punishment":
            # The lengths are those of `trl grpo`.
            reward = reward(max_completion_len=1280, soft_punish_cache=256)
        reward_funcs.append(reward)
    return reward_funcs


def get_export_dir(export_dir: str | None, output_dir: str, scheme: str) -> Path | None:
    """Return the folder for the low-bit policy after training, by default `output_dir/scheme`; `None` for `"none"`.
    `ValueError` is raised for a folder that holds, or will hold, other weights."""
    from ..checkpoint.export import check_export_dir

    if export_dir is not None and export_dir.lower() == "none":
        return None
    folder = Path(export_dir or Path(output_dir, scheme))
    if folder.resolve() == Path(output_dir).resolve():
        raise ValueError(f"--export_dir={export_dir!r} is where the masters go (`--output_dir`). Name another folder.")
    check_export_dir(folder)
    return folder


def main(script_args, training_args, model_args, dataset_args) -> None:
    """Train, save the master weights or the adapter, and export the low-bit policy."""
    from trl import get_peft_config, get_quantization_config

    from ..checkpoint.files import OUTPUT_LOCK, check_free
    from ..checks.arguments import problems_of_arguments
    from ..checks.content import has_pictures
    from ..checks.resume import resume_option
    from ..trainer.policy import Policy
    from ..trainer.qarl_trainer import QaRLTrainer

    with configuration_errors():
        reward_funcs, train, evaluation, problems = _read_inputs(script_args, training_args, dataset_args)
        export_dir = None
        with collect(problems):
            if training_args.should_save:
                check_free(Path(training_args.output_dir, OUTPUT_LOCK))
        with collect(problems):
            export_dir = get_export_dir(script_args.export_dir, training_args.output_dir, training_args.plan.name)
            if export_dir is None and training_args.push_to_hub:
                problems.append(
                    "--export_dir=none with --push_to_hub: the push uploads the export. Leave out one of them."
                )
        training_args.model_init_kwargs = {
            "revision": model_args.model_revision,
            "trust_remote_code": training_args.trust_remote_code,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            **(training_args.model_init_kwargs or {}),
        }
        given = {
            "model": model_args.model_name_or_path,
            "reward_funcs": reward_funcs,
            "args": training_args,
            "train_dataset": train,
            "eval_dataset": evaluation,
            "quantization_config": get_quantization_config(model_args),
            "peft_config": get_peft_config(model_args),
        }
        if problems:
            policy = Policy(training_args, given["peft_config"], has_pictures(train, evaluation))
            raise_problems([*problems, *problems_of_arguments(policy, **given)])
        trainer = QaRLTrainer(**given)
        trainer.export_dir = export_dir or trainer.export_dir
        checkpoint = trainer.find_checkpoint(resume_option(training_args.resume_from_checkpoint))

    trainer.accelerator.print(f"\n{trainer.swap_report}\n")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.accelerator.print("Training completed.")

    _write_policy(trainer, export_dir, script_args.dataset_name)

    # Left open, the process group may end Python by a signal. That of a single process is vLLM's.
    if trainer.accelerator.num_processes > 1:
        trainer.accelerator.end_training()


def _write_policy(trainer: Any, export_dir: Path | None, dataset_name: str | None) -> None:
    """Save the masters or the adapter, export the policy and push it; exit only afterwards if the push failed."""
    from ..hub import PushFailed
    from ..quantization.inventory import Inventory
    from ..quantization.names import is_peft_model

    args = trainer.args
    failure = None
    if args.push_to_hub:
        # The push saves and exports first.
        try:
            trainer.push_to_hub(dataset_name=dataset_name)
        except PushFailed as error:
            failure = error
    else:
        trainer.save_model(args.output_dir)
    saved = "Adapter" if is_peft_model(trainer.model) else "Master weights"
    trainer.accelerator.print(f"{saved} saved to {args.output_dir}.")
    if args.is_quantized and Inventory.of(trainer.model).stacked_experts:
        trainer.accelerator.print("Nothing exported: with experts in high precision there is no low-bit checkpoint.")
    elif export_dir is not None:
        if not args.push_to_hub:
            # The first process writes; all of them gather sharded masters.
            trainer.export_model(dataset_name=dataset_name)
        if failure is None and trainer.is_world_process_zero():
            print(f"Policy ({args.plan.name}) exported to {describe_export(export_dir)}")
    if failure is not None:
        print(f"trl-qarl: error: Training is complete, but not its push.\n{failure}", file=sys.stderr)
        raise SystemExit(EXIT_PUSH_FAILED) from failure
    if args.push_to_hub:
        trainer.accelerator.print(f"Pushed to {trainer.hub_model_id}.")


def how_to_resume(output_dir: str) -> str:
    """Return what an interrupted run has left in `output_dir`, and how to go on from it."""
    from ..checkpoint.record import last_complete_checkpoint

    if (folder := last_complete_checkpoint(output_dir)) is None:
        return f"{output_dir} has no complete checkpoint: the next start begins anew."
    return f"{folder} is complete: go on from it with `--resume_from_checkpoint true`."


def _read_inputs(
    script_args: Any, config: Any, mixture: Any, only_local: bool = False
) -> tuple[list[Any], Any, Any, list[str]]:
    """Import the rewards and load the datasets, none of the Hub if `only_local`; return them, and problems."""
    from datasets.exceptions import DatasetsError

    from ..checks.content import evaluates

    reward_funcs, dataset, splits = [], None, [None, None]
    problems, of_dataset = [], [*_problems_of_dataset(script_args, mixture)]
    with collect(problems):
        reward_funcs = get_reward_funcs(script_args.reward_funcs or [], script_args.reward_model_name_or_path)
    problems += of_dataset
    name = script_args.dataset_name
    is_here = bool(name) and Path(name).exists()
    if not of_dataset and (is_here or not only_local):
        try:
            dataset = _load_dataset(script_args, mixture)
        except (ValueError, OSError, RuntimeError, DatasetsError) as error:
            # `datasets` has the reason as the cause of its own error.
            said = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            problems.append(f"--dataset_name={name!r} cannot be read: {said}" if is_here else said)
    for place, option in enumerate(("dataset_train_split", "dataset_test_split")):
        if dataset is not None and (place == 0 or evaluates(config)):
            if (split := getattr(script_args, option)) in dataset:
                splits[place] = dataset[split]
            else:
                problems.append(f"The dataset has no split {split!r}, only {list(dataset)}. Set `--{option}`.")
    return reward_funcs, *splits, problems


def _load_dataset(script_args, dataset_args):
    from datasets import load_dataset, load_from_disk
    from trl import get_dataset

    if dataset_args.datasets:
        return get_dataset(dataset_args)
    path, is_streamed = Path(script_args.dataset_name), script_args.dataset_streaming
    # Files of `DatasetDict.save_to_disk` and of `Dataset.save_to_disk`.
    if (path / "dataset_dict.json").is_file():
        return load_from_disk(path)
    if (path / "state.json").is_file():
        return {"train": load_from_disk(path)}
    if path.suffix in DATA_FILES and not path.is_dir():
        return load_dataset(DATA_FILES[path.suffix], data_files=escape(str(path)), streaming=is_streamed)
    # A folder's name may be that of a builder, such as `json`.
    name = str(path.absolute()) if path.is_dir() else script_args.dataset_name
    return load_dataset(name, name=script_args.dataset_config, streaming=is_streamed)


def run(argv: list[str]) -> None:
    """Train in a launched process. Exit codes are 2 for a wrong option, and 128 plus the number of a signal."""
    with configuration_errors():
        from accelerate.commands.launch import launch_command_parser

        parsed, _, unused = read_options(argv, make_parser(), launch_command_parser())
        if unused:
            raise ValueError(f"{' '.join(unused)} is for `accelerate launch`. Give it before `--module`.")
    from ..rollout.failures import EngineLost

    try:
        main(*parsed)
    except EngineLost as error:
        if error.__cause__ is not None:
            traceback.print_exc()
        end_with(f"{error}\n{how_to_resume(parsed[1].output_dir)}", 1)
    except (KeyboardInterrupt, Signaled) as error:
        if isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":
            print(f"trl-qarl: interrupted. {how_to_resume(parsed[1].output_dir)}", file=sys.stderr)
        # Set the exit code here: Python's own is lost if a library, such as torch, runs code at exit.
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code)


if __name__ == "__main__":
    exit_on_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # SIGKILL, because a rank may be waiting for another one that has ended.
        end_with_parent(signal.SIGKILL)
    run(sys.argv[1:])
