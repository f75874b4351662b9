import pytest
import yaml

from trl_qarl.scripts import option_names, train, train_inputs
from trl_qarl.scripts.train_inputs import check_early


TRAIN = ["--model_name_or_path", "a/model", "--dataset_name", "a/dataset", "--reward_funcs", "accuracy_reward"]


def test_no_option_that_the_parsers_take_is_refused_early():
    from accelerate.commands.launch import launch_command_parser

    real = option_names.option_names(train.make_parser()) | option_names.option_names(launch_command_parser())
    names = sorted(real - {"--datasets", "--config", "--help"})
    # A value that may be a reward and a dataset.
    for value in (["os.path"], []):
        check_early([*TRAIN, *(word for name in names for word in (name, *value)), *TRAIN])
    check_early([*TRAIN, *(f"{name}=os.path" for name in names)])
    for name in names:
        option_names.check_names([name[:length] for length in range(3, len(name))], option_names.names_of_train())


@pytest.mark.parametrize(
    "argv",
    [
        ["--model_n", "a/model", "--dataset-n=a/dataset", "--reward-f", "accuracy_reward", "os.path.join"],
        [*TRAIN[:4], "--reward_model_name_or_path", "a/model"],
        [*TRAIN, "--no_quantize_learner", "--no-quantize-learner", "--temperature", "-1", "--num_proc", "2"],
        [*TRAIN[:4], "--reward", "ambiguous"],
        ["--hel"],
    ],
    ids=lambda argv: " ".join(argv)[-30:],
)
def test_what_argparse_completes_is_not_refused_early(argv):
    check_early(argv)


def test_a_yaml_file_gives_options_and_the_command_line_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def early(argv, **options):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
        check_early(["--config", "run.yaml", *argv])

    given = {"model_name_or_path": "a/model", "dataset_name": "a/dataset", "reward_funcs": "accuracy_reward"}
    early([], **given, num_processes=2, learning_rate=1e-6)
    early([], model_name_or_path="m", datasets=[{"path": "a/dataset"}], reward_funcs=["accuracy_reward"])
    early(["--reward_funcs", "accuracy_reward"], **given | {"reward_funcs": "acuracy"})
    # Its modules may be where only the training process looks.
    early([], **given | {"reward_funcs": "elsewhere.reward"}, env={"PYTHONPATH": "/elsewhere"})
    for options, message in (
        ({"shceme": "fp8"}, "Unknown option `--shceme`. Did you mean `--scheme`?"),
        ({"reward_funcs": ["acuracy_reward"]}, "Unknown reward function 'acuracy_reward'"),
        ({"reward_funcs": "acuracy_reward"}, "Unknown reward function 'acuracy_reward'"),
        ({"dataset_name": "none.jsonl"}, "there is no such file"),
        ({"datasets": [{"path": "a/dataset"}]}, "Both `datasets` and `dataset_name`"),
    ):
        with pytest.raises(ValueError, match=message):
            early([], **given | options)


def test_a_reward_beside_the_command_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_beside.py").touch()
    check_early([*TRAIN[:5], "rewards_beside.mine"])


def test_without_names_nothing_is_checked_early(monkeypatch):
    monkeypatch.setattr(train_inputs, "names_of_train", lambda: None)
    check_early(["--shceme", "fp8"])


def test_rewards_are_those_of_trl():
    assert len(train.get_reward_funcs(train_inputs.REWARDS)) == 4
