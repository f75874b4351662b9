"""
`python plain.py transformers|vllm|vllm+trl_qarl EXPORT TOKENS OUT`: greedy tokens after the prompts of a file, from an
export as somebody loads it who has never heard of this package. `trl_qarl` cannot be imported here, unless the engine
is vLLM with the package beside it.
"""

import json
import os
import sys
from pathlib import Path


def complete_with_transformers(export, prompts, num_tokens):
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(export)
    model = getattr(transformers, config.architectures[0]).from_pretrained(export, dtype="auto")
    if Path(export, "adapter").exists():
        from peft import PeftModel

        # PEFT reads the shape of `weight`, which compressed-tensors makes in the first forward.
        model(torch.tensor([prompts[0]]))
        model = PeftModel.from_pretrained(model, str(Path(export, "adapter")))
    # Random models end their answers anywhere, and `min_new_tokens` would forbid the end.
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": num_tokens, "do_sample": False}
    outputs = [model.generate(input_ids=torch.tensor([prompt]), **options)[0] for prompt in prompts]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def complete_with_vllm(export, prompts, num_tokens):
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    # Linux requires a process to ask for AMX; vLLM's INT4 kernel does not, and would end with "illegal instruction".
    torch.cpu._init_amx()
    adapter = Path(export, "adapter")
    options, request = {}, None
    if adapter.exists():
        rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
        options = {"enable_lora": True, "max_lora_rank": max(rank, 8)}
        request = LoRARequest("adapter", 1, str(adapter))
    llm = LLM(model=export, max_model_len=64, enforce_eager=True, **options)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(asked, sampling, use_tqdm=False, lora_request=request)
    return [[*answer.outputs[0].token_ids] for answer in answers]


BESIDE = "vllm+trl_qarl"
ENGINES = {
    "transformers": complete_with_transformers,
    "vllm": complete_with_vllm,
    BESIDE: complete_with_vllm,
}


def main(engine, export, tokens, out):
    expected = json.loads(Path(tokens).read_text())["answers"]
    prompts = [each["prompt"] for each in expected]
    found = ENGINES[engine](export, prompts, len(expected[0]["tokens"]))
    loaded = [name for name, module in sys.modules.items() if name.startswith("trl_qarl") and module is not None]
    assert bool(loaded) == (engine == BESIDE), loaded
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.append(os.path.join(sys.prefix, "pictures"))
    if sys.argv[1] != BESIDE:
        os.environ["VLLM_PLUGINS"] = ""
        sys.modules["trl_qarl"] = None  # pyrefly: ignore[unsupported-operation]
    main(*sys.argv[1:])
