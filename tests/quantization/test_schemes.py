import dataclasses

import pytest

from trl_qarl.quantization.schemes import SCHEMES, get_scheme


def test_schemes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_scheme("w4a16").num_bits = 8


def test_unknown_scheme_names_the_value_and_the_choices():
    with pytest.raises(ValueError, match=r"Unknown scheme 'w3a16'.*'w4a16'"):
        get_scheme("w3a16")


@pytest.mark.parametrize("group_size", [0, 16, 48, 256, -1])
def test_unsupported_group_size_names_the_allowed_ones(group_size):
    with pytest.raises(ValueError, match=rf"group_size={group_size} .*\[32, 64, 128\]"):
        get_scheme("w4a16", group_size)


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "fp8", "bf16"])
def test_group_size_on_a_scheme_without_groups_is_refused(name):
    with pytest.raises(ValueError, match="has no groups"):
        get_scheme(name, 64)


@pytest.mark.parametrize(
    ("requested", "in_features", "used"),
    [(128, 1536, 128), (128, 576, 64), (128, 96, 32), (64, 1536, 64), (32, 1536, 32), (64, 96, 32)],
)
def test_group_size_falls_back_to_the_next_smaller_divisor(requested, in_features, used):
    assert get_scheme("w4a16", requested).group_size_for(in_features) == used


def test_group_size_that_divides_nothing_names_both_numbers():
    with pytest.raises(ValueError, match=r"in_features=100 .*\[64, 32\].*group_size=64"):
        get_scheme("w4a16", 64).group_size_for(100)


@pytest.mark.parametrize(("name", "divisor"), [("w4a16", 7.5), ("w8a16", 127.5), ("w8a8", 127.5), ("fp8", 448.0)])
def test_scale_divisor_is_half_the_code_range(name, divisor):
    assert SCHEMES[name].scale_divisor == divisor


def test_w4a8_has_the_one_group_size_of_its_kernel():
    assert get_scheme("w4a8").group_size_for(256) == 128
    with pytest.raises(ValueError, match=r"group_size=64 .* 'w4a8' take \[128\]"):
        get_scheme("w4a8", 64)
    with pytest.raises(ValueError, match=r"in_features=192 .*\[128\], so scheme 'w4a8'"):
        get_scheme("w4a8").group_size_for(192)
