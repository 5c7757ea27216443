# `make demo` and `make test` set everything up by themselves: a virtual environment in .venv, then the package.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-gpu search lint types docs bench bench-full bench-gpu clean

.venv/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/contrastive-zoo demo

test: .venv/.installed lint types
	$(BIN)/python -m pytest -n 2

search: .venv/.installed
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n 2 tests/test_contract.py tests/testing/test_check.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

.venv/.docs-installed: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[docs]'
	touch $@

docs: .venv/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/mkdocs.yml

.venv/.peers-installed: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/peers lightly open_clip_torch
	touch $@

bench: .venv/.peers-installed
	$(BIN)/python benchmarks/bench.py --docs --peers .venv/peers

bench-full: .venv/.peers-installed
	$(BIN)/python benchmarks/bench.py --docs --peers .venv/peers --full

# On a machine with a GPU: the kernels instead of Triton's interpreter; tables to compare with benchmarks/gpu.md.
test-gpu: .venv/.installed
	ALL_DTYPES=1 $(BIN)/python -m pytest tests/kernels

bench-gpu: .venv/.installed
	$(BIN)/python benchmarks/gpu.py --out gpu-times.md

clean:
	rm -rf .venv site demo-output
