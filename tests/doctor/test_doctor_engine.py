import pytest

from testing_utils import start_engines_quickly
from trl_qarl.doctor import engine
from trl_qarl.quantization.plan import get_plan
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.scripts.doctor import _engine


def test_equal_samples_are_an_error():
    assert engine.check_samples([[1, 2], [1, 3]]).level == "ok"
    assert engine.check_samples([[1, 2], [1, 2]]).level == "error"


def test_a_broken_engine_is_a_finding(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no such device\nat all")

    monkeypatch.setattr("trl_qarl.rollout.in_process.make_engine", fail)
    (finding,) = engine.check_engine(get_scheme("w4a16"))
    assert finding.level == "error" and "RuntimeError: no such device" in finding.text


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("on_cpu", "on_gpu", "text"),
    [
        (None, "no CUDA device", "can be used with vLLM here"),
        ("no AVX512", None, "can be tried with vLLM here"),
        ("no AVX512", "no CUDA device", "neither on a CPU (no AVX512) nor on a GPU (no CUDA device)"),
    ],
)
def test_engine_numerics_are_said_to_work_where_they_do(monkeypatch, on_cpu, on_gpu, text):
    pytest.importorskip("vllm")
    monkeypatch.setattr("trl_qarl.numerics.cpu.reason_against", lambda: on_cpu)
    monkeypatch.setattr("trl_qarl.numerics.cuda.reason_against", lambda: on_gpu)
    assert text in next(_engine(get_scheme("w4a16"))).text


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_engine_is_published_to_and_samples_differ(monkeypatch):
    pytest.importorskip("vllm")

    start_engines_quickly(monkeypatch)
    samples = []

    def record(llm):
        samples.extend(sample_twice(llm))
        return [samples[0], samples[0]]

    sample_twice, scheme = engine.sample_twice, get_plan({"re:.*proj": "w4a16", "re:.*mlp.*": "w8a8"})
    monkeypatch.setattr(engine, "sample_twice", record)
    published, equal = engine.check_engine(scheme)
    assert published.level == "ok", published
    assert "of a tiny w4a16-w8a8 model" in published.text and "unquantized" not in published.text
    # The engine's own samples differ; two copies of one of them are found.
    assert [len(sample) for sample in samples] == [16, 16] and samples[0] != samples[1]
    assert equal.level == "error"
