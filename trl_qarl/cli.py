"""
The `trl-qarl` command, in the manner of `trl`.

A command is a module of [`trl_qarl.scripts`] with `make_parser(prog)` and `main(args)`; it imports torch inside `main`
only, so that every `--help` answers at once. `train` differs: like `trl grpo` it goes through `accelerate launch`. TRL's
own registry and launcher look for scripts inside the `trl` package, hence the thin ones here.
"""

import ast
import importlib
import logging
import os
import select
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from . import __version__
from .scripts.errors import configuration_errors
from .scripts.options import PACKAGE, check, check_yaml, field_calls, options_of, options_of_train, spell


__all__ = ["main"]

COMMANDS = {
    "train": "Train a quantized policy; takes everything `trl grpo` takes, plus QaRLConfig's options",
    "vllm-serve": "Start a vLLM server that takes its weights from a trainer",
    "export": "Write the low-bit checkpoint of trained master weights",
    "eval": "Print how many problems with known answers a policy solves, as it is deployed",
    "quickstart": "Train a small pretrained model on arithmetic, without a hub or a GPU",
    "compare": "Train every cell of a grid of schemes, objectives and seeds, with a quantized learner or not",
    "report": "Write an HTML page that compares training runs",
    "bench": "Time the quantized model against bf16 on this machine",
    "doctor": "Check versions, hardware, a model's shapes and memory, and with --engine vLLM, before a training does",
    "env": "Print versions, hardware and the kernel of each scheme",
}

TRAIN_HELP = """\
usage: {usage}

{description}.

main options (TRL's):
  --model_name_or_path MODEL   hub id or local directory
  --dataset_name DATASET       hub id, builder name or local directory, as `datasets.load_dataset` takes it, or a file
                               (.parquet, .json, .jsonl, .csv)
  --reward_funcs FUNC [...]    accuracy_reward, reasoning_accuracy_reward, think_format_reward,
                               get_soft_overlong_punishment, or a dotted import path such as my_rewards.length
  --output_dir DIR             where checkpoints and the trained master weights go
  --export_dir DIR             where the low-bit policy goes after training, `none` for nowhere; by default
                               OUTPUT_DIR/SCHEME
  --config FILE                YAML with any of the options; the command line wins
  --resume_from_checkpoint C   a checkpoint directory, or `true` for the last one in the output directory

options of QaRLConfig:
{fields}

Options may be spelled with dashes too, as in --model-name-or-path.

`trl-qarl train --help-all` lists every option of TRL and transformers as well (loads torch). Options unknown to all of
them, and `--accelerate_config`, go to `accelerate launch`.
"""


