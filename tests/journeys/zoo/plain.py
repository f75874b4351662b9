"""
`python plain.py transformers|vllm FOLDER`: log-probs of the texts in `FOLDER/trained.json` under the export next to
it, as somebody loads it who has never heard of this package, which cannot be imported here; in `FOLDER/ENGINE.json`.
"""

import json
import os
import sys
from pathlib import Path


def score_with_transformers(export, texts):
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(export)
    cls = getattr(transformers, config.architectures[0])
    model, info = cls.from_pretrained(export, dtype="auto", attn_implementation="eager", output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"transformers has given random values to {sorted(info['missing_keys'])}")
    if config.quantization_config["quant_method"] == "mxfp4":
        # Dequantized to bfloat16, next to layers in the export's dtype.
        model.to(config.dtype)
    model.eval()
    ids = torch.tensor(texts)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].tolist()


def score_with_vllm(export, texts):
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()
    # Its INT4 kernel for CPUs has no float32.
    llm = LLM(model=export, dtype="bfloat16", max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.1)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    answers = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], text[1:], strict=True)]
        for answer, text in zip(answers, texts, strict=True)
    ]


if __name__ == "__main__":
    os.environ["VLLM_PLUGINS"] = ""
    sys.path.append(os.path.join(sys.prefix, "pictures"))
    sys.modules["trl_qarl"] = None
    engine, folder = sys.argv[1:]
    texts = json.loads(Path(folder, "trained.json").read_text())["texts"]
    score = {"transformers": score_with_transformers, "vllm": score_with_vllm}[engine]
    scores = score(str(Path(folder, "export")), texts)
    Path(folder, f"{engine}.json").write_text(json.dumps(scores))
