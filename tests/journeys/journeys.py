"""
Journeys: what a user does from the first file to the deployed policy, by the words of the docs.

`user` is a user in a folder with a tiny model, a dataset, rewards and a recipe. `user.run("trl-qarl", "train", ...)`
runs a command there and returns its output; `user.assert_deployed("out/w4a16")` ends a journey: the export gives the
trainer's greedy tokens in plain transformers and plain vLLM, in processes that cannot import `trl_qarl`. Without
AVX512, where vLLM for CPUs has no INT4 product and one of INT8 that saturates, `trl_qarl` is installed beside vLLM.
"""

import json
import os
import shutil
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from testing_utils import make_tiny_config, make_tiny_tokenizer
from testing_utils.warm import Warm
from trl_qarl.engines.server_process import free_port


FOLDER = Path(__file__).parent
CONFIGURATIONS = FOLDER.parents[1] / "examples" / "accelerate_configs"
MARKS = [
    *(pytest.mark.distributed, pytest.mark.slow, pytest.mark.vllm),
    *(pytest.mark.xdist_group("journeys"), pytest.mark.timeout(900)),
]
# As in conftest.py.
PICTURES = [os.path.join(sys.prefix, "pictures")]
HAS_AVX512 = torch.cpu._is_avx512_supported()
ROUNDING = 0.0 if HAS_AVX512 else 0.25
"""Largest mismatch of a token with vLLM in bfloat16: without AVX512 the numerics are fast, and round logits twice."""
NEAR = 0.6
"""Distance of two logits below which the roundings of another engine may exchange them: the largest are about 20, of
which bfloat16 has every eighth."""

RECIPE = {
    "model_name_or_path": "model",
    "dataset_name": "problems.json",
    "reward_funcs": ["rewards.digits"],
    "output_dir": "out",
    "scheme": "w4a16",
    "bf16": True,
    "max_steps": 3,
    "save_steps": 1,
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "steps_per_generation": 1,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
}

REWARDS = """
import os, signal
from pathlib import Path


def digits(completions, trainer_state, **kwargs):
    "The share of digits. At the update that the file `dies` names, a process is killed, as by a machine out of memory."
    dies = Path("dies")
    if os.environ.get("RANK", "0") == os.environ.get("DIES_AS", "1") and dies.exists():
        if trainer_state.global_step == int(dies.read_text()):
            dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return [sum(map(str.isdigit, text)) / max(len(text), 1) + len(set(text)) / 10 for text in completions]
"""


