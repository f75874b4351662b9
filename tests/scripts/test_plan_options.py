import re

import pytest

from trl_qarl.quantization.plan import get_plan, plan_of
from trl_qarl.scripts import doctor, export, vllm_serve


REQUIRED = {
    vllm_serve: ["--model", "m"],
    export: ["--model_name_or_path", "m", "--output_dir", "o"],
    doctor: [],
}
MAPPING = '{"re:.*mlp.*": {"scheme": "w4a16", "group_size": 32}, "_default": "w8a8"}'


def parse(command, *argv):
    return plan_of(vars(command.make_parser("command").parse_args([*REQUIRED[command], *argv])))


@pytest.mark.parametrize("command", REQUIRED, ids=lambda module: module.__name__)
def test_commands_take_a_scheme_or_a_mapping(command):
    assert parse(command, "--scheme", "w4a16", "--group_size", "32") == get_plan("w4a16", 32)
    plan = parse(command, "--scheme", MAPPING, "--high_precision_first", "1", "--high_precision_last", "2")
    assert plan.name == "w4a16-w8a8" and plan.options == {"high_precision_first": 1, "high_precision_last": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("w4a61", "'w4a61'"),
        ("{mlp: w4a16}", "is not JSON"),
        ('{"_default": "w5a16"}', "'_default': Unknown scheme"),
    ],
)
def test_a_wrong_scheme_is_an_error_of_the_command_line(capsys, value, message):
    with pytest.raises(SystemExit) as error:
        parse(vllm_serve, "--scheme", value)
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)
