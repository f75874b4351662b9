"""The learner's forward counts positions as a rollout does, and groups stay together."""

import pytest
import torch
from datasets import Dataset

from testing_utils.pictures import make_picture_config
from testing_utils.trainings import count_tokens, make
from trl_qarl.checkpoint.load import skeleton
from trl_qarl.forward import scoring_forward, shuffle_groups


PROMPTS = Dataset.from_dict({"prompt": ["1 + " * (1 + i % 4) for i in range(16)]})


def assert_learns_the_same(ours, theirs):
    """Compare the logs of two trainings, to rounding."""
    for row, other in zip(ours, theirs, strict=True):
        names = [name for name in ("loss", "grad_norm", "entropy", "kl", "reward") if name in row]
        assert [other[name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("objective", "takes_layouts"), [("tbpo", True), ("grpo", True), ("grpo", False)])
def test_scoring_and_loss_count_positions_from_the_first_token(tiny_model, tmp_path, objective, takes_layouts):
    trainer = make(
        tiny_model, tmp_path, train_dataset=PROMPTS, loss_type=objective, beta=0.1, max_steps=1, num_generations=2
    )
    trainer.policy.takes_layouts = takes_layouts
    seen = []

    def note(name):
        def hook(module, args, kwargs):
            if kwargs.get("fused_lm_head"):
                seen.append((name, torch.is_grad_enabled()))
                layout, positions = kwargs.get("layout"), kwargs["position_ids"]
                if layout is not None:
                    for part, keys in zip(
                        positions[0].split(layout.segments.query_lengths), layout.segments.key_lengths, strict=True
                    ):
                        assert part.tolist() == list(range(keys - len(part), keys))
                        firsts.append(keys - len(part))
                    return
                for row, mask in zip(positions, kwargs["attention_mask"], strict=True):
                    first, count = mask.tolist().index(1), int(mask.sum())
                    assert row[first : first + count].tolist() == list(range(count))
                    firsts.append(first)

        return hook

    firsts: list[int] = []
    trainer.model.register_forward_pre_hook(note("policy"), with_kwargs=True)
    trainer.ref_model.register_forward_pre_hook(note("reference"), with_kwargs=True)
    trainer.train()
    assert set(seen) == {("policy", False), ("policy", True), ("reference", False)} and len(set(firsts)) > 1


@pytest.mark.parametrize(("kind", "positions"), [("gemma3", [[0, 0, 1]]), ("qwen3_5", None)])
def test_a_model_that_counts_positions_itself_is_left_to_it(kind, positions):
    model = skeleton(make_picture_config(kind))
    found = scoring_forward(dict, model)(attention_mask=torch.tensor([[0, 1, 1]])).get("position_ids")
    assert (found if found is None else found.tolist()) == positions


@pytest.mark.parametrize(
    ("first", "groups"), [(0, [[0, 1, 2], [3, 4, 5], [6, 7]]), (4, [[0, 1], [2, 3, 4], [5, 6, 7]])]
)
def test_groups_are_shuffled_as_wholes(first, groups):
    torch.manual_seed(0)
    seen = set()
    for _ in range(40):
        batch = {"ids": torch.arange(8)[:, None], "names": list("abcdefgh"), "none": None, "total": torch.tensor(5)}
        shuffled = shuffle_groups(batch, 3, first)
        order = shuffled["ids"][:, 0].tolist()
        assert shuffled["names"] == ["abcdefgh"[i] for i in order]
        assert shuffled["none"] is None and shuffled["total"] == 5
        # Each group in its order, one after the other.
        rest = order
        while rest:
            group = next(group for group in groups if rest[0] == group[0])
            assert rest[: len(group)] == group
            rest = rest[len(group) :]
        seen.add(tuple(order))
    assert len(seen) == 6


@pytest.mark.parametrize("objective", ["tbpo", "dapo"])
def test_a_training_learns_the_same_from_one_row_of_tokens(tiny_model, tmp_path, objective):
    options = {"loss_type": objective, "beta": 0.1, "bf16": False, "max_steps": 3, "scheme": "bf16"}
    rows = []
    for takes_layouts in (True, False):
        trainer = make(tiny_model, tmp_path / str(takes_layouts), train_dataset=PROMPTS, **options)
        assert trainer.policy.takes_layouts
        trainer.policy.takes_layouts = takes_layouts
        trainer.train()
        rows.append(trainer.state.log_history)
    assert_learns_the_same(*rows)


def test_forwards_of_fewer_tokens_learn_the_same(tiny_model, tmp_path):
    options = {"loss_type": "bnpo", "beta": 0.1, "bf16": False, "max_steps": 2, "scheme": "bf16", "num_generations": 2}
    options |= {"per_device_train_batch_size": 8, "steps_per_generation": 1}
    rows, most = [], []
    for max_tokens in (None, 40):
        folder = tmp_path / str(max_tokens)
        trainer = make(tiny_model, folder, train_dataset=PROMPTS, max_tokens_per_forward=max_tokens, **options)
        num_tokens = count_tokens(trainer)
        trainer.train()
        rows.append(trainer.state.log_history)
        most.append(max(num_tokens))
    assert most[0] > 40 >= most[1]
    assert_learns_the_same(*rows)


@pytest.mark.parametrize(("keep_groups", "keeps"), [(None, True), (False, False)])
def test_an_update_has_whole_groups_unless_told_otherwise(tiny_model, tmp_path, keep_groups, keeps):
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 4, "max_steps": 1}
    prompts = Dataset.from_dict({"prompt": [f"{i} +" for i in range(16)]})
    trainer = make(tiny_model, tmp_path, train_dataset=prompts, keep_groups=keep_groups, **options)
    trainer.train()
    parts = [[tuple(ids) for ids in part["prompt_ids"].tolist()] for part in trainer._buffered_inputs]
    assert len({prompt for part in parts for prompt in part}) == 8
    assert all(len(set(part)) == 2 for part in parts) is keeps


@pytest.mark.parametrize(("keep_groups", "keeps"), [(None, False), (True, True)])
def test_an_update_of_one_prompt_is_made_only_if_asked_for(tiny_model, tmp_path, keep_groups, keeps):
    trainer = make(tiny_model, tmp_path, per_device_train_batch_size=4, num_generations=4, keep_groups=keep_groups)
    assert trainer._keeps_groups is keeps
