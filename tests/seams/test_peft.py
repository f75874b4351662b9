"""Private parts of PEFT that we use."""

import pytest


pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear

from seams import takes


def test_methods_that_we_replace_on_the_instance_are_called_there():
    """`LoraSource` puts methods onto a LoRA layer that call those of the class."""
    assert {"forward", "merge", "unmerge"} <= vars(Linear).keys()
    assert takes(Linear.merge, "self") == takes(Linear.unmerge, "self") == takes(Linear.forward, "self", "x") == []


def test_a_lora_layer_has_the_parts_that_we_read():
    import torch

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["0"])
    layer = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), config).base_model.model[0]
    assert type(layer) is Linear
    assert layer.scaling["default"] == 2.0 and not layer.merged and not layer.disable_adapters
    assert [*layer.active_adapters] == ["default"] and layer.base_layer.weight.shape == (8, 8)
    assert layer.lora_A["default"].weight.shape == (2, 8) and layer.lora_B["default"].weight.shape == (8, 2)
    assert layer.get_delta_weight("default").shape == (8, 8) and "default" in layer.lora_dropout


def test_a_class_of_ours_can_be_registered_as_a_linear_layer():
    config = LoraConfig()
    config._register_custom_module({type("Layer", (), {}): Linear})
    assert takes(PeftModel.from_pretrained, "model", "model_id", "config", "is_trainable") == []
    assert takes(get_peft_model_state_dict, "model", "adapter_name", "save_embedding_layers") == []
