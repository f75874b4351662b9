"""Families of models, trained with vLLM and deployed: the zoo, of which docs/models.md is the page."""

import sys
from pathlib import Path

import pytest


sys.path.append(str(Path(__file__).parent / "zoo"))

from families import EXPORT_FAILS, FAMILIES, LOOSE, LORA_FAILS, OTHERWISE, REFUSED
from zoo import EXACT, LARGEST, dtype_of, visit


pytestmark = [
    *(pytest.mark.distributed, pytest.mark.slow, pytest.mark.vllm),
    *(pytest.mark.xdist_group("journeys"), pytest.mark.timeout(900)),
]
OFTEN = ("deepseek_v3", "qwen3_5_text", "smollm3", "gpt2")


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
    assert visited.found is not None, visited.log[-3000:]
    largest = LARGEST[dtype_of(family)]
    assert len(visited.found["mismatch"]) == 3 and max(visited.found["mismatch"]) < largest
    is_exact = family.partition(" ")[0] in EXACT
    if is_exact:
        assert (visited.found["numerics"], visited.found["mismatch"]) == ("engine", [0.0] * 3)
    if family in LORA_FAILS:
        assert LORA_FAILS[family] in visited.found["lora"]
    else:
        assert max(visited.found["lora"]) <= (0.0 if is_exact else largest)
    if "bf16" in visited.found:
        assert max(visited.found["mismatch"]) < 1.5 * max(visited.found["bf16"])
    assert max(visited.found["flips"]) > 0
    for engine, distance in visited.plain.items():
        if isinstance(distance, str):
            # Kernels, and the sizes that they take, depend on the processor.
            assert EXPORT_FAILS.get((family, engine), "nothing") in distance
        else:
            # Plain vLLM computes in bfloat16.
            limits = {"transformers": LOOSE.get(family, largest), "vllm": LARGEST["bfloat16"]}
            assert (distance < limits[engine]) != ((family, engine) in OTHERWISE), (engine, distance)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.nightly) for each in REFUSED]
)
def test_family_is_refused_in_one_line_before_an_engine_starts(family, tmp_path, warm):
    visited = visit(family, tmp_path, warm)
    assert visited.found is None
    assert REFUSED[family] in visited.log.strip().splitlines()[-1]
    assert "vLLM engine on" not in visited.log
