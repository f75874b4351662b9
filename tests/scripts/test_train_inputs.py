import os

import pytest

from trl_qarl.scripts import train, train_inputs


def test_a_reward_beside_the_command_and_in_a_pythonpath_of_a_yaml_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "rewards_beside.py").touch()
    with pytest.raises(ValueError, match="'rewards_beside'"):
        train_inputs.check_rewards("rewards_beside.mine", None)
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    train_inputs.check_rewards("rewards_beside.mine", None)
    monkeypatch.delitem(os.environ, "PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    train_inputs.check_rewards("rewards_beside.mine", None)


def test_rewards_are_those_of_trl():
    assert len(train.get_reward_funcs(train_inputs.REWARDS)) == 4
