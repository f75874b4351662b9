"""
Checks that vLLM has what our GPU path calls, as it calls it: `python contract.py [X.Y]`.

The Python half (signatures, fields, options) needs no CUDA and is a part of the ordinary tests. The rest is asked of a
CUDA build, on `fake_gpu.py`'s platform: schemas of operators in its extensions, and whether the plugin registers
without waking a device. What is imported by name is compared elsewhere (`tests/seams/test_vllm.py`).
"""

import ast
import inspect
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


_INVARIANT = "vllm.model_executor.determinism.batch_invariant"
_OPS = "vllm._custom_ops"
_FLASH = "vllm.v1.attention.backends.fa_utils"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_LLM = "vllm.entrypoints.llm:LLM"

# (what is called, positional arguments with `self`, keywords), from `trl_qarl`.
_CALLS = (
    (f"{_INVARIANT}:linear_batch_invariant", 3, ""),  # bitwise/cuda.py, PackedLinear
    (f"{_INVARIANT}:matmul_batch_invariant", 2, ""),  # low_bit_linear
    (f"{_INVARIANT}:rms_norm_batch_invariant", 3, ""),  # rms_norm
    (f"{_INVARIANT}:log_softmax", 2, ""),  # log_softmax
    (f"{_OPS}:rotary_embedding", 6, ""),  # bitwise/cpu.py, rotate
    (f"{_OPS}:fused_add_rms_norm", 4, ""),  # rms_norm of the stream
    (f"{_FLASH}:get_flash_attn_version", 0, "head_size"),  # attention
    ("vllm.envs:disable_envs_cache", 0, ""),  # prepare_process
    (f"{_WORKER}.start_weight_update", 1, ""),  # engines/in_process.py
    (f"{_WORKER}.finish_weight_update", 1, ""),
    (f"{_WORKER}.update_weights", 2, ""),
    (f"{_WORKER}.init_weight_transfer_engine", 2, ""),
    (f"{_LLM}.sleep", 1, "level"),  # rollout/generation.py
    (f"{_LLM}.wake_up", 1, "tags"),
    (f"{_LLM}.update_weight_version", 2, ""),
    (f"{_LLM}.get_weight_version", 1, ""),
    (f"{_LLM}.reset_prefix_cache", 1, ""),
    ("vllm.model_executor.model_loader.reload:initialize_layerwise_reload", 1, ""),  # vllm_plugin/weight_transfer.py
    ("vllm.model_executor.model_loader.reload:finalize_layerwise_reload", 2, ""),
    ("vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine.receive_weights", 2, ""),
)

_FLASH_ARGUMENTS = """q k v cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table fa_version
    num_splits"""

_ENGINE_ARGUMENTS = """model dtype load_format hf_overrides kernel_config attention_backend block_size enforce_eager logprobs_mode
    max_logprobs weight_transfer_config worker_extension_cls enable_sleep_mode model_impl max_num_batched_tokens max_num_seqs
    trust_remote_code distributed_executor_backend tensor_parallel_size gpu_memory_utilization max_model_len seed enable_lora max_loras
    max_lora_rank lora_target_modules skip_tokenizer_init limit_mm_per_prompt mm_device_do_normalize"""

_FLAGS = """--model --dtype --load-format --hf-overrides --kernel-config --attention-backend --block-size --enforce-eager --logprobs-mode
    --max-logprobs --weight-transfer-config --worker-extension-cls --enable-lora --max-loras --max-lora-rank --lora-target-modules
    --gpu-memory-utilization --tensor-parallel-size --model-impl --max-model-len --trust-remote-code --limit-mm-per-prompt
    --no-mm-device-do-normalize"""

# (operator, types of its arguments in their order); what follows has defaults.
_SCHEMAS = (
    ("_C.rotary_embedding", "Tensor Tensor Tensor? int Tensor bool"),
    ("_C.fused_add_rms_norm", "Tensor Tensor Tensor? float"),
    ("_C.silu_and_mul", "Tensor Tensor"),
)


def _resolve(path: str):
    module, _, names = path.partition(":")
    value = import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


def _call(path: str, num_positional: int, keywords: str) -> Callable[[], None]:
    def check():
        inspect.signature(_resolve(path)).bind(*range(num_positional), **dict.fromkeys(keywords.split()))

    return check


def _missing(wanted: str, found) -> None:
    missing = [name for name in wanted.split() if name not in found]
    assert not missing, f"not there: {missing}"


def _source(*parts: str) -> str:
    return Path(find_spec("vllm").origin).parent.joinpath(*parts).read_text()


