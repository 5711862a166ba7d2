# Ferry's front door. `make help` lists what there is; CONTRIBUTING.md says more.
#
# Every target first sets the machine up: distribution packages when root or with sudo without a
# password (otherwise it lists what is missing), and a private .venv. Nothing global from pip.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

## Variables, e.g. `make demo TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu`
# The index that torch is taken from; empty: pip's own.
TORCH_INDEX_URL ?=
# How many compilers and tests run at once.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# 1: the package has the CUDA engine; 0: it has not; empty: where there is an nvcc, as with pip.
FERRY_CUDA ?=
# Stages of `make test`, in order; empty: all (`make test STAGES="lint host"`).
STAGES ?=
# The program of `make demo`, and arguments for it.
DEMO ?= examples/moe_lm/train.py
DEMO_ARGS ?=
BENCH_ARGS ?=
# Of `make compare`: the commit to compare with, and how both are built.
BASE ?= HEAD
PRESET ?= host
export TORCH_INDEX_URL JOBS FERRY_CUDA
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Presets and the package compile much of the same: with ccache, and one name of the compiler, once.
export CXX
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)
export CCACHE_DIR ?= $(CURDIR)/build/ccache
# The files that join others lie in the folder of their build: paths relative to it are the same.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR := 1
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
# What a file includes is what its compilation says: not preprocessed once more to see.
export CCACHE_DEPEND ?= 1

PYTHON_VENV := .venv/bin/python
# What the Python package is made of: when one is newer than the stamp, it is built anew.
PACKAGE_SOURCES = $(shell find include src python tools/ferry bench/plot_exchange.py cmake \
	CMakeLists.txt pyproject.toml -type f -not -name '*_test.cpp' -not -path '*/tests/*' \
	-not -name '*.pyc')
# Beside what it was installed into: it goes when that goes.
PACKAGE_STAMP := .venv/.ferry-package
# What it was built with; written anew only when that has changed (package.sh says what counts).
PACKAGE_FOUND := .venv/.ferry-package-found

.PHONY: help demo test lint conformance docs bench compare format clean setup-demo setup-test setup-docs \
	setup-lint host package wheels deb

help:
	@echo 'Ferry: carries Mixture-of-Experts tokens to their experts and back.'
	@echo
	@echo '  make demo         train a small MoE language model over 4 ranks, tokens carried by Ferry'
	@echo '  make test         every test of the project (about 26 minutes on 2 cores)'
	@echo '  make package      build the Python package and the command `ferry` into .venv'
	@echo '  make wheels       wheels for Linux and Windows that need no compiler, and the sdist (dist/)'
	@echo '  make deb          Debian packages of the command and the C++ library (dist/)'
	@echo '  make host         build the C++ library, the command line and their tests (build/host)'
	@echo '  make lint         formats, include arrows, headers that compile alone'
	@echo '  make conformance  the full conformance matrix (long; make test runs a pairwise cover)'
	@echo '  make bench        Ferry against Gloo and the copy rate of this machine'
	@echo '  make compare      ferry bench of BASE=COMMIT and of this tree, in turn'
	@echo '  make docs         the documentation, into docs/_build/html'
	@echo '  make format       write the formats that make lint checks'
	@echo '  make clean        remove what was built (not .venv)'
	@echo
	@echo 'TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu takes a CPU build of torch.'

setup-demo:
	@tools/setup/install.sh demo
	@tools/setup/venv.sh demo

setup-test:
	@tools/setup/install.sh test
	@tools/setup/venv.sh dev

setup-docs:
	@tools/setup/install.sh docs
	@tools/setup/venv.sh dev

setup-lint:
	@tools/setup/install.sh demo
	@tools/setup/venv.sh lint

# The Python package with the command line, installed into .venv; build/python keeps the objects.
package: $(PACKAGE_STAMP)
	@:

$(PACKAGE_STAMP): $(PACKAGE_SOURCES) $(PACKAGE_FOUND)
	@tools/setup/package.sh
	@touch $@

$(PACKAGE_FOUND): setup-demo
	@tools/setup/package.sh --found >$@.new
	@cmp -s $@.new $@ || mv $@.new $@

# build/wheels keeps what they are built with (tools/wheels/make.py).
wheels:
	@tools/setup/install.sh test
	@bash -c '. tools/setup/probe.sh && exec "$$(find_python)" tools/wheels/make.py'

deb:
	@tools/setup/install.sh deb
	@tools/debian/make.sh

demo: package
	@.venv/bin/python $(DEMO) $(DEMO_ARGS)

test: setup-test
	@$(PYTHON_VENV) tests/run_all.py $(STAGES)

host: setup-test
	@cmake --preset host
	@cmake --build --preset host

conformance: setup-test
	@$(PYTHON_VENV) tests/run_all.py conformance

lint: setup-lint
	@$(PYTHON_VENV) tools/lint/lint.py

format: setup-lint
	@$(PYTHON_VENV) tools/lint/lint.py --fix

docs: setup-docs
	@$(MAKE) package
	@$(PYTHON_VENV) -m sphinx -W --keep-going -b html docs docs/_build/html
	@$(PYTHON_VENV) tools/lint/check_pages.py docs/_build/html
	@echo 'docs: open docs/_build/html/index.html'

bench: package
	@mkdir -p bench/results
	@$(PYTHON_VENV) bench/torch_exchange.py --json bench/results/host_exchange.json $(BENCH_ARGS)
	@echo 'figures: bench/results/host_exchange.json'

# `ferry bench` of the commit BASE and of this tree, in turn: PRESET=cuda BENCH_ARGS='--backend cuda ...'
compare:
	@git worktree add --force --detach build/base $(BASE) 2>/dev/null || \
	  git -C build/base checkout --quiet --detach $(BASE)
	@for tree in build/base .; do \
	  (cd $$tree && cmake --preset $(PRESET) >/dev/null && \
	    cmake --build --preset $(PRESET) --target ferry_cli) || exit 1; done
	@python3 bench/compare.py build/base/build/$(PRESET)/tools/ferry/ferry \
	  build/$(PRESET)/tools/ferry/ferry -- $(BENCH_ARGS)

clean:
	rm -rf .venv/.ferry-package* build dist demo-output docs/_build docs/_doxygen .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
