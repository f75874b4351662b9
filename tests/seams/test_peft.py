"""Private parts of PEFT that we use."""

import pytest


pytest.importorskip("peft")

from peft import LoraConfig
from peft.tuners.lora import Linear

from seams import takes


def test_replaced_methods_are_called_on_the_instance():
    """`LoraSource` puts methods onto a LoRA layer that call those of the class."""
    assert {"forward", "merge", "unmerge"} <= vars(Linear).keys()
    assert takes(Linear.merge, "self") == takes(Linear.unmerge, "self") == takes(Linear.forward, "self", "x") == []


def test_a_class_of_ours_can_be_registered_as_a_linear_layer():
    config = LoraConfig()
    config._register_custom_module({type("Layer", (), {}): Linear})
