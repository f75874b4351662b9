import logging
from types import SimpleNamespace

import pytest
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler

from testing_utils import make_problems, make_trainer
from trl_qarl.telemetry.console import Advisor, RowPrinter, RowProgress, format_row, show_rows


class Notebook(ProgressCallback):
    pass


@pytest.mark.parametrize(
    ("callback", "replaced"), [(ProgressCallback, RowProgress), (PrinterCallback, RowPrinter), (Notebook, Notebook)]
)
def test_only_callbacks_of_transformers_are_replaced(callback, replaced):
    handler = CallbackHandler([callback()], None, None, None, None)
    show_rows(handler)
    assert [type(c) for c in handler.callbacks if type(c) is not DefaultFlowCallback] == [replaced]


def test_training_prints_short_rows_and_logs_everything(tiny_model, tmp_path, capsys, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_qarl.telemetry.console"):
        trainer = make_trainer(
            tiny_model, tmp_path, eval_dataset=make_problems(4), max_steps=2, quantize_learner=False, numerics="fast"
        )
        trainer.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "trained"))]
    assert [line.split(" | ")[0] for line in printed[:2]] == ["step 1/2", "step 2/2"] and len(printed) == 3
    assert "reward " in printed[0] and "mismatch " in printed[0] and max(map(len, printed)) < 160
    first = trainer.state.log_history[0]
    assert len(first) > 50 and "mismatch/k3/q1" in first


def test_a_row_leaves_out_what_it_lacks():
    row = format_row({"reward": 0.51, "tbpo/dropped/total": 0.2}, 12, 40, seconds_left=192)
    assert row == "step 12/40 | reward 0.51 | dropped 20% | eta 0:03:12"


def test_advice_is_logged_by_the_main_process_alone(caplog):
    with caplog.at_level(logging.WARNING):
        for is_main, steps in ((False, (1, 2)), (True, (3, 4))):
            advisor = Advisor({"scheme": "w4a16"})
            for step in steps:
                state = SimpleNamespace(is_world_process_zero=is_main, global_step=step)
                advisor.on_log(None, state, None, logs={"mismatch/abs_logp_mean": 1.0})
    (record,) = caplog.records
    assert record.getMessage().startswith("Step 3: mismatch 1")


@pytest.mark.parametrize(("rate", "is_stalled"), [(1e-12, True), (1e-2, False)])
def test_a_training_that_changed_no_code_says_so(tiny_model, tmp_path, caplog, rate, is_stalled):
    make_trainer(tiny_model, tmp_path, max_steps=3, learning_rate=rate).train()
    assert ("No code of the low-bit policy has changed" in caplog.text) == is_stalled
