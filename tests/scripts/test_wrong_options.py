"""Wrong options of the commands: the last line of stderr names them, and the exit code is 2."""

import re
import shutil

import pytest

from testing_utils import refused
from testing_utils.trainings import SIGNED
from trl_qarl.scripts import train


TRAIN = "train --model_name_or_path a/model --dataset_name rows.json --reward_funcs accuracy_reward"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("doctor --model ./no_such_model", "error: ./no_such_model is not a folder."),
        ("doctor --scheme w8a8 --group_size 32", "has no groups"),
        ("doctor --scheme w4a16 --group_size 7", "group_size=7"),
        ("doctor --group_size 32", "--group_size needs"),
        ("doctor FOLDER --model FOLDER", "argument --model: not allowed with argument MODEL"),
        ("doctor --scheme int3", "'int3'"),
        ("estimate /nope --gpu_memory 80", "trl-qarl: error: /nope is not a folder."),
        ("estimate . --gpu_memory 80", "trl-qarl: error: MODEL .: "),
        ("estimate FOLDER --gpu_memory -1", "--gpu_memory=-1.0 must be greater than 0"),
        ("estimate FOLDER --gpu_memory 80 --rollout_ahead 2", "--rollout_ahead=2 must be 0 or 1"),
        ("estimate FOLDER --gpu_memory 80 --vllm_gpu_memory_utilization 1", "less than 1, a whole GPU"),
        ("estimate FOLDER --gpu_memory 80 --gpu_capability nine", "--gpu_capability: 'nine' is not a compute"),
        ("estimate FOLDER --gpu_memory 80 --write FOLDER/config.json/launch.yaml", "config.json"),
        ("estimate FOLDER --gpu_memory 80 --write FOLDER", "Is a directory"),
        ("export --model_name_or_path /nope --output_dir out --scheme fp8", "trl-qarl: error: /nope is not a folder."),
        ("export --model_name_or_path FOLDER --output_dir FOLDER --scheme fp8", "holds other weights"),
        ("export --model_name_or_path FOLDER --output_dir /proc/x --scheme fp8", "nothing can be written to /proc ("),
        (
            "export --model_name_or_path FOLDER --output_dir out --scheme w8a8 --bits 3",
            "--bits 3: precisions=[3] with scheme 'w8a8': no scheme of fewer bits nests",
        ),
        (
            f"export --model_name_or_path FOLDER --output_dir out --scheme {SIGNED[4]} --bits 8",
            f"--bits 8: precisions=[8] has 8 bits, which no layer of scheme '{SIGNED[4]}' can have",
        ),
        ("export --model_name_or_path cut --output_dir out --scheme fp8", "cut/config.json cannot be read (Expecting"),
        *(
            (command, "lists/config.json cannot be read (its content is of type list")
            for command in (
                "doctor lists",
                "estimate lists --gpu_memory 80",
                "export --model_name_or_path lists --output_dir out --scheme fp8",
                "vllm-serve --model lists",
            )
        ),
        # Before the model is converted.
        ("export --outptu-dir x", "`--outptu-dir`"),
        (f"{TRAIN} --max_steps ten", "--max_steps: invalid int value: 'ten'"),
        ("trian", "invalid choice: 'trian'"),
        (f"{TRAIN} --group_size 7", "group_size=7 is not supported"),
        (f"{TRAIN} --accelerate_config no_such_config", "Accelerate config no_such_config"),
        (f"{TRAIN} --config no_such_file.yaml", "'no_such_file.yaml'"),
        (f"{TRAIN} --scheme W4A16", "Did you mean 'w4a16'?"),
        (f"{TRAIN} --no_such_option 3", "no_such_option='3': unknown option"),
        (f"{TRAIN} --num-proceses 2", "Did you mean `num_processes`?"),
        (f"{TRAIN} --reward-f acuracy_reward", "'acuracy_reward'"),
        (f"{TRAIN} --num_processes 1 run.yaml", "'run.yaml' is no option, nor the value of one. Write `--config run."),
        (f"{TRAIN} --num_processes 1 more", "'more' is no option, nor the value of one. Remove it."),
        (f"{TRAIN} --reward_funcs no_such_module.reward", "'no_such_module'"),
        (f"{TRAIN} --reward_funcs my.py:right", "'my.py:right' is no dotted import path. Write it as `my.right`."),
        (f"{TRAIN} --reward_funcs ./my/rewards.py", "Write it as `my.rewards.FUNCTION`."),
        (f"{TRAIN} --dataset_name=problems.jsonl", "'problems.jsonl'"),
        (f"{TRAIN} --dataset-name ./problems", "'./problems'"),
        (f"{TRAIN} --dataset-name empty.json", "--dataset_name='empty.json' is empty"),
        (TRAIN.replace("a/model", "./nowhere"), "--model_name_or_path='./nowhere' is not a folder."),
        ("export --model_name_or_path FOLDER --output_dir rows.json/x --scheme fp8", "rows.json is a file"),
        (TRAIN.replace("--reward_funcs accuracy_reward", ""), "`--reward_funcs`"),
        (TRAIN.replace("--dataset_name rows.json", ""), "`--dataset_name`"),
        (TRAIN.replace("--model_name_or_path a/model", ""), "`--model_name_or_path`"),
        ("vllm-serve --model FOLDER --group_size 7", "group_size=7 is not supported"),
        ("vllm-serve --model FOLDER --tensor-parallel-size 0", "--tensor-parallel-size=0 must be at least 1."),
        ("vllm-serve --model FOLDER --port=0", "--port=0 is not a port"),
        ("vllm-serve --model FOLDER --port=65536", "--port=65536 is not a port"),
        ("vllm-serve --model FOLDER --max_model_len=513", "--max-model-len=513 with Qwen2ForCausalLM: vLLM starts no"),
        ("vllm-serve --model ./nowhere", "trl-qarl: error: ./nowhere is not a folder."),
        ("vllm-serve --model mute", "trl-qarl: error: mute has no tokenizer."),
    ],
)
def test_a_wrong_option_is_named_with_exit_code_two(tiny_model, tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    # With a wrong option, the dataset is read for what is wrong with it.
    (tmp_path / "rows.json").write_text('{"prompt": [{"role": "user", "content": "1 + 1 ="}], "solution": "2"}\n')
    (tmp_path / "empty.json").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"model_type": ')
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "config.json").write_text("[]")
    shutil.copytree(tiny_model, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda args: pytest.fail("launched"))
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("started"))
    lines = refused(capsys, *command.replace("FOLDER", tiny_model).split()).splitlines(keepends=True)
    assert re.match(r"trl-qarl( [\w-]+)?: error: ", lines[-1]) and message in lines[-1]
    assert len(lines) == 1 or not message.startswith("trl-qarl: error: ")


def test_a_wrong_option_is_named_before_a_dataset_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr(train, "_load_dataset", lambda *_: pytest.fail("loaded"))
    said = refused(capsys, *TRAIN.replace("rows.json", "org/data").split(), "--learning_rates", "1")
    assert "learning_rates='1': unknown option" in said
