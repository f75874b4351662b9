"""
Helpers of the tests. Here: tiny models, tokenizers and trainers, made on the spot so that no test needs a hub. In
other modules:

| module | what |
|---|---|
| `trainings`, `batches` | trainings on a tiny model without an engine; batches of completions |
| `layers`, `learners` | tiny models by the names of their layers; learners with engine numerics |
| `engines` | engines in this process, and the learners that publish to them |
| `pictures` | tiny models that take pictures |
| `played_server` | an object in place of a server and its engine, which fails on command |
| `warm`, `faulty_replica` | commands, and real vLLM servers, that start at once; one whose second replica goes wrong |
| `web_servers`, `failing_server` | web servers in this process; one that fails on command |
| `hub_stand_in` | a web server in place of the Hub |
| `children` | processes that end with the test run |
| `live_bytes` | the memory of tensors, counted |
"""

import email
import functools
import gc
import importlib.metadata
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def parse_metadata_once() -> None:
    """Have this process find and parse the description of an installed package once: accelerate asks for versions
    whenever it unwraps a model, which took a tenth of the time of a training."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
    parse = functools.cache(email.message_from_string)
    importlib.metadata.email = SimpleNamespace(message_from_string=parse)


@contextmanager
def importing():
    """Import without collections, which take a sixth of the time, and have none that comes later, as in a forked
    process, walk and copy what was imported. As long takes scikit-learn, which transformers imports where it is; it is
    here for metrics of lm-evaluation-harness that no test needs."""
    gc.disable()
    sys.modules.setdefault("sklearn", None)
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def make_tiny_tokenizer(**tokens):
    """Byte-level tokenizer without merges: every string round-trips, one token per byte, 260 tokens and the named
    special `tokens` of a model, such as `image_token`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        **tokens,
    )


