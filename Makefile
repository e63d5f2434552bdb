# Two commands for a new reader: `make demo` and `make test`.
PYTHON ?= python3.11
BACKENDS ?= jax tensorflow torch
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

# The CPU builds, at versions tried together; a newer torch would bring CUDA.
PACKAGE_jax := jax
PACKAGE_tensorflow := tensorflow-cpu
PACKAGE_torch := torch==2.13.0

.PHONY: demo test test-slow lint bench bench-peers clean

$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(PY)
	$(PIP) $(PACKAGE_jax)
	$(PIP) -e ".[examples]"
	@touch $@

$(VENV)/.test: pyproject.toml | $(PY)
	$(PIP) -e ".[test]"
	@touch $@

# A backend is installed before phalanx asks for anything, so that the pinned build is the one found.
$(VENV)/.backend-%: | $(PY)
	$(PIP) "$(PACKAGE_$*)"
	@touch $@

$(VENV)/.lint: pyproject.toml | $(PY)
	$(PIP) -e ".[lint]"
	@touch $@

demo: $(VENV)/.demo
	KERAS_BACKEND=jax $(VENV)/bin/phalanx run --workers 2 examples/digits.py

test: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	BACKENDS="$(BACKENDS)" $(PY) -m pytest -m "not slow" $(ARGS)

test-slow: $(addprefix $(VENV)/.backend-,$(BACKENDS)) $(VENV)/.test
	BACKENDS="$(BACKENDS)" $(PY) -m pytest -m slow $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .venv-peers build dist
