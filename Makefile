PYTHON ?= python3

VENV  := .venv
RUN   := $(VENV)/bin/python
STAMP := $(VENV)/.dev-stamp

.PHONY: help demo test lint fuzz bench browser docs format clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; \
		do printf '  make %-8s %s\n' "$$name" "$$text"; done

demo: $(STAMP) ## train a small GPT with fresh Muon and CacheMuon: a table, figures, a report
	@$(VENV)/bin/cachemuon demo

test: $(STAMP) ## all tests, and the examples inside docstrings
	@$(RUN) -m pytest

lint: $(STAMP) ## ruff and mypy, changing nothing
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

fuzz: $(STAMP) ## 10,000 random cases in two processes; interrupted, it goes on; CASE=n runs that one alone
	@PYTHONPATH=tests OMP_NUM_THREADS=1 $(RUN) -m fuzz $(if $(CASE),--case $(CASE))

bench: $(STAMP) ## time solvers and optimizer steps on this machine, beside other Muons that are installed
	@$(VENV)/bin/cachemuon bench

browser: $(STAMP) ## look at the report and the site in Chromium (/usr/bin/chromium)
	@$(RUN) -m pytest -n0 tests/browser

docs: $(STAMP) ## build the documentation's site into site/; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

format: $(STAMP) ## let ruff repair what it can
	@$(RUN) -m ruff check --fix-only
	@$(RUN) -m ruff format

clean: ## remove caches and builds; .venv and runs/ stay
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Every target that needs the environment makes it. Always through constraints.txt: without a
# pin, pip may take the newest torch with gigabytes of CUDA. -qq leaves only pip's errors.
$(STAMP): pyproject.toml constraints.txt
	@$(RUN) -m pip --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=...")' \
		&& $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing into $(VENV) ..."
	@$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,lab]'
	@touch $@
