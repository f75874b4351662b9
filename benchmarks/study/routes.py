"""
Records where sampler and learner of a mixture choose different experts, and how evenly experts are used.
`long_study.py` writes one row per generation batch to `routes.jsonl`.
"""

import json
from pathlib import Path

import torch


ROUTES_FILE = "routes.jsonl"


class RouteRecorder:
    """
    Hooks the routers of a trainer without vLLM, and appends a row to `path` for each generation batch.

    - `flipped`: share of routes on which learner and sampler chose different sets of experts, over all layers and all
      positions that predict a sampled token.
    - `flipped_tokens`: share of tokens with such a route in any layer.
    - `load`: share of the sampler's choices by layer and expert.
    """

    def __init__(self, trainer, path: Path):
        self.trainer, self.path, self.side = trainer, path, None
        self.routers = [module for name, module in trainer.model.named_modules() if name.endswith(".mlp.gate")]
        self.parts: dict[str, list[torch.Tensor]] = {}
        for router in self.routers:
            router.register_forward_hook(self._record)
        trainer._generate_single_turn = self._following("sampler", trainer._generate_single_turn)
        score = self._following("learner", trainer._get_per_token_logps_and_entropies)
        trainer._get_per_token_logps_and_entropies = score
        self._complete, trainer._generate_and_score_completions = (
            trainer._generate_and_score_completions,
            self.complete,
        )

    def _record(self, router, args, output) -> None:
        if self.side in self.parts:
            self.parts[self.side].append(output[2].sort(-1).values)

    def _following(self, side: str, method):
        def call(*args, **kwargs):
            self.side = side
            try:
                return method(*args, **kwargs)
            finally:
                self.side = None

        return call

    def complete(self, inputs):
        """Generate and score a batch as the trainer does, and write its row."""
        self.parts = {"sampler": [], "learner": []}
        output = self._complete(inputs)
        parts, self.parts = self.parts, {}
        mask, num_layers = output["completion_mask"], len(self.routers)
        # The sampler's forwards cover all sequences: the prompts first, then one token each. The learner's forwards
        # cover whole sequences, some at a time.
        sampler, learner = ([parts[side][layer::num_layers] for layer in range(num_layers)] for side in parts)
        sampler = [torch.cat([part.unflatten(0, (len(mask), -1)) for part in layer], 1) for layer in sampler]
        learner = [torch.cat(layer).unflatten(0, (len(mask), -1)) for layer in learner]
        row = summarize(torch.stack(sampler), torch.stack(learner), mask, self.routers[0].num_experts)
        with self.path.open("a") as file:
            file.write(json.dumps({"step": self.trainer.state.global_step + 1} | row) + "\n")
        return output


def summarize(sampler: torch.Tensor, learner: torch.Tensor, mask: torch.Tensor, num_experts: int) -> dict:
    """
    Return a row of [`RouteRecorder`] from the routes of both sides, `(layers, B, positions, k)`, and the mask `(B, T)`
    of the completions. The learner has one more position, the last token.

    >>> sampler, learner = torch.tensor([[[[0, 1], [0, 1]]]]), torch.tensor([[[[0, 1], [0, 2], [1, 2]]]])
    >>> summarize(sampler, learner, torch.ones(1, 2), 4)
    {'flipped': 0.5, 'flipped_tokens': 0.5, 'load': [[0.5, 0.5, 0.0, 0.0]]}
    """
    # The position before a token predicts it.
    length, counted = mask.shape[1], mask.bool()
    sampler, learner = (side[:, counted] for side in (sampler[:, :, -length:], learner[:, :, -length - 1 : -1]))
    differs = (sampler != learner).any(-1).double()
    load = [torch.bincount(layer.flatten(), minlength=num_experts) / layer.numel() for layer in sampler]
    return {
        "flipped": differs.mean().item(),
        "flipped_tokens": differs.amax(0).mean().item(),
        "load": [[round(share, 4) for share in shares.tolist()] for shares in load],
    }


def effective_experts(load: list[list[float]]) -> float:
    """
    Return the effective number of experts: exp of the entropy of `load`, averaged over the layers.

    >>> effective_experts([[0.5, 0.5, 0.0, 0.0]])
    2.0
    """
    shares = torch.tensor(load, dtype=torch.float64)
    return torch.special.entr(shares).sum(-1).exp().mean().item()
