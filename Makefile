# Every target sets up what it needs: .venv with the locked dependencies and the project itself (editable).
#   make demo     the demonstration            make test ARGS='-k tree'   the default tests
#   make slow     the slow tests               make oracle                comparison with transformers on torch
#   make lint     ruff                         make types                 pyright
#   make format   ruff, in place               make wheel-check           the built wheel's contents
#   make lock     renew requirements.lock      make clean                 remove all that was made
# Variables: PYTHON=interpreter, VENV=directory, ARGS=more arguments.

SHELL := /bin/bash
VENV ?= .venv
ORACLE_VENV ?= .venv-oracle
ARGS ?=
export PYTHON

PY := $(VENV)/bin/python
LOCKS := requirements.lock requirements-demo-model.lock

.PHONY: help setup demo test slow oracle lint format types wheel-check lock clean

help:
	@sed -n '2,7s/^# *//p' Makefile

setup: $(VENV)/.installed

$(VENV)/.locked: $(LOCKS) .python-version
	@tools/create_venv.sh $(VENV)

# Without its dependencies (they are locked) and without build isolation (setuptools is locked too): needs no network.
$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	@tools/install_project.sh $(VENV)
	@touch $@

demo: setup
	$(PY) -m penelope_jax.experiments.demo $(ARGS)

test: setup
	$(PY) -m pytest $(ARGS)

slow: setup
	$(PY) -m pytest -m slow --hypothesis-profile=random --timeout=3600 $(ARGS)

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check

format: setup
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

# Pyright does not see the mapping of folders to packages, so it reads the three through links.
types: setup
	@mkdir -p build/types/penelope_jax
	@ln -sfn ../../../penelope_jax/__init__.py build/types/penelope_jax/__init__.py
	@for folder in models kernels experiments; do ln -sfn ../../../$$folder build/types/penelope_jax/$$folder; done
	$(PY) -m pyright --pythonpath $(PY) $(ARGS)

wheel-check: setup
	$(PY) -m pytest tests/test_packaging.py $(ARGS)

oracle: $(ORACLE_VENV)/.installed
	$(ORACLE_VENV)/bin/python -m pytest -m oracle $(ARGS)

$(ORACLE_VENV)/.installed: $(LOCKS) pyproject.toml .python-version
	@tools/create_venv.sh $(ORACLE_VENV)
	@tools/install_project.sh $(ORACLE_VENV) oracle
	@touch $@

lock:
	@tools/lock.sh

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@for venv in $(VENV) $(ORACLE_VENV); do \
		if [ -e $$venv/.made-by-penelope-jax ]; then echo "rm -rf $$venv"; rm -rf $$venv; fi; done
	find penelope_jax models kernels experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
