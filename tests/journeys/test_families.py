"""Families of models, trained with vLLM and deployed: the zoo, of which docs/models.md is the page."""

import sys
from pathlib import Path

import pytest
from journeys import HAS_AVX512, MARKS


sys.path.append(str(Path(__file__).parent / "zoo"))

from families import EXPORT_FAILS, FAMILIES, LOOSE, LORA_FAILS, OTHERWISE, REFUSED
from zoo import EXACT, LARGEST, dtype_of, train, visit


pytestmark = MARKS
OFTEN = ("deepseek_v3", "qwen3_5_text", "smollm3", "gpt2")
SHORTLY = (
    "falcon_h1",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "glm4_moe",
    "gpt_oss mxfp4a16",
    "granite",
    "lfm2",
    "llama4_text",
    "olmo3",
)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in OFTEN else pytest.mark.nightly)
        for each in FAMILIES
        if each not in REFUSED
    ],
)
def test_family_trains_with_vllm_and_its_export_is_the_policy(family, tmp_path, warm):
    visited = visit(family, tmp_path, warm)
    is_exact, largest = assert_is_the_policy(family, visited)
    if family in LORA_FAILS:
        assert LORA_FAILS[family] in visited.found["lora"]
    else:
        assert max(visited.found["lora"]) <= (0.0 if is_exact else largest)
    if "bf16" in visited.found:
        assert max(visited.found["mismatch"]) < 1.5 * max(visited.found["bf16"])


@pytest.mark.parametrize("family", SHORTLY)
def test_family_trains_with_vllm_and_transformers_loads_it(family, tmp_path, warm):
    """One of the trainings of a whole visit, and one of the engines."""
    assert_is_the_policy(family, visit(family, tmp_path, warm, is_short=True))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gpt_oss mxfp4a16", "phimoe"])
def test_two_ranks_of_a_server_are_the_policy(family, tmp_path, warm):
    found, log = train(family, tmp_path, warm, "ranks")
    assert found is not None, log[-3000:]
    assert len(found["mismatch"]) == 3 and max(found["mismatch"]) < LARGEST["float32"]


def assert_is_the_policy(family, visited):
    """Learner and engine agree while codes change, and so do plain engines with the export. Returns whether every bit
    is the same, and the largest mismatch otherwise."""
    assert visited.found is not None, visited.log[-3000:]
    largest = LARGEST[dtype_of(family)]
    assert len(visited.found["mismatch"]) == 3 and max(visited.found["mismatch"]) < largest
    is_exact = HAS_AVX512 and family.partition(" ")[0] in EXACT
    if is_exact:
        assert (visited.found["numerics"], visited.found["mismatch"]) == ("engine", [0.0] * 3)
    assert max(visited.found["flips"]) > 0
    for engine, distance in visited.plain.items():
        if isinstance(distance, str):
            # Kernels, and the sizes that they take, depend on the processor.
            reasons = EXPORT_FAILS.get((family, engine), "nothing"), *(() if HAS_AVX512 else ("cpu_gemm_wna16",))
            assert any(reason in distance for reason in reasons), distance
        else:
            # Plain vLLM computes in bfloat16, which moves the policy itself.
            moved = 1.5 * visited.found.get("in_bfloat16", 0.0)
            limits = {"transformers": LOOSE.get(family, largest), "vllm": max(LARGEST["bfloat16"], moved)}
            assert (distance < limits[engine]) != ((family, engine) in OTHERWISE), (engine, distance)
    return is_exact, largest


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.nightly) for each in REFUSED]
)
def test_family_is_refused_in_one_line_before_an_engine_starts(family, tmp_path, warm):
    visited = visit(family, tmp_path, warm)
    assert visited.found is None
    assert REFUSED[family] in visited.log.strip().splitlines()[-1]
    assert "vLLM engine on" not in visited.log
