import pytest
import torch

from testing_utils import make_mixture
from trl_qarl.checkpoint.layout import iter_checkpoint_layers
from trl_qarl.quantization.swap import prepare_model
from trl_qarl.rollout.publisher import Publisher
from trl_qarl.wire.delta import is_delta
from trl_qarl.wire.fingerprint import differing_entries, fingerprint
from trl_qarl.wire.patches import PatchBook


LAYER = {
    "layers.0.q.weight_packed": torch.arange(6000, dtype=torch.int32).view(60, 100) * 104729,
    "layers.0.q.weight_scale": torch.linspace(-1, 1, 600, dtype=torch.bfloat16).view(60, 10),
    "layers.0.norm.bias": torch.ones(60),
}


def flip(layer, seed):
    """Some codes and scales of a layer changed."""
    generator, changed = torch.Generator().manual_seed(seed), dict(layer)
    for name in ("layers.0.q.weight_packed", "layers.0.q.weight_scale"):
        at = torch.rand(layer[name].shape, generator=generator) < 0.02
        changed[name] = torch.where(at, -layer[name], layer[name])
    return changed


class Engine:
    """A copy of what was published, which a learner that sends changes asks about."""

    def __init__(self):
        self.copy, self.published = PatchBook(is_kept=False), {}

    def keep_copy(self):
        return self.copy.confirm(self.published)

    def receive(self, tensors, layer):
        """Take a publication of `layer`; an error, or a difference, leaves nothing published."""
        published, self.published, arrived = self.published, {}, {}
        for name, tensor in self.copy.take(tensors, published, arrived):
            arrived[name] = fingerprint(tensor)
        if arrived == {name: fingerprint(tensor) for name, tensor in layer.items()}:
            self.published = arrived
        return bool(self.published)


class Learner(Publisher):
    """A publisher of layers that are no model's."""

    def __init__(self, engine):
        self.engine, self._patches, self._delta_seconds = engine, PatchBook(), 0.0


def publish(learner, layer, published):
    """Tensors sent for `layer` to an engine that, as the learner believes, holds `published`."""
    learner._begin_patches(published)
    return learner._pack(list(layer.items()))


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def learner(engine):
    """A learner that has published `LAYER` to the engine."""
    learner = Learner(engine)
    sent = publish(learner, LAYER, {})
    assert [name for name, _ in sent] == list(LAYER) and engine.receive(sent, LAYER)
    return learner


def test_only_changes_of_what_the_engine_has_confirmed_are_sent(engine, learner):
    layers = [LAYER]
    for seed in range(3):
        layers.append(flip(layers[-1], seed))
        sent = publish(learner, layers[-1], engine.published)
        assert [name for name, _ in sent] == ["qarl.delta.layers.0"] and sent[0][1].nbytes < 1500
        assert engine.receive(sent, layers[-1])
    # Nothing changed: the block says so in a few bytes.
    assert publish(learner, layers[-1], engine.published)[0][1].nbytes < 400
    # An engine that was started again, one that has lost a publication, and one that took somebody else's get
    # everything.
    for stranger in (Engine(), engine):
        stranger.published = {}
        learner.engine = stranger
        assert not any(is_delta(name) for name, _ in publish(learner, LAYER, {"a": "b"}))
    assert not any(is_delta(name) for name, _ in publish(learner, LAYER, {}))


@pytest.mark.parametrize(("arch", "block"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")])
def test_one_expert_that_changed_is_sent_as_changes_of_its_layers_stacks(engine, arch, block):
    model = make_mixture(arch)
    prepare_model(model, "w4a16", scale_dtype=torch.bfloat16)

    def last_layer():
        layers = map(dict, iter_checkpoint_layers(model, torch.bfloat16, stacks_experts=True))
        return next(layer for layer in layers if "model.layers.1.input_layernorm.weight" in layer)

    layer, learner = last_layer(), Learner(engine)
    assert sum(f".{block}.experts." in name for name in layer) == 6
    assert engine.receive(publish(learner, layer, {}), layer)
    before = dict(engine.published)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[5, :4] += 0.01
    layer = last_layer()
    [(name, changes)] = publish(learner, layer, before)
    assert is_delta(name) and changes.nbytes < 1500 and engine.receive([(name, changes)], layer)
    differing = [
        entry for name, value in before.items() for entry, *_ in differing_entries(name, value, engine.published[name])
    ]
    down = f"model.layers.1.{block}.experts.{'w2' if arch == 'mixtral' else 'down_proj'}"
    assert sorted(differing) == [f"{down}_packed[5]", f"{down}_scale[5]"]


def test_a_matrix_of_another_shape_or_dtype_is_sent_whole(engine, learner):
    wider = LAYER | {"layers.0.norm.bias": torch.ones(61), "layers.0.q.weight_scale": torch.ones(60, 10)}
    sent = publish(learner, wider, engine.published)
    assert [name for name, _ in sent] == ["layers.0.q.weight_scale", "layers.0.norm.bias", "qarl.delta.layers.0"]
    assert engine.receive(sent, wider)


def test_a_layer_of_another_plan_is_sent_whole_and_nothing_is_kept_of_the_old_one(engine, learner):
    unquantized = {"layers.0.q.weight": torch.ones(60, 800), "layers.0.norm.bias": LAYER["layers.0.norm.bias"]}
    for layer, whole in ((unquantized, ["layers.0.q.weight"]), (LAYER, [*LAYER][:2])):
        sent = publish(learner, layer, engine.published)
        assert [name for name, _ in sent] == [*whole, "qarl.delta.layers.0"] and engine.receive(sent, layer)
        learner._begin_patches(engine.published)
        assert layer.keys() == engine.copy.tensors.keys() == engine.copy._elements.keys()
        assert layer.keys() == learner._patches.tensors.keys()


def test_the_changes_of_another_session_are_refused_and_each_trainer_begins_with_everything(engine, learner):
    """Two trainers have the engine in turn; one of them comes back, and a block of it comes late."""
    ours, theirs = learner, Learner(engine)
    confirmed, after = dict(engine.published), flip(LAYER, 0)
    late = publish(ours, after, confirmed)
    their_layer = flip(LAYER, 7)
    sent = publish(theirs, their_layer, {})
    assert not any(is_delta(name) for name, _ in sent) and engine.receive(sent, their_layer)
    # We believe that the engine has what it has confirmed to us.
    sent = publish(ours, after, confirmed)
    assert not any(is_delta(name) for name, _ in sent)
    with pytest.raises(RuntimeError, match="the changes are for int32"):
        engine.receive(late, after)
    assert engine.receive(sent, after)


def test_nothing_is_kept_for_trainers_that_do_not_ask():
    copy = PatchBook(is_kept=False)
    list(copy.take(LAYER.items(), {}, {}))
    assert not copy.tensors
    assert copy.confirm({name: fingerprint(tensor) for name, tensor in LAYER.items()}) == ""
    list(copy.take(LAYER.items(), {}, {}))
    size = sum(tensor.nbytes for tensor in copy.tensors.values())
    assert size == sum(tensor.nbytes for tensor in LAYER.values())
    # The copy is its own memory, and that of tensors which came before is used again.
    pointers = {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
    assert not set(pointers.values()) & {tensor.data_ptr() for tensor in LAYER.values()}
    list(copy.take(flip(LAYER, 0).items(), {}, {}))
    assert pointers == {name: tensor.data_ptr() for name, tensor in copy.tensors.items()}
