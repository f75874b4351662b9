import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from testing_utils import make_tiny_model


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_train_the_same_masters_and_log_global_metrics(tmp_path):
    model = make_tiny_model(tmp_path, "qwen2")
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    script = Path(__file__).with_name("train_ddp.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    launch += [str(script), model, str(output_dir)]
    result = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    ranks = [json.loads((output_dir / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    rows = [row for row in ranks[0]["rows"] if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert math.isfinite(row["loss"]) and 0 <= row["quant/code_flip_rate"] <= 1
    assert rows[0]["tbpo/ratio/min"] <= rows[0]["tbpo/ratio/mean"] <= rows[0]["tbpo/ratio/max"]
    assert math.isfinite(rows[0]["mismatch/abs_logp_mean"])
