"""
The `trl-qarl` command, in the manner of `trl`.

A command is a module of [`trl_qarl.scripts`] with `make_parser(prog)` and `main(args)`; it imports torch inside `main`
only, so that its `--help` answers at once. `train` differs: like `trl grpo` it goes through `accelerate launch`, and
its parser is made of TRL's dataclasses, which takes torch. TRL's own registry and launcher look for scripts inside the
`trl` package, hence the thin ones here.
"""

import importlib
import logging
import os
import select
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

from ._version import __version__
from .processes import become, exit_on_signals
from .scripts.errors import configuration_errors
from .scripts.option_names import check_names, option_names, spell


__all__ = ["build_launch_args", "main"]

COMMANDS = {
    "train": "Train a quantized policy; takes everything `trl grpo` takes, plus QaRLConfig's options",
    "vllm-serve": "Start a vLLM server that takes its weights from a trainer",
    "export": "Write the low-bit checkpoint of trained master weights",
    "eval": "Print how many problems with known answers a policy solves, as it is deployed",
    "quickstart": "Train a small pretrained model on arithmetic, without a hub or a GPU",
    "compare": "Train every cell of a grid of schemes, objectives and seeds, with a quantized learner or not",
    "report": "Write an HTML page that compares training runs",
    "doctor": "Check versions, hardware, a model's shapes and memory, and with --engine vLLM, before a training does",
    "estimate": "Add up what a training takes of each GPU's memory, and say which launch fits",
    "env": "Print versions, hardware and the kernel of each scheme",
}


def main(argv: list[str] | None = None) -> int:
    """
    Run the command line, `sys.argv[1:]` by default, and return the exit code: 0, 2 for a configuration error, 3 where
    only a push to the Hub failed, 141 where the reader of the output has gone, or 128 and the number of the signal
    that ended it.
    """
    restore_signals = exit_on_signals()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise
        # Discard buffered output; otherwise Python reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:
        # transformers fails with a broken torchvision at any of its imports, and says something else.
        from .packages import problem_of_torchvision

        if (problem := problem_of_torchvision()) is None:
            raise
        print(f"trl-qarl: error: {problem}", file=sys.stderr)
        return 1
    finally:
        restore_signals()


def _has_lost_its_reader() -> bool:
    """Return whether standard output is a pipe that nobody reads any more, as after `| head`."""
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
    # The command parses its own arguments.
    command, argv = parser.parse_args(argv[:1]).command, argv[1:]
    if command == "train":
        return _train(argv)
    module = importlib.import_module(f"trl_qarl.scripts.{command.replace('-', '_')}")
    parser = module.make_parser(f"trl-qarl {command}")
    known = option_names(parser)
    argv = spell(argv, known)
    if command == "vllm-serve":
        # Remaining arguments are vLLM's.
        return module.main(*parser.parse_known_args(argv))
    with configuration_errors():
        check_names(argv, known)
    return module.main(parser.parse_args(argv)) or 0


def build_launch_args(script_args: list[str], launch_args: list[str], num_cpus: int | None) -> list[str]:
    """Return the arguments of `accelerate launch` that run the training script with `script_args`. `launch_args` may
    hold TRL's `--accelerate_config`; `num_cpus` are threads for one process on a CPU, `None` with an accelerator."""
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    launch_args = resolve_accelerate_config_argument(launch_args)
    # Without any option accelerate sets OMP_NUM_THREADS=1, which leaves a CPU learner on one core.
    if num_cpus is not None and not launch_args:
        launch_args = ["--num_cpu_threads_per_process", str(num_cpus)]
    return [*launch_args, "--module", "trl_qarl.scripts.train", *script_args]


def _train(argv: list[str]) -> int:
    from .scripts.train import USAGE, arrange_help, make_parser
    from .scripts.train_inputs import check_inputs

    if not argv:
        print(f"usage: {USAGE}\nSee `trl-qarl train --help`.", file=sys.stderr)
        return 2

    if asked := {"-h", "--help", "--help_all", "--help-all"} & {*argv}:
        # Imported here because only a launch needs it, and the import is slow.
        parser = make_parser("trl-qarl train")
        arrange_help(parser, with_inherited=not asked <= {"-h", "--help"})
        parser.print_help()
        return 0

    # TRL takes the file as a word of its own.
    words = (word.split("=", 1) if word.startswith("--config=") else [word] for word in argv)
    argv = [part for word in words for part in word]

    import subprocess

    import torch
    import yaml
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from trl.cli.commands.training import _subtract_subsequence

    parser, launch_parser = make_parser("trl-qarl train"), launch.launch_command_parser()
    known = {*option_names(parser), *option_names(launch_parser), "--config", "--accelerate_config"}
    argv = spell(argv, known)
    with configuration_errors(), _without_warnings():
        check_names(argv, known)
        try:
            # What the command line leaves over is an ordered subsequence of it; what the YAML leaves over is not.
            *parsed, config_remaining, cli_remaining = parser.parse_args_and_config(
                argv, return_remaining_strings=True, separate_remaining_strings=True
            )
        except yaml.YAMLError as error:
            raise ValueError(error) from error
        check_names(config_remaining, known)
        check_inputs({name: value for options in parsed for name, value in vars(options).items()})
        on_cpu = not torch.accelerator.is_available() and "OMP_NUM_THREADS" not in os.environ
        launch_args = build_launch_args(
            script_args=_subtract_subsequence(argv, cli_remaining),
            launch_args=config_remaining + cli_remaining,
            num_cpus=torch.get_num_threads() if on_cpu else None,
        )
    launch_parser.usage = USAGE
    # accelerate's would wait for a child that no signal to this process reaches.
    launch.simple_launcher = _become_trainer
    try:
        launch.launch_command(launch_parser.parse_args(launch_args))
    except SignalException as error:
        # torch's launcher has sent it to all ranks and waited for them.
        return 128 + error.sigval
    except subprocess.CalledProcessError as error:
        # The training process has said what went wrong.
        return error.returncode
    return 0


def _become_trainer(args: Namespace) -> NoReturn:
    """Run the one process of a launch in place of the command that was given."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    become(*prepare_simple_launcher_cmd_env(args))


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


if __name__ == "__main__":
    raise SystemExit(main())
