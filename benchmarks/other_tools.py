"""
Checks that training can continue from the codes of another tool, llm-compressor.

1. In a separate environment, because llm-compressor needs other versions (`pip install llmcompressor`):
   `python benchmarks/other_tools.py write MODEL FOLDER --method gptq --scheme W4A16 --group_size 32`.
2. In the environment of this package: `python benchmarks/other_tools.py read FOLDER`. This loads masters, compares
   their codes and scales with the file's, trains one update and exports.

Calibration texts and prompts are lines of this documentation, or those of `--lines FILE`.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path


PAGES = Path(__file__).parent.parent / "docs"


def texts(args: Namespace) -> list[str]:
    lines = args.lines.read_text() if args.lines else "\n".join(p.read_text() for p in sorted(PAGES.glob("*.md")))
    return [line for line in lines.splitlines() if args.lines or len(line) > 20][: args.num_texts]


def write(args: Namespace) -> None:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.accelerator.is_available():
        # AWQ in llm-compressor 0.14 pins its cache in memory, which needs an accelerator.
        torch.Tensor.pin_memory = lambda tensor, *args: tensor
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype="bfloat16"),
        AutoTokenizer.from_pretrained(args.model),
    )
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": args.group_size}
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": args.scheme == "W4A16"}}
    modifier = {"gptq": GPTQModifier, "awq": AWQModifier}[args.method]
    ids = [tokenizer(text, truncation=True, max_length=256) for text in texts(args)]
    columns = {name: [each[name] for each in ids] for name in ("input_ids", "attention_mask")}
    recipe = modifier(config_groups={"group_0": group}, ignore=["lm_head"])
    oneshot(model=model, dataset=Dataset.from_dict(columns), recipe=recipe, num_calibration_samples=len(ids))
    model.save_pretrained(args.folder, save_compressed=True)
    tokenizer.save_pretrained(args.folder)


def read(args: Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    from trl_qarl import QaRLConfig, QaRLTrainer
    from trl_qarl.checkpoint.load import load_frozen_model, load_masters
    from trl_qarl.quantization.own_grid import compare_groups
    from trl_qarl.quantization.swap import quantized_layers

    model, theirs = load_masters(str(args.folder)), quantized_layers(load_frozen_model(str(args.folder)))
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    layer = next(iter(theirs.values()))
    config = QaRLConfig(
        f"{args.folder}/trained",
        scheme=layer.scheme.name,
        group_size=layer.group_size,
        use_vllm=False,
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=32,
        learning_rate=1e-5,
        save_strategy="no",
        report_to="none",
    )
    prompts = Dataset.from_dict({"prompt": texts(args)})
    # Any reward that differs between answers.
    trainer = QaRLTrainer(
        model=model,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **kwargs: [float(sum(map(ord, text)) % 7) for text in completions],
    )
    layers = quantized_layers(trainer.model)
    found = [compare_groups(layers[name].low_bit_weight(), layer.low_bit_weight()) for name, layer in theirs.items()]
    has_scale, num_moved = (torch.cat([part.flatten() for part in parts]) for parts in zip(*found, strict=True))
    exact, moved = (has_scale & (num_moved == 0)).sum().item(), (has_scale & (num_moved > 0)).sum().item()
    print(
        f"{layer.scheme.name}: {len(has_scale)} groups, {exact} as in the file, {moved} with codes moved, {(~has_scale).sum()} with another scale"
    )
    trainer.train()
    print({key: value for row in trainer.state.log_history for key, value in row.items() if "flip" in key})
    folder = trainer.export_model(f"{args.folder}/export")
    exported = quantized_layers(load_frozen_model(str(folder)))
    same = [torch.equal(exported[name].low_bit_weight().qdata, layers[name].low_bit_weight().qdata) for name in layers]
    print(f"exported: {sum(same)} of {len(same)} layers with the codes of the trained policy")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[1])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("write", "read"):
        command = commands.add_parser(name)
        if name == "write":
            command.add_argument("model")
            command.add_argument("--method", choices=["gptq", "awq"], default="gptq")
            command.add_argument("--scheme", choices=["W4A16", "W4A16_ASYM"], default="W4A16")
            command.add_argument("--group_size", type=int, default=128)
        command.add_argument("folder", type=Path)
        command.add_argument("--lines", type=Path)
        command.add_argument("--num_texts", type=int, default=64)
    args = parser.parse_args()
    {"write": write, "read": read}[args.command](args)
