"""
Engine numerics of GPUs as far as a CPU can check them, with torch code in the place of three kernels: blocks of keys,
gradients, settings of the engine. `benchmarks/rehearsal/contract.py` compares our calls with the real signatures,
test_cuda_alignment.py numbers on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch

from reference.attention_naive import attend
from trl_qarl import QaRLConfig
from trl_qarl.bitwise import cuda, ops
from trl_qarl.bitwise.availability import choose_numerics
from trl_qarl.bitwise.exact import check_arithmetic
from trl_qarl.checks.configuration import check_numerics
from trl_qarl.engines.server_command import build_server_command
from trl_qarl.engines.spec import EngineSpec
from trl_qarl.token_row import Segments


pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def paged_attention(*, q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
                    block_table, fa_version, num_splits):  # fmt: skip
    """FlashAttention with keys and values in blocks."""
    assert causal and window_size == [-1, -1] and num_splits == 1 and fa_version == 3
    assert k.shape[1] == cuda.BLOCK_SIZE and block_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    output = torch.full_like(q, torch.nan)
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    assert max_seqlen_k == int(seqused_k.max())
    for start, end, length, blocks in zip(bounds, bounds[1:], seqused_k.tolist(), block_table.tolist(), strict=False):
        used = blocks[: -(-length // cuda.BLOCK_SIZE)]
        keys, values = (x[used].flatten(0, 1)[:length].float() for x in (k, v))
        output[start:end] = attend(q[start:end].float(), keys, values, softmax_scale)
    return output


@pytest.fixture
def gpu_kernels(monkeypatch):
    """Tensors on the CPU go where those on a GPU would."""
    from vllm.model_executor.determinism import batch_invariant
    from vllm.v1.attention.backends import fa_utils

    calls = []

    def linear(x, weight, bias=None):
        calls.append("linear")
        return torch.nn.functional.linear(x.double(), weight.double(), bias).to(x.dtype)

    monkeypatch.setattr(batch_invariant, "linear_batch_invariant", linear)
    monkeypatch.setattr(batch_invariant, "log_softmax", lambda x, dim: torch.log_softmax(x, dim))
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", paged_attention, raising=False)
    monkeypatch.setattr(ops, "is_on_gpu", lambda x: True)
    cuda._layout.cache_clear()
    return calls


@pytest.mark.parametrize(
    ("query_lengths", "key_lengths"),
    [((5,), (5,)), ((1, 1, 1), (16, 17, 300)), ((40, 1, 33), (40, 64, 48)), ((130, 16, 1), (130, 16, 1))],
    ids=["one", "decode", "mixed", "prefill"],
)
def test_a_query_sees_the_keys_up_to_its_place(gpu_kernels, query_lengths, key_lengths):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sum(query_lengths), 4, 32, generator=generator).bfloat16()
    key, value = (torch.randn(sum(key_lengths), 2, 32, generator=generator).bfloat16() for _ in range(2))
    output = cuda.attention(query, key, value, Segments(query_lengths, key_lengths), 0.3)
    parts = zip(*(x.split(n) for x, n in ((output, query_lengths), (query, query_lengths), (key, key_lengths), (value, key_lengths))), strict=True)  # fmt: skip
    for out, *segment in parts:
        expected = attend(*(x.double() for x in segment), 0.3)
        torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.01)


def test_no_shape_has_tiles_of_its_own(monkeypatch):
    from vllm.model_executor.determinism import batch_invariant_configs as tables

    default = {"BLOCK_SIZE_K": 64}
    hopper = tables._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS["hopper"]
    monkeypatch.setattr(tables, "_TUNED_MATMUL_CONFIGS_FOR_DEVICE", hopper)
    monkeypatch.setattr(tables, "_TUNED_MATMUL_CONFIGS_RESOLVED", True)
    (n, k), shape = next(iter(hopper.items()))
    assert tables._get_matmul_config(1, n, k, torch.bfloat16, default)["BLOCK_SIZE_K"] == shape.block_k != 64
    cuda.use_one_tiling()
    assert tables._get_matmul_config(1, n, k, torch.bfloat16, default) is default


def test_an_engine_without_batch_invariance_is_refused(monkeypatch):
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"a": SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "FLASHINFER"))}
        ),
        model_config=SimpleNamespace(enforce_eager=False, head_dtype=torch.float32),
        cache_config=SimpleNamespace(block_size=16),
        use_v2_model_runner=True,
    )
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(ValueError) as info:
        check_arithmetic({"arithmetic": cuda.describe_arithmetic(config)}, on_gpu=True)
    assert str(info.value).splitlines()[1:6] == [
        "  VLLM_BATCH_INVARIANT: learner '1', engine '0'",
        "  VLLM_USE_V2_MODEL_RUNNER: learner '0', engine '1'",
        "  enforce_eager: learner True, engine False",
        "  attention_backend: learner 'FLASH_ATTN', engine 'FLASHINFER'",
        "  head_dtype: learner 'torch.bfloat16', engine 'torch.float32'",
    ]
    assert "trl-qarl vllm-serve --numerics engine" in str(info.value)
    check_arithmetic({"arithmetic": cuda.describe_arithmetic()}, on_gpu=True)


def test_server_of_an_exact_learner_is_started_so(tmp_path):
    argv, environment = build_server_command(EngineSpec("m", numerics="engine"), transfer_dir=tmp_path)
    assert environment["VLLM_BATCH_INVARIANT"] == "1" and environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    text = " ".join(argv)
    assert "--enforce-eager --attention-backend FLASH_ATTN --block-size 16" in text
    plain, other = build_server_command(EngineSpec("m"), transfer_dir=tmp_path)
    assert "VLLM_BATCH_INVARIANT" not in other and "--enforce-eager" not in plain
    # vLLM's own parser, which 0.33 has moved, takes them.
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv[3:])
    assert args.enforce_eager and args.block_size == 16 and args.attention_backend == "FLASH_ATTN"


def test_the_engine_takes_products_that_a_learner_repeats(monkeypatch):
    from vllm import envs
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS, _POSSIBLE_INT8_KERNELS, _POSSIBLE_KERNELS
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.platforms.interface import PlatformEnum
    from vllm.scalar_type import scalar_types

    from trl_qarl.vllm_plugin import linear_kernels

    # An engine that was in this process has the variables read once.
    envs.disable_envs_cache()
    tables = {
        linear_kernels.RepeatableInt4Kernel: _POSSIBLE_KERNELS,
        linear_kernels.RepeatableInt8Kernel: _POSSIBLE_INT8_KERNELS,
        linear_kernels.RepeatableFp8Kernel: _POSSIBLE_FP8_KERNELS,
    }
    for kernel, table in tables.items():
        monkeypatch.setitem(table, PlatformEnum.CUDA, list(table[PlatformEnum.CUDA]))
        linear_kernels.register_kernels(PlatformEnum.CUDA)
        linear_kernels.register_kernels(PlatformEnum.CUDA)
        assert [k for k in table[PlatformEnum.CUDA] if k is kernel] == [kernel] == table[PlatformEnum.CUDA][:1]
        assert kernel.is_supported(90)[0] if kernel is not linear_kernels.RepeatableInt4Kernel else True
    config = MPLinearLayerConfig((64, 64), (64, 64), scalar_types.uint4b8, torch.bfloat16, 32, False)
    kernel = linear_kernels.RepeatableInt4Kernel
    assert kernel.can_implement(config) == (False, "no learner of trl_qarl repeats this engine")
    monkeypatch.setattr(linear_kernels, "is_our_engine", lambda *backends: True)
    assert not kernel.can_implement(config)[0]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not kernel.can_implement(config)[0]
    for is_eager in (False, True):
        engine = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=is_eager))
        monkeypatch.setattr(linear_kernels, "get_current_vllm_config_or_none", lambda engine=engine: engine)
        assert kernel.can_implement(config)[0] == is_eager
    with pytest.raises(ValueError, match=r"that a learner repeats .*pack-quantized .*numerics='fast'"):
        kernel(config, "qweight", "weight_scale").process_weights_after_loading(SimpleNamespace())
    config.act_type = torch.float16
    assert kernel.can_implement(config)[1] == "activations are torch.float16, not bfloat16"


@pytest.mark.parametrize(
    ("release", "capability", "reason"),
    [
        (None, (9, 0), "use_cpu=False: vLLM is not installed. Set `use_cpu=True`"),
        ("0.31.0", (7, 5), "T4 is older than compute capability 8.0"),
        ("0.33.0", (9, 0), None),
    ],
)
def test_what_is_missing_is_refused_before_vllm_is_loaded(tmp_path, monkeypatch, release, capability, reason):
    config = QaRLConfig(str(tmp_path), use_cpu=True, bf16=True)
    config.use_cpu, config.numerics = False, "engine"
    [message] = check_numerics(config)
    assert "use_cpu=False: no CUDA device is available. Set `use_cpu=True`" in message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    monkeypatch.setattr(cuda, "_vllm_version", lambda: release)
    problems = [*check_numerics(config)]
    assert problems == [] if reason is None else reason in problems[0]


def test_a_differing_release_is_refused_for_engine_numerics(tmp_path, monkeypatch):
    config = QaRLConfig(str(tmp_path), use_cpu=True, bf16=True)
    config.use_cpu, config.numerics = False, "engine"
    monkeypatch.setattr(cuda, "reason_against", lambda: "vLLM 9.9.9 is installed, and its norm differs")
    monkeypatch.setattr(cuda, "reason_against_installation", lambda: None)
    assert not [*check_numerics(config)]
    with pytest.raises(ValueError, match="contradicts use_cpu=False: vLLM 9.9.9 is installed, and its norm differs"):
        choose_numerics(config, torch.nn.Linear(1, 1), torch.bfloat16)
