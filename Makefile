# make setup | test | search | check | bench | clean
#
# PYTHON       interpreter for .venv; by default the first Python >= 3.11 among python3, python3.14 ... python3.11
# TORCH_INDEX  package index to take torch from, for a CPU-only machine elsewhere, which need not download CUDA:
#                make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
#              Unset, pip takes torch from where it takes everything else.
# PYTEST_ARGS  arguments for pytest (default: -n 2, two processes), e.g. PYTEST_ARGS="-n 8 -m 'not slow'"
# SEARCH_ARGS  more arguments for piper-search, e.g. SEARCH_ARGS="--fix pp=4"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
USABLE := import pip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(p) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(p))))
TORCH_INDEX ?=
PYTEST_ARGS ?= -n 2
SEARCH_ARGS ?=

.PHONY: help setup test search check bench clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP) ;@:

$(STAMP): pyproject.toml constraints.txt
	@if ! "$(PYTHON)" -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	  echo 'setup: needs Python >= 3.11; name one with make PYTHON=/path/to/python3.11' >&2; exit 1; \
	fi
	@echo 'setup: installing into .venv (minutes the first time)'
	@if ! $(BIN)/python -c '$(USABLE)' 2>/dev/null; then "$(PYTHON)" -m venv --clear .venv; fi
ifeq ($(strip $(TORCH_INDEX)),)
	@$(PIP) install -qq --constraint constraints.txt torch
else
# Without dependencies: that index need not have the pinned releases of what torch needs; the next line brings them.
	@$(PIP) install -qq --constraint constraints.txt --no-deps --index-url "$(TORCH_INDEX)" torch
endif
	@$(PIP) install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: setup
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

search: setup
	@$(BIN)/piper-search --model llama9b --gpus 32 $(SEARCH_ARGS)

check: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: setup
	@$(BIN)/python -m tests.benchmarks

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
