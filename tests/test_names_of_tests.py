"""Who looks for the tests of a module finds them: by its name, or in the list below."""

from collections import Counter
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "trl_qarl"

ELSEWHERE = {
    # Tested as part of a whole that has no other parts, where one file shows more than several would.
    "_version.py": "test_package.py",
    "adapters/merge_at_export.py": "adapters/test_base.py",
    "checkpoint/serving.py": "checkpoint/test_cards.py",
    "demo/smollm2.py": "scripts/test_quickstart.py",
    "demo/sums.py": "scripts/test_quickstart.py",
    "doctor/engine.py": "doctor/test_checks.py",
    "rollout/server_command.py": "rollout/test_server_process.py",
    "study/figures.py": "study/test_page.py",
    "study/grid.py": "study/test_runner.py",
    "study/html.py": "study/test_page.py",
    "study/sentences.py": "study/test_page.py",
    "study/verdict.py": "study/test_page.py",
    "wire/describe.py": "wire/test_fingerprint.py",
    "wire/protocol.py": "wire/test_handshake.py",
    # Of the trainer and its configuration: what is claimed is what a user of them sees.
    "adapters/tensors.py": "adapters/test_training.py",
    "checkpoint/batch.py": "test_qarl_trainer.py",
    "checks/arguments.py": "test_qarl_trainer.py",
    "checks/objective.py": "test_qarl_config.py",
    "checks/options.py": "test_qarl_config.py",
    "checks/refused.py": "test_qarl_config.py",
    "forward.py": "test_qarl_trainer.py",
    "saves.py": "test_qarl_trainer.py",
    # Commands, tested with what they call.
    "evaluation/scores.py": "scripts/test_eval.py",
    "scripts/bench.py": "bench/test_learner.py",
    "scripts/compare.py": "study/test_runner.py",
    "scripts/doctor.py": "doctor/test_checks.py",
    "scripts/env.py": "test_cli.py",
    "scripts/errors.py": "test_cli.py",
    "scripts/export.py": "test_cli.py",
    "scripts/report.py": "study/test_report.py",
    "scripts/train.py": "test_cli.py",
    "scripts/vllm_serve.py": "rollout/test_server_process.py",
    "study/evals.py": "scripts/test_eval.py",
    # What they measure is nobody's claim but that they measure it: the dry run of the day on a GPU runs them.
    "bench/adapters.py": "bench/test_learner.py",
    "bench/alignment.py": "benchmarks/test_gpu_day.py",
    "bench/engines.py": "benchmarks/test_gpu_day.py",
    "bench/machine.py": "benchmarks/test_gpu_day.py",
    "bench/numerics.py": "bench/test_learner.py",
    "bench/shapes.py": "benchmarks/test_gpu_day.py",
    "bench/vllm.py": "benchmarks/test_gpu_day.py",
    # One learner's arithmetic, compared as a whole with an engine or a reference.
    "numerics/attach.py": "numerics/test_numerics.py",
    "numerics/cpu.py": "numerics/test_numerics.py",
    "numerics/cpu_attention.py": "numerics/test_numerics.py",
    "numerics/modules.py": "numerics/test_numerics.py",
    "numerics/ops.py": "numerics/test_numerics.py",
    "numerics/portable.py": "numerics/test_numerics.py",
    "objectives/objective.py": "objectives/test_objectives.py",
    "objectives/options.py": "objectives/test_objectives.py",
    "objectives/others.py": "objectives/test_objectives.py",
    "objectives/presets.py": "objectives/test_objectives.py",
    "objectives/ratios.py": "objectives/test_objectives.py",
    "objectives/registry.py": "objectives/test_objectives.py",
    "objectives/token_losses.py": "objectives/test_objectives.py",
    "quantization/names.py": "checkpoint/test_layout.py",
    "quantization/selection.py": "quantization/test_swap.py",
    # Only an engine can show whether they are right.
    "rollout/deep_audit.py": "rollout/test_vllm_trainer.py",
    "rollout/failures.py": "rollout/test_generation.py",
    "rollout/scoring.py": "numerics/test_engine.py",
    "rollout/transports.py": "rollout/test_publisher.py",
    "vllm_plugin/cuda_kernels.py": "numerics/test_cuda.py",
    "vllm_plugin/engine_tensors.py": "vllm_plugin/test_weight_transfer.py",
    "vllm_plugin/linear_kernels.py": "vllm_plugin/test_cpu_kernels.py",
    "vllm_plugin/worker.py": "vllm_plugin/test_weight_transfer.py",
}

MODULES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


def names_of_tests(module):
    """The name at the same place, and the one for a module whose name another folder's test has already."""
    return {
        module.with_name(f"test_{module.name}"),
        module.with_name(f"test_{'_'.join([*module.parts[:-1], module.name])}"),
    }


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_one_place_where_its_tests_are_looked_for(module):
    there = [name for name in names_of_tests(module) if (TESTS / name).is_file()]
    elsewhere = ELSEWHERE.get(module.as_posix())
    assert len(there) + (elsewhere is not None) == 1, (
        f"Add tests/{module.with_name('test_' + module.name)}, or a line in ELSEWHERE with its reason: {there}, {elsewhere}"
    )
    assert elsewhere is None or (TESTS / elsewhere).is_file()


def test_the_list_names_modules_that_are_there():
    assert ELSEWHERE.keys() <= {module.as_posix() for module in MODULES}


def test_no_two_files_of_tests_have_one_name():
    """They are imported without packages, so that the second would be taken for the first."""
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
