import pytest

from trl_qarl.quantization.schemes import get_scheme


@pytest.mark.parametrize(
    ("name", "group_size", "in_features", "allowed"),
    [
        ("w4a16", 64, 100, "64, 32"),
        ("w4a8", 128, 192, "128"),
        *(("mxfp4a16", None, size, "32") for size in (16, 48, 100)),
        *(("nvfp4a16", None, size, "16") for size in (8, 24, 100)),
    ],
)
def test_group_size_that_divides_nothing_names_both_numbers(name, group_size, in_features, allowed):
    with pytest.raises(ValueError, match=rf"in_features={in_features} .*\[{allowed}"):
        get_scheme(name, group_size).group_size_for(in_features)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int8", "Did you mean 'w8a8'"),
        ("awq", "Did you mean 'w4a16'"),
        ("w4a16-signed", "Did you mean 'w4a16'"),
        ("W4A16_ASYM", "Zero points are unsupported. Use 'w4a16'"),
        *((name, "Use 'nvfp4a16' or 'mxfp4a16'") for name in ("nvfp4", "mxfp4", "MXFP4a4")),
    ],
)
def test_an_unknown_name_is_refused_with_a_known_one(name, message):
    with pytest.raises(ValueError, match=rf"Unknown scheme '{name}'.*{message}"):
        get_scheme(name)
