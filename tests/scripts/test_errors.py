import pytest

from trl_qarl.scripts.errors import configuration_errors


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="a bug"), configuration_errors():
        raise RuntimeError("a bug")
