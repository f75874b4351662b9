"""
Asks the code of vLLM for the kernel of each scheme on GPUs of several compute capabilities:
`python kernels.py X.Y ...`.

Layers are built on the CPU (`fake_gpu.py`), nothing is repacked or computed. Twice: as vLLM chooses on its own, and as
our engines are asked for (`trl_qarl.engines.gpu_kernels`). What is found is compared with what is recorded for the
release in `kernels/`, and a difference is an error that a person looks at: vLLM has a new favourite, which nobody has
rehearsed. Our own engines must have the kernel that is expected. `--write` records what is found.
"""

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path


HERE = Path(__file__).parent
CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
# Those of other grids in the same containers have the same kernels.
DENSE = ("w4a16", "w8a16", "w8a8", "fp8", "w4a8", "mxfp4a16", "nvfp4a16")
EXPERTS = ("bf16", "w4a16", "w8a8", "fp8")
REFUSED = "refused"


def one_capability(text: str) -> dict[str, dict[str, str]]:
    """Return by scheme what vLLM chooses on its own ("default") and for our engines ("asked")."""
    sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]
    import fake_gpu

    capability = tuple(map(int, text.split(".")))
    fake_gpu.install(capability)
    import torch
    import vllm
    from transformers import AutoModelForCausalLM
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from testing_utils import make_tiny_mixture, make_tiny_model
    from trl_qarl import prepare_model
    from trl_qarl.checkpoint.layout import quantization_config
    from trl_qarl.engines.gpu_kernels import Gpu, kernel_arguments, reason_against, unexpected_kernels
    from trl_qarl.quantization.inventory import Inventory
    from trl_qarl.quantization.schemes import get_scheme
    from trl_qarl.vllm_plugin import register
    from trl_qarl.vllm_plugin.engine_tensors import kernels_in_use
    from trl_qarl.wire.protocol import FILE_BACKEND

    register()
    gpu = Gpu(capability, fake_gpu.NAMES.get(capability, "a GPU"), vllm.__version__)

    def kernels(path, quantization, arguments):
        try:
            config = EngineArgs(
                model=path,
                dtype="bfloat16",
                enforce_eager=True,
                load_format="dummy",
                # Others want memory of the GPU when they are made.
                attention_backend="FLASH_ATTN",
                max_model_len=256,
                max_num_batched_tokens=256,
                hf_overrides={"quantization_config": quantization} if quantization else {},
                weight_transfer_config={"backend": FILE_BACKEND},
                **arguments,
            ).create_engine_config()
            config.device_config.device = torch.device("cpu")
            fake_gpu.init_groups(config)
            with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
                return sorted(kernels_in_use(initialize_model(vllm_config=config, model_config=config.model_config)))
        except Exception as error:
            return [f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"]

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "": make_tiny_model(f"{folder}/dense", "llama", hidden_size=256, intermediate_size=512),
            "mixture ": make_tiny_mixture(f"{folder}/mixture"),
        }
        for kind, name in [("", scheme) for scheme in DENSE] + [("mixture ", scheme) for scheme in EXPERTS]:
            scheme, quantization = get_scheme(name), None
            if scheme.is_quantized:
                learner = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
                prepare_model(learner, scheme, scale_dtype=torch.bfloat16)
                quantization = quantization_config(Inventory.of(learner))
            default = kernels(models[kind], quantization, {})
            if reason_against(scheme, gpu):
                asked = [REFUSED]
            else:
                arguments = kernel_arguments(quantization, "bfloat16", False, gpu)
                asked = kernels(models[kind], quantization, arguments) if arguments else default
                experts = [scheme] if kind else []
                if any(": " in kernel for kernel in asked):
                    sys.exit(
                        f"{kind}{name} on {gpu}: vLLM does not start, and trl_qarl does not refuse it: {asked[0]}"
                    )
                for problem in unexpected_kernels(asked, [scheme], experts if scheme.is_quantized else [], gpu):
                    sys.exit(f"{kind}{name}: {problem}")
            found[f"{kind}{name}"] = {"default": " ".join(default), "asked": " ".join(asked)}
    return {"release": gpu.release, "kernels": found}


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", nargs="*", default=CAPABILITIES, metavar="X.Y")
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument("--one", metavar="X.Y", help="print one of them as JSON")
    args = parser.parse_args()
    if args.one:
        print("FOUND" + json.dumps(one_capability(args.one)))
        return 0
    num_changes = 0
    for capability in args.capabilities:
        # vLLM has one platform for the whole process.
        run = subprocess.run([sys.executable, __file__, "--one", capability], stdout=subprocess.PIPE, text=True)
        line = next((line for line in run.stdout.splitlines() if line.startswith("FOUND")), None)
        if run.returncode or line is None:
            print(f"{capability}: failed, see above")
            return 1
        found = json.loads(line.removeprefix("FOUND"))
        file = HERE / "kernels" / f"{found['release']}.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        before, now = record.get(capability, {}), found["kernels"]
        changed = [name for name in sorted(before.keys() | now.keys()) if now.get(name) != before.get(name)]
        if args.write:
            file.write_text(json.dumps(record | {capability: now}, indent=1, sort_keys=True) + "\n")
        else:
            num_changes += len(changed)
            for name in changed:
                print(f"{capability}, {name}: {before.get(name)} is recorded, {now.get(name)} was found")
        print(
            f"vLLM {found['release']}, capability {capability}: {len(now)} schemes, {len(changed)} changed", flush=True
        )
    return int(num_changes > 0)


if __name__ == "__main__":
    sys.exit(main())
