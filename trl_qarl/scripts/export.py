"""`trl-qarl export`: writes the low-bit checkpoint of trained master weights, which transformers and vLLM load."""

import json
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoint.record import DTYPES, read_record
from ..quantization.plan import QuantPlan, get_plan, plan_of
from ..quantization.precisions import plan_at_bits, problems_of_precisions
from ..telemetry.run_files import METRICS_FILE, read_rows
from .command_line import EXIT_PUSH_FAILED, add_plan_options, check_folder, configuration_errors, describe_export


def make_parser(prog: str | None = None) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description="Quantize master weights and write them as a compressed-tensors checkpoint; for an adapter, the low-bit "
        "base with the adapter next to it, or merged into it if it was trained merged.",
        epilog="Master weights saved by `trl-qarl train` include their training settings; only other weights need --scheme.",
    )
    add = parser.add_argument
    of_masters = "master weights: hub id or folder; or a folder with an adapter"
    add("--model_name_or_path", required=True, metavar="MODEL", help=of_masters)
    add("--output_dir", required=True, metavar="DIR", help="folder to write")
    add_plan_options(parser, default=None)
    of_engine = (
        "dtype of scales and unquantized tensors, in which an engine will run (default: that of training, or bfloat16)"
    )
    add("--dtype", choices=list(DTYPES), help=of_engine)
    fewer = "fewer bits than the scheme's, for 'w4a16' and 'w3a16'; the checkpoint stays INT4"
    add("--bits", type=int, metavar="N", help=fewer)
    for_llama = (
        "also write `model.gguf` for llama.cpp: a copy of this GGUF file of the base model, with the trained weights"
    )
    add("--gguf", metavar="FILE", help=for_llama)
    add("--push_to_hub", action="store_true", help="upload the checkpoint to the Hub afterwards")
    add("--hub_model_id", metavar="USER/NAME", help="repository to push to; created if missing")
    add("--hub_private_repo", action="store_true", help="create a private repository")
    add("--hub_revision", metavar="BRANCH", help="branch to push to")
    add("--model_revision", default="main", help="revision on the hub")
    add("--trust_remote_code", action="store_true", help="allow model code from the hub")
    return parser


def main(args: Namespace) -> int:
    """Write the checkpoint and return the exit code."""
    import torch
    from transformers import AutoProcessor

    from .. import hub
    from ..checkpoint.export import check_export_dir, export_checkpoint
    from ..checkpoint.gguf import GGUF_FILE, read_base
    from ..checkpoint.load import is_low_bit_checkpoint

    hub_kwargs = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code}
    with configuration_errors():
        check_folder(args.model_name_or_path)
        gguf = None if args.gguf is None else read_base(args.gguf)
        repo_id = _check_push(args)
        if is_low_bit_checkpoint(args.model_name_or_path, args.model_revision):
            raise ValueError(f"{args.model_name_or_path} is a low-bit checkpoint already. Name that of the masters.")
        check_export_dir(args.output_dir)
        processing_class = AutoProcessor.from_pretrained(args.model_name_or_path, **hub_kwargs)
        model, report, settings = _policy_of_masters(args, hub_kwargs)
        shown = ("loss_type", "quantize_learner", "group_size", "exclude_modules")
        known = {name: settings.get(name) for name in shown} | report.plan.summary
        known = {name: value for name, value in known.items() if value is not None}
        card = {"settings": known, "history": read_history(args.model_name_or_path), "report": str(report)}
        card |= {"name": repo_id, "source": args.model_name_or_path}
        dtype = getattr(torch, settings["scale_dtype"])
        folder = export_checkpoint(model, args.output_dir, processing_class, dtype, card=card, gguf=gguf)
    print(f"Low-bit checkpoint written to {describe_export(folder)}")
    if gguf is not None:
        print(f"For llama.cpp: llama-server -m {folder / GGUF_FILE}")
    if repo_id is not None:
        try:
            message = f"Low-bit checkpoint ({report.plan.name})"
            hub.upload(folder, repo_id, message, None, args.hub_private_repo or None, args.hub_revision)
        except hub.PushFailed as error:
            print(f"trl-qarl: error: {error}", file=sys.stderr)
            return EXIT_PUSH_FAILED
        print(f"Pushed to {repo_id}, with a card that shows how to serve it.")
    return 0


