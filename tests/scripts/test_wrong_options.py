"""Wrong options of the commands: the last line of stderr names them, and the exit code is 2."""

import re
from importlib.util import find_spec

import pytest

from testing_utils.trainings import SIGNED
from trl_qarl.cli import main


TRAIN = "train --model_name_or_path a/model --dataset_name a/dataset --reward_funcs accuracy_reward"
needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("doctor --model ./no_such_model", "error: ./no_such_model is not a folder."),
        ("doctor --scheme w8a8 --group_size 32", "has no groups"),
        ("doctor --scheme w4a16 --group_size 7", "group_size=7"),
        ("doctor --group_size 32", "--group_size needs"),
        ("doctor --scheme int3", "'int3'"),
        ("estimate /nope --gpu_memory 80", "trl-qarl: error: /nope is not a folder."),
        ("estimate . --gpu_memory 80", "trl-qarl: error: MODEL .: "),
        ("estimate FOLDER --gpu_memory -1", "--gpu_memory=-1.0 must be greater than 0"),
        ("estimate FOLDER --gpu_memory 80 --rollout_ahead 2", "--rollout_ahead=2 must be 0 or 1"),
        ("estimate FOLDER --gpu_memory 80 --vllm_gpu_memory_utilization 1", "less than 1, a whole GPU"),
        (
            "estimate FOLDER --gpu_memory 80 --gpu_capability nine",
            "--gpu_capability: 'nine' is not a compute capability, such as 9.0",
        ),
        ("estimate FOLDER --gpu_memory 80 --write FOLDER/config.json/launch.yaml", "config.json"),
        ("estimate FOLDER --gpu_memory 80 --write FOLDER", "Is a directory"),
        ("eval FOLDER --task amc", "--tasks takes names"),
        ("eval FOLDER --task p.jsonl --limit 3", "--limit and --no_chat_template need --tasks"),
        ("eval FOLDER --tasks gsm8k --score math", "--score needs --task"),
        ("eval FOLDER --task no_such.jsonl", "No such file"),
        ("eval FOLDER --task p.jsonl --samples 0", "--samples=0"),
        ("eval FOLDER --task p.jsonl --samples 2 --temperature 0", "repeat one completion"),
        ("eval FOLDER --task p.jsonl --max_model_len 9", "needs --vllm"),
        ("eval FOLDER --task p.jsonl --compare ./nowhere", "./nowhere is not a folder"),
        ("eval FOLDER --task p.jsonl --top_p 0", "--top_p=0.0"),
        # Of masters.
        ("eval FOLDER --task p.jsonl --vllm", "--vllm"),
        ("eval FOLDER --task p.jsonl --vllm --bits 2 --compare FOLDER", "--vllm"),
        pytest.param(
            "eval FOLDER --tasks gsm8k,gsm9k",
            "--tasks gsm9k: no such task. Choose from gsm8k",
            marks=needs_harness,
        ),
        pytest.param("eval FOLDER --tasks no.yaml", "--tasks no.yaml: no such file", marks=needs_harness),
        ("export --model_name_or_path /nope --output_dir out --scheme fp8", "trl-qarl: error: /nope is not a folder."),
        ("export --model_name_or_path FOLDER --output_dir FOLDER --scheme fp8", "holds other weights"),
        (
            "export --model_name_or_path FOLDER --output_dir out --scheme w8a8 --bits 3",
            "--bits 3: precisions=[3] with scheme 'w8a8': no grid of fewer bits nests",
        ),
        (
            f"export --model_name_or_path FOLDER --output_dir out --scheme {SIGNED[4]} --bits 8",
            f"--bits 8: precisions=[8] has 8 bits, which no layer of scheme '{SIGNED[4]}' can have",
        ),
        # Before the model is converted.
        ("quickstart --scheme w8a8 --group_size 32", "has no groups"),
        ("export --outptu-dir x", "`--outptu-dir`"),
        ("eval --zzzzzz=1", "Unknown option `--zzzzzz`.\n"),
        ("trian", "Did you mean `train`?"),
        (f"{TRAIN} --group_size 7", "group_size=7 is not supported"),
        (f"{TRAIN} --accelerate_config no_such_config", "Accelerate config no_such_config"),
        (f"{TRAIN} --config no_such_file.yaml", "'no_such_file.yaml'"),
        (f"{TRAIN} --scheme W4A16", "Did you mean 'w4a16'?"),
        (f"{TRAIN} --no_such_option 3", "no_such_option='3': unknown option"),
        (f"{TRAIN} --num-proceses 2", "Did you mean `num_processes`?"),
        (f"{TRAIN} --reward-f acuracy_reward", "'acuracy_reward'"),
        (f"{TRAIN} --dataset_name=problems.jsonl", "'problems.jsonl'"),
        (f"{TRAIN} --dataset-name ./problems", "'./problems'"),
        (TRAIN.replace("--reward_funcs accuracy_reward", ""), "`--reward_funcs`"),
        (TRAIN.replace("--dataset_name a/dataset", ""), "`--dataset_name`"),
        (TRAIN.replace("--model_name_or_path a/model", ""), "`--model_name_or_path`"),
        ("vllm-serve --model FOLDER --group_size 7", "group_size=7 is not supported"),
        ("vllm-serve --model ./nowhere", "trl-qarl: error: --model ./nowhere: "),
    ],
)
def test_a_wrong_option_is_named_with_exit_code_two(tiny_model, tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda args: pytest.fail("launched"))
    with pytest.raises(SystemExit, match="2"):
        main(command.replace("FOLDER", tiny_model).split())
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert re.match(r"trl-qarl( [\w-]+)?: error: ", lines[-1]) and message in lines[-1]
    assert len(lines) == 1 or not message.startswith("trl-qarl: error: ")
