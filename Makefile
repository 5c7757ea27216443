# `make demo` and `make test` set everything up by themselves: a virtual environment in .venv, then the package.
PYTHON ?= python3
BIN := .venv/bin
QUICK := contrastive_zoo/losses contrastive_zoo/engine tests/test_package.py tests/losses/test_signatures.py tests/losses/test_settings.py

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt

# each of the many processes of a test compiles the package once, not each time that it is imported
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-gpu test-trainers triton-versions quick search lint types examples pages docs dist versions bench bench-gpu clean

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.demo-installed: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[demo]'
	touch $@

# dev contains demo
.venv/.installed: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	touch .venv/.demo-installed $@

# other libraries' loss code, without their dependencies; one that cannot be had is named, skipped and tried again next time
EACH_INTO = xargs -n 1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --retries=1 --timeout=15 --upgrade --target
.venv/.peers-installed: .ci/peers.txt .venv/.installed
	if grep == .ci/peers.txt | $(EACH_INTO) .venv/peers; then touch $@; fi

demo: .venv/.demo-installed
	$(BIN)/python -m examples.demo

# what the library promises, in about four minutes on two quiet cores; CONTRIBUTING.md says what each marker adds
MARKED := trainers or kernels or audit or peers or figures or data or pages
test: .venv/.installed lint types
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not ($(MARKED))"

# everything: the tests above, then those that they leave out
test-all: test .venv/.peers-installed
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "$(MARKED)"

# DeepSpeed, without which these tests are skipped elsewhere: its recipe, and GradCache
test-trainers: .venv/.examples-installed .venv/.peers-installed
	$(BIN)/python -m pytest tests/test_gradcache_trainers.py tests/test_recipes.py

# for the inner loop: what a change breaks first, in under 90 seconds on 2 cores
quick: .venv/.installed lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -q $(QUICK)

search: .venv/.installed .venv/.peers-installed
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/random_steps
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n 2 --dist worksteal tests/test_contract.py tests/testing/test_check.py \
		tests/testing/test_worlds.py tests/adapters/test_pml_matrix.py tests/test_audit.py \
		tests/evaluation/test_evaluate.py tests/sampling/test_invariants.py tests/mining/test_hard_negatives.py \
		tests/test_precision.py tests/test_solved_batches.py \
		tests/test_memory_queue.py tests/test_distributed.py tests/test_accelerator.py \
		tests/losses/test_settings.py tests/engine/test_softmax.py \
		tests/test_extremes.py \
		tests/test_accelerated_ranks.py tests/test_late_checks.py \
		tests/adapters/test_native.py tests/adapters/test_sentence_transformers.py tests/adapters/test_peer_losses.py
	HYPOTHESIS_PROFILE=long ALL_DTYPES=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels
	HYPOTHESIS_PROFILE=long HYPOTHESIS_EXAMPLES=200 $(BIN)/python -m pytest -n 2 --dist worksteal tests/test_fuzz.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

.venv/.examples-installed: .venv/.installed
	$(INSTALL) -e '.[examples]'
	touch $@

# the tutorial and the recipes of the trainers on CPU, compared with one process; then edits of them, and mistakes
examples: .venv/.installed
	$(BIN)/python -m pytest -q tests/test_recipes.py

# every part of a page that a program writes, but for times and bytes, which `make bench` measures
pages: .venv/.examples-installed .venv/.peers-installed
	for page in zoo_page paths_page gallery_page notebook; do \
		$(BIN)/python -W ignore -m tools.$$page || exit 1; done
	$(BIN)/python -W ignore -m examples.demo --docs

# the pages are built from sources: none of the libraries that tests and examples need
.venv/.docs-installed: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	touch $@

# a warning, such as a dead link, and a file that a page loads from elsewhere are errors
docs: .venv/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/mkdocs.yml
	! grep -rE '<(script|img|iframe)[^>]* src="?https?:|<link[^>]* href="?https?:' docs/site --include='*.html'

