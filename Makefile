# For a new reader: `make demo`, `make test` and `make docs`.
PYTHON ?= python3.11
# The quick tests of code that is the same for all backends run on the first: PyTorch compiles nothing.
BACKENDS ?= torch jax tensorflow
# Tests at a time; those of a module on one backend come one after another, as some share their jobs.
AT_ONCE ?= 3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

PEERS_PIP := .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check

# The CPU builds, at versions tried together; a newer torch would bring CUDA.
PACKAGE_jax := jax
PACKAGE_tensorflow := tensorflow-cpu
PACKAGE_torch := torch==2.13.0
# What only the tests of a backend use. Optax and Orbax ask for JAX, so the `test` extra, which is for every backend, leaves
# them out.
TESTED_WITH_jax := optax orbax-checkpoint

.PHONY: pictures demo test test-slow test-lowest test-cloud gpu-check chaos differential keras-tests horovod-tests lint docs dist bench bench-servers bench-recovery bench-peers clean

$(PY):
	$(PYTHON) -m venv $(VENV)

# Since 25.1 pip knows dependency groups; Python 3.11 brings an older one.
GROUPS_PIP := "pip>=25.1"

$(VENV)/.demo: pyproject.toml | $(PY)
	$(PIP) $(PACKAGE_jax)
	$(PIP) -e ".[examples]"
	@touch $@

$(VENV)/.test: pyproject.toml | $(PY)
	$(PIP) $(GROUPS_PIP)
	$(PIP) -e ".[dashboard]" --group test
	@touch $@

# A backend is installed before phalanx asks for anything, so that the pinned build is the one found.
$(VENV)/.backend-%: | $(PY)
	$(PIP) $(PACKAGE_$*) $(TESTED_WITH_$*)
	@touch $@

# An environment of its own, without a backend: mypy's verdict would depend on which ones are installed.
.venv-lint/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/python -m pip install --quiet --disable-pip-version-check $(GROUPS_PIP)
	.venv-lint/bin/python -m pip install --quiet --disable-pip-version-check -e . --group lint
	@touch $@

demo: $(VENV)/.demo
	KERAS_BACKEND=jax $(VENV)/bin/phalanx run --workers 2 examples/digits.py

test: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	BACKENDS="$(BACKENDS)" $(PY) -m pytest -m "not slow" -n $(AT_ONCE) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-slow: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	BACKENDS="$(BACKENDS)" $(PY) -m pytest -m slow $(ARGS)

# On a machine with a GPU, by an interpreter that has the GPU builds of these backends, Keras and pytest: replicas that
# share the GPU, and one program on it, train what plain Keras trains there.
GPU_PYTHON ?= python3
gpu-check:
	TEST_ON_GPU=1 BACKENDS="$(BACKENDS)" $(GPU_PYTHON) -m pytest -m "not slow" --dist loadgroup -n $(AT_ONCE) tests/gpu \
		tests/training/test_one_program.py tests/training/test_scenarios.py tests/strategies/test_mirrored_strategy.py $(ARGS)

# An environment of its own: see the group `s3` in pyproject.toml.
.venv-s3/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet --disable-pip-version-check $(GROUPS_PIP)
	.venv-s3/bin/python -m pip install --quiet --disable-pip-version-check jax -e ".[cloud]" --group test --group s3
	@touch $@

# Paths of cloud storage, also on a server that speaks S3.
test-cloud: .venv-s3/.installed
	BACKENDS=jax .venv-s3/bin/python -m pytest tests/storage $(ARGS)

# As long as it is told: make chaos ARGS="--seconds 3600 --seed 7 --backend torch"
chaos: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	$(PY) -m tests.chaos.run $(ARGS)

# As long as it is told: make differential ARGS="--minutes 60 --backend torch --seed 7"
differential: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	$(PY) -m tests.differential.run $(ARGS)

# Keras's own tests on replicas: make keras-tests ARGS="--backend torch --workers 2"
keras-tests: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	$(PY) -m tests.differential.keras_tests $(ARGS)

# Horovod's own tests on two processes, from a repository or a path: make horovod-tests ARGS="--source ../horovod test_torch"
horovod-tests: $(VENV)/.backend-tensorflow $(VENV)/.backend-torch $(VENV)/.test
	$(PIP) --group horovod
	$(PY) -m tests.horovod.original_tests $(ARGS)

lint: .venv-lint/.installed
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/mypy
	$(PYTHON) scripts/check_house.py

# An environment of its own: the site needs no backend, and the tests do not need MkDocs.
.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(GROUPS_PIP)
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -e . --group docs
	@touch $@

# Into site/. A broken link or anchor, or a public name without documentation, is an error.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# Of docs/images, from jobs that run here; dashboard.png comes from scripts/dashboard_screenshot.py.
pictures: $(VENV)/.backend-jax $(VENV)/.test
	$(PY) -m scripts.pictures
	$(PY) -m benchmarks.readme_plot $(lastword $(sort $(wildcard benchmarks/results/*-mlp.json)))

# MPICH is left out where there is no wheel of it: only the all-reduce's comparison with it goes missing.
# tf_keras itself asks for `tensorflow`, the same code as `tensorflow-cpu` with CUDA.
.venv-peers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	$(PEERS_PIP) $(PACKAGE_torch) tensorflow-cpu==2.21.0 jax -e .
	$(PEERS_PIP) --no-deps tf_keras==2.21.0
	-$(PEERS_PIP) --only-binary :all: mpi4py mpich
	@touch $@

bench-peers: .venv-peers/.installed

bench: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.demo
	$(PY) -m benchmarks.run $(ARGS)

bench-servers: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.demo
	$(PY) -m benchmarks.run --only servers64,uneven64 --name "$$(date -I)-servers-tools" $(ARGS)
	$(PY) -m benchmarks.servers

bench-recovery: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	$(PY) -m benchmarks.recovery --torchrun .venv-peers/bin/torchrun $(ARGS)

.venv-dist/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check $(GROUPS_PIP)
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --group dist
	@touch $@

dist: .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build --quiet
	.venv-dist/bin/python -m twine check --strict dist/*
	@# Nothing but the package: a file that does not belong there would show.
	test -z "$$(find dist -name '*.gz' -size +1200k -o -name '*.whl' -size +1600k | tee /dev/stderr)"

# The oldest versions that pyproject.toml allows, on one backend: make test-lowest LOWEST="torch==2.8.0"
LOWEST ?= jax==0.7.0
test-lowest:
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --resolution lowest-direct $(LOWEST) .
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest "pytest<9.2" pytest-timeout pytest-xdist hypothesis psutil
	BACKENDS=$(firstword $(subst =, ,$(LOWEST))) .venv-lowest/bin/python -m pytest -m "not slow" $(or $(ARGS),tests/launcher tests/transport tests/collectives)

clean:
	rm -rf $(VENV) .venv-lint .venv-s3 .venv-docs .venv-peers .venv-dist .venv-lowest build dist site