def main(argv: list[str] | None = None) -> int:
    """
    Run the command line and return the exit code: 0, 2 for a configuration error, 3 where only a push to the Hub failed, or
    141 where the reader of the output has gone.

    Args:
        argv (`list[str]`, *optional*):
            Arguments without the program name, `sys.argv[1:]` by default.
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise
        # What is still buffered goes nowhere; else Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _has_lost_its_reader() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: list[str]) -> int:
    parser = ArgumentParser(prog="trl-qarl", description="Rollout-aligned quantization-aware RL on TRL.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, help_text in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, add_help=False)
    if not argv:
        parser.print_help()
        return 0
    if argv[0] not in COMMANDS and (matches := get_close_matches(argv[0], COMMANDS, n=1)):
        parser.error(f"argument command: invalid choice: {argv[0]!r}. Did you mean `{matches[0]}`?")
    # What follows the command's name is the command's own to parse.
    command, argv = parser.parse_args(argv[:1]).command, argv[1:]
    if command == "train":
        return _train(argv)
    module = importlib.import_module(f"trl_qarl.scripts.{command.replace('-', '_')}")
    parser = module.make_parser(f"trl-qarl {command}")
    options = options_of(parser, argv)
    argv = spell(argv, options)
    is_server = command == "vllm-serve"
    if options and not {"-h", "--help"} & {*argv}:
        with configuration_errors():
            # Options of vLLM, which takes what is left over, are not known here.
            check(argv, options, **({"cutoff": 0.8, "passes_unknown": True} if is_server else {}))
    if is_server:
        return module.main(*parser.parse_known_args(argv))
    return module.main(parser.parse_args(argv)) or 0


def build_launch_args(script_args: list[str], launch_args: list[str], num_cpus: int | None) -> list[str]:
    """
    Arguments of `accelerate launch` that run the training script.

    Args:
        script_args (`list[str]`):
            Arguments of the training script.
        launch_args (`list[str]`):
            Arguments of `accelerate launch`, in which TRL's `--accelerate_config` is allowed.
        num_cpus (`int` or `None`):
            Threads for a single process on a CPU, `None` when the machine has an accelerator.
    """
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    launch_args = resolve_accelerate_config_argument(launch_args)
    # Without any option accelerate sets OMP_NUM_THREADS=1, which leaves a CPU learner on one core.
    if num_cpus is not None and not launch_args:
        launch_args = ["--num_cpu_threads_per_process", str(num_cpus)]
    return [*launch_args, "--module", "trl_qarl.scripts.train", *script_args]


def _train(argv: list[str]) -> int:
    from .scripts.train import USAGE, make_parser

    if not argv or "-h" in argv or "--help" in argv:
        fields = "\n".join(_describe_config_fields())
        print(TRAIN_HELP.format(usage=USAGE, description=COMMANDS["train"], fields=fields))
        return 0 if argv else 2
    argv = _check_train(argv)

    import subprocess

    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from trl.cli.commands.training import _subtract_subsequence

    parser = make_parser("trl-qarl train")
    if {"--help-all", "--help_all"} & {*argv}:
        parser.print_help()
        return 0
    with configuration_errors(), _without_warnings():
        # What the command line leaves over is an ordered subsequence of it; what the YAML leaves over is not.
        *_, config_remaining, cli_remaining = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
        on_cpu = not torch.accelerator.is_available() and "OMP_NUM_THREADS" not in os.environ
        launch_args = build_launch_args(
            script_args=_subtract_subsequence(argv, cli_remaining),
            launch_args=config_remaining + cli_remaining,
            num_cpus=torch.get_num_threads() if on_cpu else None,
        )
    launch_parser = launch_command_parser()
    launch_parser.usage = USAGE
    try:
        launch_command(launch_parser.parse_args(launch_args))
    except subprocess.CalledProcessError as error:
        # The training process has said what went wrong.
        return error.returncode
    return 0


def _check_train(argv: list[str]) -> list[str]:
    """Arguments of `train` in their first spelling, after a look at names and values that needs no torch."""
    options = options_of_train()
    if options is None:
        return argv
    words = []
    for word in spell(argv, options):
        # TRL takes the file as a word of its own.
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    with configuration_errors():
        check(words, options)
        if "--config" in words[:-1]:
            check_yaml(words[words.index("--config") + 1], options)
    return words


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The launcher makes the configuration to check it; what it warns of, the training process says."""
    logger = logging.getLogger("trl_qarl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _describe_config_fields() -> Iterator[str]:
    """Help lines for the fields of [`QaRLConfig`], read from its source because importing it loads torch."""
    for name, arguments in field_calls(PACKAGE / "qarl_config.py", ("QaRLConfig",)):
        metadata = arguments["metadata"]
        assert isinstance(metadata, ast.Dict)
        # Only the help text is sure to be a literal.
        texts = (
            value
            for key, value in zip(metadata.keys, metadata.values, strict=True)
            if key and ast.unparse(key) == "'help'"
        )
        lines = textwrap.wrap(ast.literal_eval(next(texts)), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        yield "\n".join([f"  --{name} (default: {ast.unparse(arguments['default'])})", *lines])


if __name__ == "__main__":
    raise SystemExit(main())
