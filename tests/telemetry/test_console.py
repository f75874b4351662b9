import logging
from types import SimpleNamespace

import pytest
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler

from testing_utils import make_problems, make_trainer
from trl_qarl.telemetry.console import Advisor, RowPrinter, RowProgress, format_row, show_rows


ROW = {
    "loss": 0.01,
    "reward": 0.5123,
    "reward_std": 0.25,
    "completions/mean_length": 120.4,
    "rollout/mean_length": 7.0,
    "entropy": 0.51,
    "tbpo/dropped/total": 0.204,
    "mismatch/abs_logp_mean": 6.1e-4,
    "mismatch/k3/q1": 1.0,
    "quant/code_flip_rate": 2e-5,
    "rollout/tokens_per_second": 1234.5,
}


def test_a_row_has_ten_values_and_the_time_that_is_left():
    assert format_row(ROW, 12, 40, seconds_left=192.4) == (
        "step 12/40 | reward 0.512 | reward_std 0.25 | length 120 | entropy 0.51 | dropped 20% | mismatch 6.1e-04 | "
        "flips 2.0e-05 | tok/s 1234 | eta 0:03:12"
    )


@pytest.mark.parametrize(
    ("logs", "row"),
    [
        ({"tbpo/dropped/total": 0.0, "quant/code_flip_rate": float("nan")}, "step 2/4 | dropped 0% | eta 0:00:10"),
        ({"clip_ratio/region_mean": 0.012, "reward": None}, "step 2/4 | clipped 1.2% | eta 0:00:10"),
        ({"eval_reward": 0.5, "eval_rollout/mean_length": 3.0}, "eval at step 2/4 | reward 0.5 | length 3"),
        ({"train_runtime": 61.2, "train_loss": 0.1}, "trained 2 of 4 updates in 0:01:01"),
        # Values that a user logs.
        ({"mine": 1.23456, "text": "x"}, "step 2/4 | mine 1.235 | text x | eta 0:00:10"),
    ],
)
def test_a_row_says_what_was_logged(logs, row):
    assert format_row(logs, 2, 4, seconds_left=10) == row


class Notebook(ProgressCallback):
    pass


@pytest.mark.parametrize(
    ("callback", "replaced"), [(ProgressCallback, RowProgress), (PrinterCallback, RowPrinter), (Notebook, Notebook)]
)
def test_only_callbacks_of_transformers_are_replaced(callback, replaced):
    handler = CallbackHandler([callback()], None, None, None, None)
    show_rows(handler)
    assert [type(c) for c in handler.callbacks if type(c) is not DefaultFlowCallback] == [replaced]


def test_training_prints_short_rows_and_advice_and_logs_everything(tiny_model, tmp_path, capsys, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_qarl.telemetry.console"):
        trainer = make_trainer(
            tiny_model, tmp_path, eval_dataset=make_problems(4), max_steps=2, quantize_learner=False, numerics="fast"
        )
        trainer.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "trained"))]
    assert [line.split(" | ")[0] for line in printed[:2]] == ["step 1/2", "step 2/2"] and "trained 2 of 2" in printed[
        2
    ]
    assert (
        "reward " in printed[0] and "mismatch " in printed[0] and "eta " in printed[0] and max(map(len, printed)) < 160
    )
    first = trainer.state.log_history[0]
    assert len(first) > 50 and "mismatch/k3/q1" in first


def test_advice_is_logged_by_the_main_process_alone(caplog):
    with caplog.at_level(logging.WARNING):
        for is_main, steps in ((False, (1, 2)), (True, (3, 4))):
            advisor = Advisor({"scheme": "w4a16"})
            for step in steps:
                state = SimpleNamespace(is_world_process_zero=is_main, global_step=step)
                advisor.on_log(None, state, None, logs={"mismatch/abs_logp_mean": 1.0})
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Step 3: Aligned: mismatch 1; rounding up to 0.06 nats per token, two policies above"
    )