def _flash_attention() -> None:
    # Its module imports CUDA extensions.
    tree = ast.parse(_source("vllm_flash_attn", "flash_attn_interface.py"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "flash_attn_varlen_func")
    _missing(_FLASH_ARGUMENTS, [a.arg for a in (*function.args.args, *function.args.kwonlyargs)])


def _engine_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    _missing(_ENGINE_ARGUMENTS, {field.name for field in fields(EngineArgs)})


def _flags() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _missing(_FLAGS, EngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions)


def _kernel_config() -> None:
    from vllm.config import KernelConfig

    from trl_qarl.engines.gpu_kernels import RELEASES, Gpu, choose_kernels
    from trl_qarl.quantization.schemes import SCHEMES

    asked = [choose_kernels(scheme, Gpu((9, 0), vllm=RELEASES[-1])) for scheme in SCHEMES.values()]
    for choice in asked:
        if choice.backends:
            assert KernelConfig(linear_backend_per_quant=choice.backends).linear_backend_per_quant == choice.backends
        if choice.experts_backend:
            assert KernelConfig(moe_backend=choice.experts_backend).moe_backend == choice.experts_backend


def _batch_invariant_layers() -> None:
    """The layers of an engine call what the learner calls: bitwise/compare.py compares their numbers on a GPU."""
    linear = _source("model_executor", "layers", "linear.py")
    assert "return linear_batch_invariant(x, layer.weight, bias)" in linear
    norm = _source("model_executor", "layers", "layernorm.py")
    assert "rms_norm_batch_invariant(" in norm and "residual=residual" in norm
    assert "ops.fused_add_rms_norm(input, residual, weight, eps)" in _source(
        "model_executor", "determinism", "batch_invariant.py"
    )


def _tables_of_tiles() -> None:
    tables = import_module(f"{_INVARIANT}_configs")
    _missing("_TUNED_MATMUL_CONFIGS_FOR_DEVICE _TUNED_MATMUL_CONFIGS_RESOLVED _get_matmul_config", vars(tables))


def _server() -> None:
    """`python -m`, as `build_server_command` starts it."""
    assert '__name__ == "__main__"' in _source("entrypoints", "openai", "api_server.py")


def _variables() -> None:
    from vllm import envs

    _missing("VLLM_BATCH_INVARIANT VLLM_USE_V2_MODEL_RUNNER", envs.environment_variables)


PYTHON_CHECKS: dict[str, Callable[[], None]] = {
    **{path.partition(":")[2]: _call(path, *arguments) for path, *arguments in _CALLS},
    "flash_attn_varlen_func": _flash_attention,
    "fields of EngineArgs": _engine_arguments,
    "options of the command line": _flags,
    "values of KernelConfig": _kernel_config,
    "layers in batch-invariant mode": _batch_invariant_layers,
    "tables of tiles": _tables_of_tiles,
    "server": _server,
    "variables": _variables,
}


def failures(checks: dict[str, Callable[[], None]]) -> Iterator[str]:
    """Yield what each failing check says."""
    for name, check in checks.items():
        try:
            check()
        # A release may have moved, renamed or removed anything.
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {error}"


def _schema(name: str, types: str) -> Callable[[], None]:
    def check():
        import torch

        namespace, _, operator = name.partition(".")
        arguments = getattr(getattr(torch.ops, namespace), operator).default._schema.arguments
        found = [str(argument.type).replace("Optional[Tensor]", "Tensor?") for argument in arguments]
        wanted = types.split()
        # What may be absent may also be required: we give it.
        ok = len(found) >= len(wanted) and all(
            f.rstrip("?") == w.rstrip("?") for f, w in zip(found, wanted, strict=False)
        )
        assert ok and all(argument.has_default_value() for argument in arguments[len(wanted) :]), found

    return check


def _attention_operators() -> None:
    import torch
    import vllm.vllm_flash_attn  # noqa: F401

    assert torch.ops._vllm_fa2_C.varlen_fwd.default and torch.ops._vllm_fa3_C.fwd.default


def _plugin() -> None:
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS, _POSSIBLE_INT8_KERNELS, _POSSIBLE_KERNELS
    from vllm.platforms.interface import PlatformEnum

    from trl_qarl.vllm_plugin import register

    register()
    first = [table[PlatformEnum.CUDA][0].__name__ for table in (_POSSIBLE_KERNELS, _POSSIBLE_INT8_KERNELS, _POSSIBLE_FP8_KERNELS)]  # fmt: skip
    assert first == ["RepeatableInt4Kernel", "RepeatableInt8Kernel", "RepeatableFp8Kernel"], first
    # A process that has woken a device cannot be forked.
    assert not torch.cuda.is_initialized()


def _transfer_engines() -> None:
    from trl_qarl.vllm_plugin.weight_transfer import FileReceiver, NCCLReceiver

    assert not FileReceiver.__abstractmethods__ | NCCLReceiver.__abstractmethods__


CUDA_CHECKS: dict[str, Callable[[], None]] = {
    "plugin": _plugin,
    "weight-transfer engines": _transfer_engines,
    **{name: _schema(name, types) for name, types in _SCHEMAS},
    "operators of FlashAttention": _attention_operators,
}


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("capability", nargs="?", default="9.0", metavar="X.Y")
    capability = tuple(map(int, parser.parse_args().capability.split(".")))
    sys.path.insert(0, str(Path(__file__).parent))
    import fake_gpu

    fake_gpu.install(capability)
    import vllm

    checks = PYTHON_CHECKS | CUDA_CHECKS
    found = [*failures(checks)]
    for failure in found:
        print(f"vLLM {vllm.__version__}: {failure}")
    print(f"vLLM {vllm.__version__}: {len(checks) - len(found)} of {len(checks)} hold")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