class User:
    """A folder with files as users have them, and commands that are run there."""

    def __init__(self, folder: Path, warm: Warm):
        self.folder, self._warm = folder, warm
        self.seconds: dict[str, float] = {}
        paths = [str(FOLDER), str(FOLDER.parent), *PICTURES, os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # As the last line of a training says for a CPU.
            "VLLM_CPU_INT4_W4A8": "0",
            "JOURNEY_TOKENS": str(folder / "tokens.json"),
        }
        self.make_model()
        rows = [{"prompt": f"{i} + {i + 1} =", "solution": str(2 * i + 1)} for i in range(16)]
        (folder / "problems.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "rewards.py").write_text(REWARDS)
        self.write_recipe()

    def write_recipe(self, name: str = "recipe.yaml", **changes) -> str:
        (self.folder / name).write_text(yaml.safe_dump(RECIPE | changes))
        return name

    def start(self, *argv: str, log: str = "log", kind: str = "engines", **environment: str):
        """Start a command with its output in the file `log`; returns the process. `kind` is that of the process which
        has imported what the command needs: `engines`, or `plain` for programs without our package."""
        path = self.folder / log
        path.touch()
        env = self.environment | {"JOURNEY_LOG": str(path)} | environment
        return self._warm.start(argv, env, path, self.folder, kind)

    def run(self, *argv: str, code: int = 0, log: str = "log", timeout: float = 300, **options) -> str:
        """Run a command to its end, which must have this exit code (`None` for any failure); returns its output."""
        start = time.monotonic()
        (self.folder / log).unlink(missing_ok=True)
        process = self.start(*argv, log=log, **options)
        found = process.wait(timeout)
        label = next((word for word in argv[1:] if not word.startswith("-")), argv[0])
        self.seconds[label] = self.seconds.get(label, 0) + time.monotonic() - start
        output = (self.folder / log).read_text()
        assert found == code if code is not None else found != 0, f"{argv} ended with {found}:\n{output[-6000:]}"
        return output

    def launch(self, name: str, *options: str, code: int | None = 0) -> str:
        """Run `trl-qarl train` as a shipped file says, on two processes; return the output of the first machine."""
        argv = ["trl-qarl", "train", "--config", "recipe.yaml", "--accelerate_config", *two_processes(name), *options]
        others = [
            self.start(*argv, "--machine_rank", str(rank), log=f"log{rank}", JOURNEY_LAUNCH=name)
            for rank in range(1, 2 if name.endswith("two_nodes") else 1)
        ]
        output = self.run(*argv, "--machine_rank", "0", code=code, JOURNEY_LAUNCH=name)
        for other in others:
            found = other.wait(120)
            assert found == code if code is not None else found != 0, (self.folder / "log1").read_text()[-6000:]
        return output

    def tensors_of(self, folder: str) -> dict:
        """Tensors of a folder, with those of an adapter next to them."""
        from safetensors.torch import load_file

        paths = (self.folder / folder).rglob("*.safetensors")
        return {name: tensor for path in paths for name, tensor in load_file(path).items()}

    def make_model(self, arch: str = "qwen3", **overrides) -> None:
        """Put a tiny model of another kind in the place of `model`."""
        shutil.rmtree(self.folder / "model", ignore_errors=True)
        make_model(self.folder / "model", arch, **overrides)

    def trained(self) -> dict:
        """The policy's own answers at the end of the last training, and how processes shared the model."""
        return json.loads((self.folder / "tokens.json").read_text())

    def assert_deployed(self, export: str, engines=("transformers", "vllm")) -> None:
        """The export gives the trainer's greedy tokens, up to the first that is nearly tied with another one."""
        expected = self.trained()["answers"]
        for engine in engines:
            script, kind = str(FOLDER / "plain.py"), "plain"
            if engine == "vllm" and not HAS_AVX512 and self.is_low_bit(export):
                engine, kind = "vllm+trl_qarl", "engines"
            self.run(sys.executable, script, engine, export, "tokens.json", "found.json", log=engine, kind=kind)
            self.seconds[engine] = self.seconds.pop(script)
            found, num_equal = json.loads((self.folder / "found.json").read_text()), 0
            for theirs, ours in zip(expected, found, strict=True):
                for token, margin, answer in zip(theirs["tokens"], theirs["margins"], ours, strict=True):
                    if token != answer:
                        assert margin < NEAR, (engine, token, answer, margin, num_equal)
                        break
                    num_equal += 1
            num_tokens = sum(len(theirs["tokens"]) for theirs in expected)
            assert num_equal >= num_tokens / 2, (engine, expected, found)

    def is_low_bit(self, export: str) -> bool:
        return "quantization_config" in json.loads((self.folder / export / "config.json").read_text())

    def serve(self, *words: str, max_model_len: int = 64, dtype: str | None = "bfloat16", **environment: str):
        """Start a server for a trainer of `RECIPE`, and wait until it answers; returns its process and port."""
        start, port = time.monotonic(), free_port()
        options = ["--model", "model", "--max-model-len", str(max_model_len), "--port", str(port)]
        options += ["--dtype", dtype] if dtype else []
        if any("-parallel-size" in word for word in words):
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        log, argv = f"server-{port}", ("trl-qarl", "vllm-serve", *words, *options)
        server = self.start(*argv, log=log, **environment)
        host = words[words.index("--host") + 1] if "--host" in words else "127.0.0.1"
        self.wait_for(f"http://{host}:{port}/health", server)
        self.seconds["serve"] = self.seconds.get("serve", 0) + time.monotonic() - start
        return server, port

    def wait_for(self, url: str, process, seconds: float = 300) -> None:
        """Wait until a server answers."""
        deadline = time.monotonic() + seconds
        while True:
            assert process.poll() is None and time.monotonic() < deadline, process
            with suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return
            time.sleep(0.2)

    def close(self) -> None:
        """End what still runs."""
        self._warm.end_commands()


def two_processes(name: str) -> list[str]:
    """A shipped file, and all that changes in it."""
    file, port = str(CONFIGURATIONS / f"{name}.yaml"), str(free_port())
    return [file, "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]


def make_model(folder: Path, arch: str, **overrides) -> None:
    """Save a tiny model whose logits are far apart, so that roundings exchange few of them."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(make_tiny_config(arch, **overrides), dtype=torch.float32)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().weight.data *= 30
    model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
