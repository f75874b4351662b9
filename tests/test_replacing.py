from types import SimpleNamespace

import pytest
from torch import nn

from trl_qarl.replacing import replaced


def test_own_attributes_come_back_after_an_error():
    owner = SimpleNamespace(kept=1)
    with pytest.raises(KeyError), replaced(owner, kept=2, new=3):
        assert (owner.kept, owner.new) == (2, 3)
        raise KeyError
    assert vars(owner) == {"kept": 1}


def test_a_method_of_the_class_is_uncovered_again():
    layer = nn.Linear(2, 2)
    with replaced(layer, forward=lambda x: x):
        assert layer(5) == 5
    assert "forward" not in vars(layer)
