"""
An engine in this process that is taken for one with CUDA graphs, and a kernel in it whose tensors a reload makes anew.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from testing_utils import make_tiny_model, start_engines_quickly
from trl_qarl.wire.protocol import PublishError


pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def publisher(tmp_path_factory):
    from trl_qarl import prepare_model
    from trl_qarl.rollout.engines import make_engine
    from trl_qarl.rollout.publisher import Publisher
    from trl_qarl.rollout.transports import DirectTransport

    with pytest.MonkeyPatch.context() as patch:
        start_engines_quickly(patch)
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        path = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        prepare_model(model, "w8a16", scale_dtype=torch.float32)
        llm = make_engine(model, torch.float32, on_cpu=True, max_model_len=128, max_num_seqs=8)
        yield Publisher(model, torch.float32, DirectTransport(llm), AutoTokenizer.from_pretrained(path))


@pytest.fixture
def engine(publisher):
    """The transfer engine, and before and after what is usual on a CPU: no graphs."""
    engine = publisher.transport._worker.weight_transfer_engine
    assert not engine.has_graphs and engine._addresses is None
    engine.has_graphs = True
    publisher.forget()
    for layer in engine.model.modules():
        if hasattr(layer, "scheme"):
            # Made of a layer's tensors at its first use, by kernels that no graph captures.
            layer.scheme.kernel._low_bit = None
    yield engine
    engine.has_graphs, engine._addresses = False, None
    publisher.forget()
    publisher.publish("healed")


def make_anew(monkeypatch, layer, tensor_of):
    """Have the layer's kernel keep a tensor that each reload replaces."""
    kernel, number = layer.scheme.kernel, iter(range(1, 100))
    process = kernel.process_weights_after_loading

    def process_and_make(layer):
        process(layer)
        kernel.strides = tensor_of(next(number))

    kernel.strides = tensor_of(0)
    monkeypatch.setattr(kernel, "process_weights_after_loading", process_and_make)
    return kernel


PATH = "model.layers.1.mlp.down_proj"


def test_what_a_kernel_makes_anew_is_written_to_where_a_graph_reads_it(publisher, engine, monkeypatch):
    kernel = make_anew(monkeypatch, engine.model.get_submodule(PATH), lambda number: torch.full((4,), float(number)))
    captured, address = kernel.strides.detach(), kernel.strides.data_ptr()
    for version in ("1", "2"):
        publisher.forget()
        publisher.publish(version)
        assert kernel.strides.data_ptr() == address
        assert captured.tolist() == kernel.strides.tolist() == [float(version)] * 4
    assert engine._addresses is not None


def test_without_graphs_a_kernel_may_keep_its_tensors_where_it_likes(publisher, engine, monkeypatch):
    engine.has_graphs = False
    kernel = make_anew(monkeypatch, engine.model.get_submodule(PATH), lambda number: torch.zeros(4 + number))
    publisher.publish("elsewhere")
    assert kernel.strides.shape == (5,) and engine._addresses is None


def test_a_tensor_of_another_shape_refuses_the_publication_and_says_what_to_do(publisher, engine, monkeypatch):
    make_anew(monkeypatch, engine.model.get_submodule(PATH), lambda number: torch.zeros(4 + number))
    for _ in range(2):
        with pytest.raises(PublishError) as error:
            publisher.publish("moved")
        assert f"{PATH}.scheme.kernel.strides: float32[4] on cpu before, float32[" in str(error.value)
        assert "kernel QaRLWeightOnlyKernel, vLLM" in str(error.value) and "--enforce-eager" in str(error.value)
        assert publisher.transport.llm.get_weight_version() != "moved"
    # Not a view of what an engine was started with.
    engine._addresses = None


def test_an_engine_with_dummy_weights_has_scales_of_attention_that_scale_nothing(publisher):
    """
    vLLM fills buffers with dummy weights too, and with keys and values in 16 or 32 bits no weight that is published
    sets them.
    """
    for layer in publisher.transport._worker.weight_transfer_engine.model.model.layers:
        attention = layer.self_attn.attn
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            assert getattr(attention, name).item() == getattr(attention, f"{name}_float") == 1.0
