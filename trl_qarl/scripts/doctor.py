"""`trl-qarl doctor`: checks this machine before training."""

from argparse import SUPPRESS, ArgumentParser, Namespace

from ..quantization.plan import plan_of
from .command_line import add_plan_options, check_folder, configuration_errors


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Print and check versions, hardware and kernels, and whether a model trains with vLLM.",
        epilog="Exit code: 0 without errors, 1 with an error, 2 for invalid options.",
    )
    named = parser.add_mutually_exclusive_group()
    text = "hub id or folder: says if and how it trains with vLLM; its configuration is read, not its weights"
    # The default is that of the option below.
    named.add_argument("model", nargs="?", default=SUPPRESS, metavar="MODEL", help=text)
    named.add_argument("--model", metavar="MODEL", help="the same")
    add_plan_options(parser, default=None)
    parser.add_argument("--trust_remote_code", action="store_true", help="allow model code from the hub")
    text = "start vLLM too, with a tiny random model: publish, audit, and sample (a minute or two)"
    parser.add_argument("--engine", action="store_true", help=text)
    return parser


def main(args: Namespace) -> int:
    """Print one line per diagnosis. Return 1 if there is an error, else 0."""
    from ..packages import problem_of_torchvision

    # Before anything imports transformers.
    if problem := problem_of_torchvision():
        print(f"error    {problem}")
        return 1
    with configuration_errors():
        if args.group_size is not None and args.scheme is None and args.model is None and not args.engine:
            raise ValueError("--group_size needs --model, --scheme or --engine.")
        if args.exclude_modules and args.model is None:
            raise ValueError("--exclude_modules needs --model.")
        from ..doctor.checks import diagnose
        from ..doctor.memory import shapes_of

        plan = plan_of(vars(args) | {"scheme": args.scheme or "w4a16"})
        chosen = plan.schemes if args.scheme else None
        model = None
        if args.model:
            check_folder(args.model)
            model = shapes_of(args.model, args.trust_remote_code, "--model")
    counts = {"ok": 0, "warning": 0, "error": 0}
    for diagnosis in diagnose(args, chosen, plan, model):
        print(diagnosis, flush=True)
        counts[diagnosis.level] += 1
    print(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    return int(counts["error"] > 0)
