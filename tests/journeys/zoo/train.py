"""
`python train.py FAMILY FOLDER DTYPE all|bf16|lora|ranks`: makes a tiny random model of a family in a folder, trains it
for three updates with vLLM, as a user would, and writes what was found to `FOLDER/trained.json`. `all` weights are
trained with `w4a16`, and the policy is exported; `bf16` is the same without quantization, `lora` an adapter on the
low-bit base, and `ranks` has vLLM in a server of two ranks instead of this process.
"""

import json
import os
import sys
from pathlib import Path

from families import ADAPTED, FAMILIES, SCHEMES, SIZES, WITH_TOWER, WITHOUT_HEAD_DIM

from testing_utils import make_problems, make_tiny_tokenizer, spread
from testing_utils.pictures import make_picture_model, make_picture_processor
from testing_utils.towers import TOWERS


NUM_TEXTS, NUM_TOKENS = 4, 24
# torchvision, without which vLLM does not load Qwen3.5, also for text.
sys.path.append(os.path.join(sys.prefix, "pictures"))


def make_model(family: str, folder: Path) -> None:
    """Save a random model, every tensor of which differs from a new model's: neither zeros nor ones may hide a
    forward that leaves one out."""
    import torch

    from trl_qarl.checkpoint.load import auto_class

    torch.manual_seed(0)
    if family in TOWERS:
        config, processor = TOWERS[family]()
        config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, processor.tokenizer.eos_token_id
        model = auto_class(config).from_config(config, dtype=torch.float32)
    elif family in WITH_TOWER:
        model, processor = make_picture_model(family), make_picture_processor(family)
    else:
        model, processor = _make_text_model(family), make_tiny_tokenizer()
        # Some configurations need the number of one.
        processor.bos_token = "<|im_start|>"
    head = model.get_output_embeddings()
    # A tied one that large repeats the last token, so that completions, and with them rewards, do not differ.
    is_tied = head is None or head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim > 1 and tensor.shape[-1] > 8:
                size = 2.0 if "lm_head" in name and not is_tied else 1.0
                tensor.copy_(torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5 * size)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape) * 0.1)
    if family in SCHEMES:
        from trl_qarl import export_checkpoint, prepare_model

        prepare_model(model, SCHEMES[family])
        export_checkpoint(model, folder)
    else:
        model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _make_text_model(family: str):
    import torch
    from transformers import AutoConfig

    from trl_qarl.checkpoint.load import auto_class

    fields = SIZES | FAMILIES[family]
    kind = family.partition(" ")[0]
    # Some configurations compute it, and have no setter.
    without = {"head_dim"} if kind in WITHOUT_HEAD_DIM else set()
    config = AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name not in without})
    return auto_class(config).from_config(config, dtype=torch.float32)


def log_probs(trainer, rows):
    """Log-probs of texts under the trained policy."""
    import torch

    from trl_qarl.quantization.swap import quantized_forward

    ids, model = torch.tensor(rows), trainer.model.eval()
    with torch.no_grad(), quantized_forward(model), trainer.accelerator.autocast():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].tolist()


def main(family: str, folder: Path, dtype: str, trained: str) -> dict:
    import torch
    from peft import LoraConfig

    from trl_qarl import QaRLConfig, QaRLTrainer
    from trl_qarl.engines.server_process import free_port
    from trl_qarl.quantization.swap import freeze_model

    make_model(family, folder / "model")
    engine = {"vllm_mode": "colocate"}
    if trained == "ranks":
        engine = {"vllm_mode": "server", "vllm_server_autostart": True, "vllm_server_port": free_port()}
        engine |= {"vllm_tensor_parallel_size": 2, "group_size": 32}
    args = QaRLConfig(
        str(folder / "out"),
        scheme="bf16" if trained == "bf16" else SCHEMES.get(family, "w4a16"),
        use_vllm=True,
        **engine,
        vllm_max_model_length=128,
        bf16=dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=1,
        max_completion_length=24,
        learning_rate=1e-2,
        optim="adamw_torch",
        save_strategy="no",
        disable_tqdm=True,
        disable_dropout=True,
    )
    adapter = LoraConfig(r=4, target_modules=ADAPTED.get(family, "all-linear")) if trained == "lora" else None
    trainer = QaRLTrainer(str(folder / "model"), spread, args, make_problems(), peft_config=adapter)
    report = trainer.swap_report
    reasons = {}
    for name, reason in report.skipped.items():
        reasons.setdefault(reason, []).append(name)
    found = {"numerics": trainer.numerics, "kept": reasons, "converted": sorted(report.converted)}
    print(report)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mismatch/abs_logp_mean" in row]
    found["mismatch"] = [row["mismatch/abs_logp_mean"] for row in rows]
    if trained != "all":
        return found
    found["flips"] = [
        row.get("quant/code_flip_rate") for row in trainer.state.log_history if "quant/code_flip_rate" in row
    ]
    trainer.export_model(folder / "export")
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(4, 260, (NUM_TEXTS, NUM_TOKENS), generator=generator).tolist()
    found |= {"texts": texts, "log_probs": log_probs(trainer, texts)}
    if dtype == "float32":
        # Roundings also change routes of a mixture.
        freeze_model(trainer.model)
        trainer.model.to(torch.bfloat16)
        rounded = torch.tensor(log_probs(trainer, texts)) - torch.tensor(found["log_probs"])
        found["in_bfloat16"] = rounded.abs().mean().item()
    return found


if __name__ == "__main__":
    family, folder, dtype, trained = sys.argv[1:]
    found = main(family, Path(folder), dtype, trained)
    Path(folder, "trained.json").write_text(json.dumps(found))