def make_tiny_config(arch: str = "llama", **overrides):
    """Configuration of a two-layer model whose sizes every scheme accepts (multiples of 128), with `overrides`."""
    from transformers import AutoConfig

    fields = {
        "vocab_size": 260,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": arch == "gemma",
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(arch, **(fields | overrides))


def make_tiny_model(directory, arch: str = "llama", dtype: str = "float32", seed: int = 0, **overrides) -> str:
    """
    Save a random model of [`make_tiny_config`] with its tokenizer in `directory/arch`, and return that folder:
    `"llama"`, `"qwen2"` (qkv biases), `"qwen3"` (q and k norms) or `"gemma"` (tied `lm_head`). The caller's random
    state is left alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(directory) / arch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_tiny_config(arch, **overrides), dtype=getattr(torch, dtype))
        # Zero-initialised biases would hide a forward that drops them.
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return str(path)


def make_own_code(folder, arch: str = "qwen2") -> str:
    """A tiny model whose class lies next to its weights."""
    path = Path(make_tiny_model(folder, arch))
    (path / "configuration_own.py").write_text(
        "from transformers import Qwen2Config\n\n\nclass OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
    )
    (path / "modeling_own.py").write_text(
        "from transformers import Qwen2ForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def run_export(model, output_dir, *options: str) -> int:
    """Run `trl-qarl export` in this process and return its exit code."""
    from trl_qarl.cli import main

    return main(["export", "--model_name_or_path", str(model), "--output_dir", str(output_dir), *options])


def refused(capsys, command: str, *argv: str) -> str:
    """Run a command that has to end with exit code 2, and return what it says on standard error."""
    import pytest

    from trl_qarl.cli import main

    with pytest.raises(SystemExit, match="2"):
        main([command, *argv])
    return capsys.readouterr().err


def set_engine_environment(patch) -> None:
    """Set the variables of an engine in this process by a monkeypatch, so that the end of the test restores them."""
    from trl_qarl.engines.server_command import cpu_environment

    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    for name, value in (cpu_environment() | own).items():
        patch.setenv(name, value)


def start_engines_quickly(patch) -> None:
    """[`set_engine_environment`] and [`quicken_engines`], with our own code for engines."""
    from trl_qarl.engines import in_process

    set_engine_environment(patch)
    quicken_engines(patch, in_process)


def quicken_engines(patch, *modules) -> None:
    """
    Have engines of this process, and of those forked from it, start and end in a third of the time, until the
    monkeypatch `patch` is undone. Results are unchanged. `modules` are further ones that collect garbage when an
    engine ends.
    """
    is_first = "vllm.entrypoints.llm" not in sys.modules
    import vllm.entrypoints.llm  # noqa: F401
    from torch._dynamo import eval_frame
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import registry
    from vllm.triton_utils import dispatcher
    from vllm.v1.engine import core
    from vllm.v1.worker import cpu_worker, gpu_worker

    # vLLM exempts all objects from collection when an engine starts, and takes it back: six collections of a million
    # objects of modules. Here those stay exempt, and those of engines never are.
    if is_first:
        gc.collect()
        gc.freeze()
    patch.setattr(core, "freeze_gc_heap", lambda: None)
    patch.setattr(gpu_worker, "freeze_gc_heap", lambda: None)
    # An engine that ends would free earlier ones too, whose end destroys the groups of the engine that is there by
    # then.
    for module in (*modules, parallel_state, core, gpu_worker):
        patch.setattr(module, "gc", SimpleNamespace(collect=gc.collect, freeze=gc.freeze, unfreeze=lambda: None))
    # Something may hold an engine, such as the traceback of a failed test: its end leaves the groups to an engine that
    # came later.
    latest, start, end, clean_up = (
        [],
        core.EngineCore.__init__,
        core.EngineCore.shutdown,
        core.cleanup_dist_env_and_memory,
    )

    def start_latest(self, *args, **kwargs):
        latest[:] = [id(self)]
        start(self, *args, **kwargs)

    def end_latest(self):
        core.cleanup_dist_env_and_memory = clean_up if latest == [id(self)] else lambda: None
        end(self)

    patch.setattr(core, "cleanup_dist_env_and_memory", clean_up)
    patch.setattr(core.EngineCore, "__init__", start_latest)
    patch.setattr(core.EngineCore, "shutdown", end_latest)
    # 64 MiB for keys and values in place of a GiB of zeros, without a trial of how much there is.
    patch.setattr(cpu_worker.CPUWorker, "determine_available_memory", lambda self: 2**26)
    # Of each class of models that is not in its cache, vLLM asks another process, which imports vLLM for it: that
    # keeps CUDA from being initialized here.
    patch.setattr(registry, "_run_in_subprocess", lambda ask: ask())
    # Looks at every name of every module for those that it replaces, and finds them replaced.
    register, known = dispatcher.register_kernels, dispatcher._registry
    patch.setattr(dispatcher, "register_kernels", lambda found: found.keys() <= known.keys() or register(found))
    # The sampler is compiled, for seconds; what it computes stays the same.
    patch.setattr(eval_frame, "_stance", eval_frame.DynamoStance("force_eager"))


def is_running(pid: int) -> bool:
    """Tells if a process has not ended, on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def dead_prefix() -> str:
    """Prefix of the names of a trainer that has ended."""
    import subprocess
    import sys

    code = "from trl_qarl.wire.transfer_dir import owned_prefix; print(owned_prefix())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def make_tiny_dataset(directory, num_rows: int = 16) -> str:
    """Write `train.json` and `test.json` (`prompt`, `solution`); returns the directory for `load_dataset`."""
    path = Path(directory) / "dataset"
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{i} + {i + 1} =", "solution": str(2 * i + 1)} for i in range(num_rows)]
    for split in ("train", "test"):
        (path / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts_of(completions) -> list[str]:
    return [c if isinstance(c, str) else c[0]["content"] for c in completions]


def count_digits(completions, **kwargs) -> list[float]:
    """Reward that differs between random completions: the share of digits."""
    texts = texts_of(completions)
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def spread(completions, **kwargs) -> list[float]:
    """Reward that differs between random completions, so that every group has a spread of rewards."""
    return [sum(map(ord, text)) % 97 / 97 for text in texts_of(completions)]


def make_problems(num_rows: int = 16):
    """A dataset of prompts."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{i} + {i + 1} =" for i in range(num_rows)]})


TRAINING = {
    "use_cpu": True,
    "report_to": [],
    "logging_steps": 1,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    # Muon iterates in bfloat16, a third of all time on a processor without it: tests of it ask for it.
    "optim": "adamw_torch",
    "save_strategy": "no",
    "disable_tqdm": True,
}
"""Arguments of a training of four updates on two generation batches."""

# Of a model of two layers each matrix of an engine in another format, for tests of adapters in all of them at once.
ADAPTED_PLAN = {
    "re:.*layers[.]0.*[qkv]_proj": "nvfp4a16",
    "re:.*layers[.]0.*o_proj": "mxfp4a16",
    "re:.*layers[.]0.*(gate|up)_proj": {"scheme": "w4a16", "group_size": 64},
    "re:.*layers[.]0.*down_proj": "w8a16",
    "re:.*layers[.]1.*o_proj": "w8a16",
    "re:.*layers[.]1.*self_attn.*": {"scheme": "w3a16", "group_size": 32},
    "re:.*layers[.]1.*mlp.*": {"scheme": "w2a16", "group_size": 32},
}


def make_trainer(model, output_dir, reward=spread, train_dataset=None, eval_dataset=None, **options):
    """A [`QaRLTrainer`] with the arguments [`TRAINING`], by default with rollouts of the learner itself. Its other
    objects are told from options by their names."""
    from trl_qarl import QaRLConfig, QaRLTrainer

    names = {"callbacks", "peft_config", "rollout_func", "quantization_config"} & options.keys()
    objects = {name: options.pop(name) for name in names}
    args = QaRLConfig(str(output_dir), **(TRAINING | options))
    return QaRLTrainer(model, reward, args, train_dataset or make_problems(), eval_dataset, **objects)


def fixed_completions(prompts, trainer):
    """
    A `rollout_func` whose completions depend on their place in the batch of all processes alone; the learner with
    engine numerics scores them one by one.
    """
    import torch

    from trl_qarl.bitwise.ops import token_log_probs

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    output = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for place, prompt in enumerate(prompts, trainer.accelerator.process_index * len(prompts)):
        ids = trainer.processing_class(prompt)["input_ids"]
        completion = torch.randint(4, 260, (8,), generator=torch.Generator().manual_seed(place))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + completion.tolist()]), use_cache=False).logits
        output["prompt_ids"].append(ids)
        output["completion_ids"].append(completion.tolist())
        output["logprobs"].append(token_log_probs(logits[0, len(ids) - 1 : -1], completion).tolist())
    return output


def stop_at(step: int):
    """A callback that ends training after update `step`."""
    from transformers import TrainerCallback

    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= step

    return StopAt()


def save_at(*steps: int):
    """A callback that saves a checkpoint after each update of `steps`."""
    from transformers import TrainerCallback

    class SaveAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step in steps

    return SaveAt()


def make_vllm_trainer(directory, arch: str = "llama", **arguments):
    """A [`QaRLTrainer`] with float32 rollouts in vLLM on the CPU, on a tiny model and dataset made in `directory`."""
    from datasets import load_dataset

    defaults = {"use_vllm": True, "bf16": False, "vllm_max_model_length": 128, "max_completion_length": 12}
    defaults |= {"optim": "muon", "model_init_kwargs": {"dtype": "float32"}}
    dataset = load_dataset(make_tiny_dataset(directory))
    return make_trainer(
        (make_tiny_mixture if arch in MIXTURES else make_tiny_model)(directory, arch),
        Path(directory) / "output",
        spread,
        dataset["train"],
        dataset["test"].select(range(2)),
        **(defaults | arguments),
    )


def logged(trainer, name: str) -> list[float]:
    """Values of one metric over training, in order."""
    return [row[name] for row in trainer.state.log_history if name in row]


def product_reference(layer, x, grad):
    """
    Computes a [`QuantizedLinear`] in float64: the product with the dequantized weight and, for the
    gradient `grad` of its result, the gradients of input, master weight and bias.
    """
    import torch

    from trl_qarl.quantization.quantize import dequantize_activation, quantize_activation

    weight = layer.low_bit_weight().gemm_weight().dequantize(torch.float64)
    seen, grad = x.detach().double(), grad.double()
    if layer.scheme.activation is not None:
        seen = dequantize_activation(*quantize_activation(x.detach(), layer.scheme), torch.float64)
    return seen @ weight.t() + layer.bias.detach().double(), grad @ weight, grad.t() @ seen, grad.sum(0)


def relative_error(actual, expected) -> float:
    """Norm of the difference to `expected`, a float64 tensor, as a share of its norm."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def push_export(trainer, hub) -> dict[str, bytes]:
    """Files of the policy that `trainer` pushes to a stand-in for the Hub, which are those of its export."""
    from testing_utils.hub_stand_in import local_files, pushed_files

    trainer.args.hub_model_id = "someone/policy"
    trainer.push_to_hub()
    files = pushed_files(hub)
    assert files == local_files(Path(trainer.export_dir))
    return files


@contextmanager
def tampered(publisher, change):
    """Have what `publisher` sends changed on its way."""
    engine, send = publisher.engine, publisher.engine.send
    engine.send = lambda tensors: send([item for tensor in tensors for item in change(*tensor)])
    try:
        yield
    finally:
        del engine.send


def launch_environment(config_file: str) -> dict[str, str]:
    """Variables that `accelerate launch` sets for a configuration of `examples/accelerate_configs`."""
    import os

    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path = Path(__file__).parents[2] / "examples" / "accelerate_configs" / config_file
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    args.deepspeed_fields_from_accelerate_config = "deepspeed_config,mixed_precision"
    environment = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def path_without(folder, *packages: str) -> str:
    """
    `PYTHONPATH` of a Python process that takes `packages` and scikit-learn (see [`importing`]) for missing and
    otherwise finds what this one does. TRL and accelerate import whatever is installed: without vLLM and DeepSpeed a
    training that uses neither starts in half the time.
    """
    import os

    hidden = Path(folder) / "without"
    hidden.mkdir(exist_ok=True)
    packages = (*packages, "sklearn")
    (hidden / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({packages}))\n")
    return os.pathsep.join([str(hidden), *filter(None, sys.path)])


MIXTURES = {
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_local_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt_oss": {"num_local_experts": 8},
    "glm4_moe": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen3_next": {
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""Fields of small mixtures of experts, by model type, beside those that all have."""


def make_mixture(arch: str = "qwen3_moe", seed: int = 0, **overrides):
    """
    Make a random two-layer mixture of eight experts, two of them active, that groups of 32 and of 64 input features
    divide. Routers prefer, as trained ones do. The caller's random state is left alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_tiny_config(arch, **(sizes | MIXTURES[arch] | overrides)))
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "bias")):
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def make_tiny_mixture(directory, arch: str = "qwen3_moe", **overrides) -> str:
    """
    Save a model of [`make_mixture`] with its tokenizer and return the directory. Its weights are so large that outputs
    and routes depend on the tokens.
    """
    import torch

    model = make_mixture(arch, **overrides)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                size = 2.0 if name.endswith(("gate.weight", "lm_head.weight")) else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size / parameter.shape[-1] ** 0.5)
    path = Path(directory) / arch
    model.save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return str(path)
