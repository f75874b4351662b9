import pytest

from trl_qarl.quantization.schemes import get_scheme


@pytest.mark.parametrize(
    ("name", "group_size", "in_features", "message"),
    [
        ("w4a16", 64, 100, r"\[64, 32\]"),
        ("w4a8", 128, 192, r"\[128\]"),
        ("nvfp4a16", None, 24, r"\[16\]"),
        # It packs four codes into a word.
        ("w8a16", None, 98, "`exclude_modules`.*`fp8`"),
    ],
)
def test_inputs_that_no_group_or_word_divides_are_refused(name, group_size, in_features, message):
    with pytest.raises(ValueError, match=f"in_features={in_features} .*{message}"):
        get_scheme(name, group_size).group_size_for(in_features)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("awq", "Did you mean 'w4a16'"),
        ("w4a16-signed", "Did you mean 'w4a16'"),
        ("W4A16_ASYM", "Zero points are unsupported. Use 'w4a16'"),
        ("MXFP4a4", "Use 'nvfp4a16' or 'mxfp4a16'"),
    ],
)
def test_an_unknown_name_is_refused_with_a_known_one(name, message):
    with pytest.raises(ValueError, match=rf"Unknown scheme '{name}'.*{message}"):
        get_scheme(name)
