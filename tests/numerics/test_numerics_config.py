"""Refusals of `numerics="engine"` before anything is loaded."""

import pytest

from trl_qarl import QaRLConfig


REFUSED = [
    ({"bf16": False}, r"bf16=False: they exist in bfloat16. Set `bf16=True`, or use numerics='fast'"),
    ({"quantize_learner": False}, "quantize_learner=False: the learner would compute with other weights"),
    ({"cpu_weights": "dense"}, r"cpu_weights='dense' is unknown. Choose one of \['expanded', 'packed'\]"),
    ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32=True: the engine's output head computes in bfloat16"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2: .*Set it to 1"),
    ({"numerics": "exact"}, r"numerics='exact' is unknown. Choose one of \['fast', 'engine'\]"),
    ({"exact": "always"}, r"exact='always' is unknown. Choose one of \['require', 'warn'\]"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[next(iter(case[0])) for case in REFUSED])
def test_what_engine_numerics_cannot_do_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        QaRLConfig(str(tmp_path), **({"numerics": "engine", "use_cpu": True, "bf16": True} | options))


@pytest.mark.parametrize("options", [{}, {"scheme": "bf16"}, {"scheme": "w8a16"}, {"cpu_weights": "packed"}], ids=str)
def test_what_it_can_do_passes(tmp_path, options):
    config = QaRLConfig(str(tmp_path), use_cpu=True, bf16=True, numerics="engine", **options)
    assert config.exact is None
