"""Checkpoints with a tower, named as on the Hub, trained on text by the command line: trained, resumed, deployed."""

import shutil

import pytest
from journeys import MARKS
from test_engines import ENGINE, train_killed_and_resumed

from testing_utils.pictures import make_picture_model, make_picture_processor
from trl_qarl.checkpoint.export import export_checkpoint
from trl_qarl.engines.pictures import placeholders_of


pytestmark = MARKS


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("qwen3_5", "colocate"),
        *(
            pytest.param(kind, mode, marks=pytest.mark.nightly)
            for kind in ("gemma3", "gemma4", "mistral3", "qwen3_5")
            for mode in ("colocate", "server")
            if (kind, mode) != ("qwen3_5", "colocate")
        ),
    ],
)
def test_a_checkpoint_with_a_tower_trains_on_text_and_deploys(user, kind, mode):
    model, processor = make_picture_model(kind), make_picture_processor(kind)
    head = model.get_output_embeddings().weight.data
    # Far apart logits, as in `make_model`, but a policy that writes placeholders cannot be scored.
    head *= 1 if model.config.tie_word_embeddings else 10
    head[[*placeholders_of(model, processor)]] = 0
    shutil.rmtree(user.folder / "model")
    export_checkpoint(model, user.folder / "model", processor)
    assert "trains with vLLM in " in user.run("trl-qarl", "doctor", "model")
    # Of Gemma 4 the canary's picture has 70 tokens.
    options = {**ENGINE, "vllm_mode": mode, "vllm_max_model_length": 128}
    if mode == "server":
        server, options["vllm_server_port"] = user.serve("--scheme", "w4a16", max_model_len=128)
    user.write_recipe(**options)
    assert max(train_killed_and_resumed(user)) < 0.5
    user.assert_deployed("out/w4a16")
    user.run("trl-qarl", "export", "--model_name_or_path", "out", "--output_dir", "again")
    assert user.tensors_of("again").keys() == user.tensors_of("out/w4a16").keys()
    if mode == "server":
        server.send_signal(15)
        server.wait(60)
