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
    "quantization/formats/int4_zero_points.py": "quantization/formats/test_zero_points.py",
    "quantization/formats/int8_zero_points.py": "quantization/formats/test_zero_points.py",
    "quantization/partitioned.py": "distributed/test_shards.py",
    "quantization/sharded.py": "distributed/test_shards.py",
    "rollout/deltas.py": "vllm_plugin/test_checkpoint_copy.py",
    "rollout/http_session.py": "rollout/test_client.py",
    "checkpoint/layout.py": "checkpoint/test_export.py",
    "wire/protocol.py": "wire/test_handshake.py",
    # Of the trainer and its configuration: what is claimed is what a user of them sees.
    "adapters/tensors.py": "adapters/test_beside.py",
    # Commands, tested with what they call.
    "scripts/estimate.py": "doctor/test_memory.py",
    "scripts/compare.py": "study/test_runner.py",
    # A row of one table each, compared with the same naive losses.
    "objectives/objective.py": "objectives/test_objectives.py",
    "objectives/options.py": "objectives/test_objectives.py",
    "objectives/others.py": "objectives/test_objectives.py",
    "objectives/presets.py": "objectives/test_objectives.py",
    "quantization/checkpoint_names.py": "checkpoint/test_export.py",
    "quantization/patterns.py": "quantization/test_plan.py",
    "quantization/report.py": "quantization/test_swap.py",
    "quantization/weight.py": "quantization/test_linear.py",
    # Only an engine can show whether they are right.
    "doctor/deep_audit.py": "rollout/test_vllm_trainer.py",
    "rollout/failures.py": "rollout/test_generation.py",
    "rollout/scoring.py": "numerics/test_engine.py",
    "vllm_plugin/cuda_kernels.py": "numerics/test_cuda.py",
    "vllm_plugin/engine_tensors.py": "vllm_plugin/test_weight_transfer.py",
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
