"""Decisions about the old log-probs of a generation batch."""

import torch
from torch import nn

from trl_qarl.quantization.swap import prepare_model
from trl_qarl.quantization.versions import kept_version
from trl_qarl.trainer.scoring import ScoringPlan


def test_a_batch_drawn_ahead_is_scored_with_its_weights():
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128))
    prepare_model(model, "w8a16")
    inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    drawn, before = ScoringPlan("learner", 3, kept_version(model)), model(inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    assert drawn.is_stale and not torch.equal(model(inputs), before)
    with drawn.at_drawn(model):
        assert torch.equal(model(inputs), before)
    now = ScoringPlan("learner", 4)
    with now.at_drawn(model):
        assert not torch.equal(model(inputs), before)
