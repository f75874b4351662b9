"""
Measures how far the ratios of TBPO move, depending on the length of a completion.

Samples completions, trains on them as on one generation batch, and prints for stretches of several lengths the spread
of `log r` (the mean change of a token's log-prob) and the band that would drop a quarter of them:

    python benchmarks/study/trust_bands.py --learning_rate 1e-5
"""

import argparse
import math

import torch

from trl_qarl import prepare_model
from trl_qarl.demo.smollm2 import convert_smollm2
from trl_qarl.muon import create_muon_adamw
from trl_qarl.objectives.tbpo import tbpo_loss


PROMPTS = (
    "Write a short story about a fox that finds a key.",
    "Explain how rain is made.",
    "Describe a day in a small harbour town.",
    "Why do people keep gardens?",
)


def log_probs(model, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Return the log-probs of `ids[:, start:]`, `(B, T)`."""
    logits = model(ids[:, :-1]).logits[:, start - 1 :].float()
    return logits.log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="hub id or folder; by default SmolLM2-135M-Instruct")
    parser.add_argument("--scheme", default="w4a16-observer")
    parser.add_argument("--optim", choices=["muon", "adamw_torch"], default="adamw_torch")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--num_updates", type=int, default=7, help="updates that follow the first, on-policy one")
    parser.add_argument("--num_completions", type=int, default=8, help="completions of each of the four prompts")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(args.seed)
    path = args.model_name_or_path or convert_smollm2("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    prepare_model(model, args.scheme)
    prompts = tokenizer([p for p in PROMPTS for _ in range(args.num_completions)], return_tensors="pt", padding=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ids = model.generate(
            **prompts, do_sample=True, top_k=0, min_new_tokens=args.length, max_new_tokens=args.length
        )
        start = prompts.input_ids.shape[1]
        old = torch.cat([log_probs(model, row, start) for row in ids.split(8)])
    # Random signs instead of advantages: how far a ratio moves does not depend on the reason for the push.
    advantages = torch.where(torch.rand(len(ids)) < 0.5, -1.0, 1.0)
    if args.optim == "muon":
        decayed = {name for name, p in model.named_parameters() if p.ndim > 1}
        optimizer = create_muon_adamw(model, decayed, lr=args.learning_rate, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    bands = {"positive_epsilon_high": math.inf, "negative_epsilon_low": 1.0, "negative_epsilon_high": math.inf}
    for rows in torch.randperm(len(ids)).chunk(args.num_updates):
        with torch.autocast("cpu", torch.bfloat16):
            now = log_probs(model, ids[rows], start)
        mask = torch.ones_like(now)
        loss, _ = tbpo_loss(now, old[rows], None, advantages[rows], mask, mismatch_cap=2.0, **bands)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        change = torch.cat([log_probs(model, row, start) for row in ids.split(8)]) - old

    print(
        f"{args.scheme}, {args.optim}, learning rate {args.learning_rate}, {args.num_updates} updates, {len(ids)} completions"
    )
    print("| tokens | mean of log r, A > 0 | A < 0 | standard deviation | band that keeps 75 %: A > 0 | A < 0 |")
    print("|---|---|---|---|---|---|")
    points = []
    length = 4
    while length <= args.length:
        log_ratio = change.unfold(1, length, length).mean(-1)  # every stretch of that length
        positive, negative = log_ratio[advantages > 0].flatten(), log_ratio[advantages < 0].flatten()
        spread = torch.cat([positive - positive.mean(), negative - negative.mean()]).std().item()
        points.append((math.log(length), math.log(spread)))
        row = (positive.mean(), negative.mean(), spread, positive.quantile(0.75), negative.abs().quantile(0.75))
        print(f"| {length} | " + " | ".join(f"{float(value):.1e}" for value in row) + " |")
        length *= 4
    x, y = (torch.tensor(values) for values in zip(*points, strict=True))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    print(f"The spread falls with the length to the power of {slope:.2f}.")


if __name__ == "__main__":
    main()