def _policy_of_masters(args: Namespace, hub_kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the quantized model, the report and the settings for the masters, or the adapter, that `args` names."""
    import torch
    from safetensors import SafetensorError
    from transformers.utils import cached_file
    from trl.trainer.utils import create_model_from_path

    from ..adapters.base import base_fingerprint, load_adapter, prepare_base
    from ..adapters.tensors import is_adapter_folder
    from ..checkpoint.load import holds_shards, load_shards
    from ..checkpoint.record import SCHEME_FILE, check_record
    from ..checkpoint.scales import SCALES_FILE, keep_scales
    from ..quantization.fixed_scales import fixed_scales
    from ..quantization.inventory import Inventory
    from ..quantization.swap import prepare_model, share_global_scales

    source = args.model_name_or_path
    options: dict[str, Any] = {"revision": args.model_revision, "_raise_exceptions_for_missing_entries": False}
    record_path = cached_file(source, SCHEME_FILE, **options)
    record = read_record(record_path) if record_path else None
    settings = merge_with_record(args, record, source)
    has_adapter = is_adapter_folder(source)
    is_merged = has_adapter and (record or {}).get("lora_mode") == "merged"
    kwargs = {"dtype": "auto", "trust_remote_code": args.trust_remote_code}
    try:
        if has_adapter:
            model = load_adapter(source, kwargs, is_trainable=False)
        elif holds_shards(source):
            model = load_shards(source, args.trust_remote_code)
        else:
            model = create_model_from_path(source, dtype="auto", **hub_kwargs)
    except SafetensorError as error:
        raise ValueError(f"A weight file of {source} is damaged or cut off ({error}). Copy it again.") from error
    plan = _plan_at(args.bits, plan_of(settings), has_adapter)
    scale_dtype = getattr(torch, settings["scale_dtype"])
    arguments = {"exclude_modules": settings["exclude_modules"], "scale_dtype": scale_dtype}
    if has_adapter:
        report = prepare_base(model, plan, keep_masters=False, is_merged=is_merged, **arguments)
        check_record(source, settings | {"base": base_fingerprint(model)})
    else:
        keep_scales(model, source, args.model_revision)
        if "base" in settings and not fixed_scales(model):
            where = "Copy it from the output directory of the training"
            raise ValueError(f"{source} was trained with scales of a checkpoint, but has no {SCALES_FILE}. {where}.")
        report = prepare_model(model, plan, **arguments)
        if scales := settings.get("global_scales"):
            share_global_scales(Inventory.of(model).layers, scales)
    print(report)
    return model, report, settings


def _plan_at(bits: int | None, plan: QuantPlan, has_adapter: bool) -> QuantPlan:
    if bits is None:
        return plan
    problems = [*problems_of_precisions([bits], plan, -1)]
    if has_adapter:
        problems.append("an adapter needs the codes with which it was trained")
    if problems:
        raise ValueError(f"--bits {bits}: {problems[0]}")
    return plan_at_bits(plan, bits)


def _check_push(args: Namespace) -> str | None:
    """Create the repository to push to before anything is exported; return its name with namespace, or `None`."""
    from .. import hub

    if not args.push_to_hub:
        for option in ("hub_model_id", "hub_private_repo", "hub_revision"):
            if getattr(args, option):
                raise ValueError(f"--{option} was given without --push_to_hub. Add that, or remove --{option}.")
        return None
    if args.hub_model_id is None:
        raise ValueError("--push_to_hub needs the repository: give --hub_model_id USER/NAME.")
    if problem := hub.problem_of_push(args.hub_model_id, None):
        raise ValueError(problem)
    return hub.create_repository(args.hub_model_id, None, args.hub_private_repo or None)


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Read the rows that a training logged, from its output directory or a checkpoint; empty if there are none."""
    state = Path(folder, "trainer_state.json")
    if Path(folder, METRICS_FILE).is_file():
        return [*read_rows(Path(folder))]
    with suppress(OSError, ValueError):
        return json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return []


def merge_with_record(args: Namespace, record: dict[str, Any] | None, source: str) -> dict[str, Any]:
    """
    Return the settings of the export, with the names of `qarl.json`: the `record` of the masters' training in that
    file, or else the command line. `source` names the weights in messages. `ValueError` is raised if an option
    contradicts the record, or if there is neither a record nor `--scheme`.
    """
    given = {name: getattr(args, name) for name in ("scheme", "group_size", "exclude_modules")}
    given["scale_dtype"] = args.dtype
    if record is None:
        if args.scheme is None:
            raise ValueError(f"{source} has no record of its training (no qarl.json). Give `--scheme`.")
        return {**given, "scale_dtype": args.dtype or "bfloat16"}
    if isinstance(args.scheme, dict) and get_plan(args.scheme, args.group_size) == get_plan(record["scheme"]):
        # Equal schemes, written differently.
        given |= {"scheme": None, "group_size": None}
    for name, value in given.items():
        # A record may have a single name or expression, which is a list with one element here.
        if value is not None and value not in (record.get(name), [record.get(name)]):
            option = "dtype" if name == "scale_dtype" else name
            raise ValueError(
                f"--{option}={value!r} contradicts the {record.get(name)!r} with which {source} was trained (qarl.json). "
                f"Leave `--{option}` out, or delete qarl.json to quantize the master weights differently."
            )
    return record
