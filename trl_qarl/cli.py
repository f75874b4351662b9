"""
The `trl-qarl` command, in the manner of `trl`, whose registry and launcher only find scripts inside TRL.

A command is a module of [`trl_qarl.scripts`] with `make_parser(prog)` and `main(args)`. Torch is imported only inside
`main`, so `--help` answers at once. `train` runs through `accelerate launch`, and its parser imports torch.
"""

import importlib
import logging
import os
import select
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ._version import __version__
from .packages import problem_of_torchvision
from .processes import become, exit_on_signals
from .scripts.command_line import check_names, configuration_errors, option_names, spell


COMMANDS = {
    "train": "Train a quantized policy; takes everything `trl grpo` takes, plus QaRLConfig's options",
    "vllm-serve": "Start a vLLM server that takes its weights from a trainer",
    "export": "Write the low-bit checkpoint of trained master weights",
    "quickstart": "Train a small pretrained model on arithmetic, without a hub or a GPU",
    "report": "Draw training runs on one HTML page",
    "doctor": "Print and check versions, hardware, kernels, a model, and with --engine vLLM",
    "estimate": "Estimate the memory of a training on each GPU, and name the launches that fit",
}


def main(argv: list[str] | None = None) -> int:
    """
    Run the command line, by default `sys.argv[1:]`, and return the exit code: 0, 2 for a configuration error, 3 if
    only a push to the Hub failed, 141 if the reader of the output has gone, or 128 plus the number of the signal that
    ended the command.
    """
    restore_signals = exit_on_signals()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Any pipe may have broken: check that it is standard output whose reader has gone, as after `| head`.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise
        # Discard buffered output; otherwise Python reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:
        # With a broken torchvision any import of transformers fails, and the message does not mention torchvision.
        if (problem := problem_of_torchvision()) is None:
            raise
        print(f"trl-qarl: error: {problem}", file=sys.stderr)
        return 1
    finally:
        restore_signals()


def _run(argv: list[str]) -> int:
    parser = ArgumentParser(prog="trl-qarl", description="Rollout-aligned quantization-aware RL on TRL.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, help_text in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, add_help=False)
    if not argv:
        parser.print_help()
        return 0
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
    contain TRL's `--accelerate_config`. `num_cpus` is the number of threads of a process on a CPU, else `None`."""
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    launch_args = resolve_accelerate_config_argument(launch_args)
    # Without options accelerate sets OMP_NUM_THREADS=1, and a learner on a CPU would use one core.
    if num_cpus is not None and not launch_args:
        launch_args = ["--num_cpu_threads_per_process", str(num_cpus)]
    return [*launch_args, "--module", "trl_qarl.scripts.train", *script_args]


def _train(argv: list[str]) -> int:
    from .scripts.train import USAGE, arrange_help, known_options, make_parser, read_options, run

    if not argv:
        print(f"usage: {USAGE}\nSee `trl-qarl train --help`.", file=sys.stderr)
        return 2

    if asked := {"-h", "--help", "--help_all", "--help-all"} & {*argv}:
        parser = make_parser("trl-qarl train")
        arrange_help(parser, with_inherited=not asked <= {"-h", "--help"})
        parser.print_help()
        return 0

    # TRL expects the file as a separate word.
    words = (word.split("=", 1) if word.startswith("--config=") else [word] for word in argv)
    argv = [part for word in words for part in word]

    # Only a launch needs these, and the imports are slow.
    import subprocess

    import torch
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.commands.training import _subtract_subsequence

    parser, launch_parser = make_parser("trl-qarl train"), launch.launch_command_parser()
    argv = spell(argv, known_options(parser, launch_parser))
    # Before a YAML file sets others, and after libraries have set theirs.
    environment = dict(os.environ)
    with configuration_errors(), _without_warnings():
        # The unparsed rest of the command line is an ordered subsequence of it; that of the YAML file is not.
        _, config_remaining, cli_remaining = read_options(argv, parser, launch_parser, launches=True)
        on_cpu = not torch.accelerator.is_available() and "OMP_NUM_THREADS" not in os.environ
        launch_args = build_launch_args(
            script_args=_subtract_subsequence(argv, cli_remaining),
            launch_args=config_remaining + cli_remaining,
            num_cpus=torch.get_num_threads() if on_cpu else None,
        )
    launch_parser.usage = USAGE
    args = launch_parser.parse_args(launch_args)
    # accelerate would wait for a child that gets no signal sent to this process.
    single: list[Namespace] = []
    launch.simple_launcher = single.append
    try:
        with configuration_errors():
            launch.launch_command(args)
            if single:
                argv = _become_training(single[0], environment)
    except SignalException as error:
        # torch's launcher has sent the signal to all ranks and waited for them.
        return 128 + error.sigval
    except ChildFailedError as error:
        # Of several processes, the first that failed; torch's launcher has ended the others.
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except subprocess.CalledProcessError as error:
        # The training process has reported the error.
        return error.returncode
    if single:
        run(argv)
    return 0


def _become_training(args: Namespace, earlier: Mapping[str, str]) -> list[str]:
    """Make this process the single one of `accelerate launch`, and return its options. If it needs other variables
    than those `earlier` ones with which libraries were imported here, it begins anew."""
    import torch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    if args.num_processes > args.num_machines and args.mpirun_hostfile is None:
        fix = "Add `--multi_gpu`, also for processes on a CPU"
        raise ValueError(
            f"num_processes={args.num_processes}, and accelerate would start one without several GPUs. {fix}."
        )
    argv, environment = prepare_simple_launcher_cmd_env(args)
    changed = {name for name, value in environment.items() if earlier.get(name) != value} - {"OMP_NUM_THREADS"}
    # Variables of accelerate are read later.
    if args.mpirun_hostfile is not None or not all(name.startswith("ACCELERATE_") for name in changed):
        become(argv, environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.environ.update(environment)
    return argv[3:]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings while the launcher builds the configuration to check it: the training process repeats them."""
    logger = logging.getLogger("trl_qarl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    raise SystemExit(main())