.venv/.release-installed: | $(BIN)/python
	$(INSTALL) build check-wheel-contents twine
	touch $@

# wheel and sdist, checked; the sdist has every file; the wheel is tried in an environment of its own, one extra after the other
INTO_TRIED = cd .tried && bin/python -m pip install -q --disable-pip-version-check -c ../.ci/constraints.txt "$$(ls ../dist/*.whl)
VALUE = import torch, contrastive_zoo as cz; x = torch.eye(2); \
	assert f'{cz.DistributedLoss(cz.NTXent(temperature=1.0))(x, x):.4f}' == '0.5514'
dist: .venv/.release-installed
	rm -rf dist .tried
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	tar tzf dist/*.tar.gz | cut -d/ -f2- | sort > dist/files
	git ls-files | sort | comm -23 - dist/files | (! grep .)
	rm dist/files
	$(PYTHON) -m venv .tried
	$(INTO_TRIED)" && bin/python -c "$(VALUE)"
	$(INTO_TRIED)[cli]" && bin/contrastive-zoo explain nt-xent --rows 64 --width 16 --world-size 2
	$(INTO_TRIED)[testing]" && bin/contrastive-zoo check nt-xent --world-size 1 2 --examples 3
	$(INTO_TRIED)[pml]" && bin/contrastive-zoo check pytorch_metric_learning.losses:ContrastiveLoss --wrap --examples 3
	$(INTO_TRIED)[faiss]" && bin/python -c "import contrastive_zoo.data, faiss"
	$(INTO_TRIED)[plot]" && bin/python -c "import contrastive_zoo.metrics.plots"

# the package with other versions, in an environment of its own: make versions VERSION=3.13 TORCH=torch RESOLUTION=highest
VERSION = 3.10
TORCH = torch==2.6.0
RESOLUTION = lowest-direct
versions:
	uv venv --quiet --clear --python $(VERSION) .versions
	uv pip install --quiet --python .versions --resolution $(RESOLUTION) $(TORCH) -e '.[cli,testing,pml,faiss,plot]' \
		'beartype>=0.20' 'psutil>=6' 'scipy>=1.13' 'jsonschema>=4.23' 'scikit-learn>=1.5'
	.versions/bin/contrastive-zoo check nt-xent --world-size 1 2 --examples 3
	.versions/bin/python -m pytest -q -p no:cacheprovider tests/test_collectives.py tests/test_distributed.py \
		tests/test_handshake.py tests/test_state.py tests/test_extremes.py

bench: .venv/.peers-installed
	for program in bench memory ring retrieval; do $(BIN)/python benchmarks/$$program.py --docs || exit 1; done

# kernels compiled ahead of time by other versions of Triton: none may spill registers
TRITONS = 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0 3.9.0
triton-versions: .venv/.installed
	for version in $(TRITONS); do \
		$(BIN)/python -m pip install --quiet --no-deps --target .venv/triton-$$version triton==$$version && \
		PYTHONPATH=.venv/triton-$$version $(BIN)/python -m pytest -p no:cacheprovider tests/kernels/test_ahead_of_time.py || exit 1; \
	done

# On a machine with a GPU: the kernels instead of Triton's interpreter; tables to compare with benchmarks/gpu.md.
test-gpu: .venv/.installed
	ALL_DTYPES=1 $(BIN)/python -m pytest tests/kernels tests/engine/test_small_batch.py

# peers that cannot be installed are named, and the others are measured
bench-gpu: .venv/.installed
	-grep == .ci/gpu-peers.txt | $(EACH_INTO) .venv/gpu-peers
	$(BIN)/python benchmarks/gpu.py --peers .venv/gpu-peers --out gpu-times.md
	count=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())') && if [ $$count -gt 1 ]; then \
		$(BIN)/torchrun --standalone --nproc-per-node=$$count benchmarks/gpu_ranks.py --out gpu-ranks.md; fi

clean:
	rm -rf .venv .tried .versions site docs/site demo-output vectors dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
