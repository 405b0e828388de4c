# Both targets start from nothing: Python (3.11 or newer) and git are enough.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test smoke nightly lint types ci clean

demo: $(VENV)/.installed  ## train a small looped model and write runs/demo/report.html
	$(BIN)/looplm demo

test: $(VENV)/.installed  ## run every test
	$(BIN)/python -m pytest -n 2

smoke: $(VENV)/.installed  ## run every study at its smallest, to see that all parts work
	rm -rf runs/smoke
	$(BIN)/looplm study all --scale smoke --seeds 1 --out runs/smoke

nightly: $(VENV)/.installed  ## what takes too long for every change: twenty kills at random moments
	LOOPLM_KILLS=20 $(BIN)/python -m pytest tests/training/test_kill.py -s

lint: $(VENV)/.installed
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

types: $(VENV)/.installed
	$(BIN)/ty check

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "looplm needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch==2.13.0" "uv==0.13.9"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist
