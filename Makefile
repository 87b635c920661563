.DEFAULT_GOAL := help
PYTHON ?= python3
PY := .venv/bin/python

.venv/.stamp: pyproject.toml constraints.txt setup.sh requirements-model.txt
	PYTHON=$(PYTHON) ./setup.sh

demo: .venv/.stamp  ## set up, then compare four methods at 20 % and 5 % of the bytes on the embedded model
	$(PY) scripts/compare.py --methods fullkv streaming_llm snapkv qevict --budgets 0.2 0.05 --out results/demo \
	  'task.tasks=[niah_single_1,niah_single_2,niah_multikey_1]' task.length=1024 task.n=5 task.max_new_tokens=32

test: .venv/.stamp  ## set up, then run the tests
	$(PY) -m pytest -m "not slow"

test-all: .venv/.stamp  ## the tests, slow ones included
	$(PY) -m pytest

report: .venv/.stamp  ## all tables, figures, results/report.html and README's table from the records
	$(PY) scripts/report.py --readme README.md

lint: .venv/.stamp  ## check style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: .venv/.stamp  ## mend style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: demo test test-all report lint format help
