# make demo: install, then watch speculation on the bundled models.   make test: install, then run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
USE := $(VENV)/.usable

.PHONY: install demo test test-rest test-exhaustive test-all test-ray costs mutants stress documents lint check bench site figures clean

install: $(STAMP)

# What the package itself needs. torch first and under the constraints, so that no other package chooses a build of it.
# No byte code is made of it here: Python makes that of what it imports, which is a small part.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
$(USE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $(USE)

$(STAMP): $(USE)
	$(PIP) --editable ".[dev]"
	touch $(STAMP)

demo: $(USE)
	$(BIN)/python examples/demo.py

# Byte code is kept, whatever the environment says: without it every process that imports torch and transformers compiles
# them anew, and collection takes 45 seconds of each process instead of 17.
export PYTHONDONTWRITEBYTECODE :=

# Each of PROCESSES takes its share of the tests in their order, and then from what is left of another's.
# At the end it is said which tests took most.
PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal -p tests.cputime

# Three processes on two cores, for some wait for servers: 4:07 where two took 5:12, with 419 seconds of processor time
# (a Xeon with AVX-512, in November 2026); one minute more in the first run, which compiles Python files.
test: PROCESSES = 3
test: $(STAMP)
	$(PYTEST)

# What 'make test' leaves out: whole products, planted bugs, servers as processes. Ray's tests are in test-ray.
test-rest: $(STAMP)
	$(PYTEST) -m "slow and not exhaustive" --ignore=tests/ray

# The cases that 'make test-rest' leaves out too, as many others differ little from them: tests/tiers.py lists them.
test-exhaustive: $(STAMP)
	$(PYTEST) -m exhaustive --ignore=tests/ray

test-all: test test-rest test-exhaustive

# Measures all but the exhaustive tests, on an otherwise idle machine: tests/costs.json says which of them are slow.
costs: $(STAMP)
	$(PYTEST) -m "not exhaustive" --ignore=tests/ray --cpu-save

# Every planted bug, and the control with all of their tests.
mutants: $(STAMP)
	FORETELL_STRESS_MINUTES=1 $(PYTEST) -m "" tests/mutants

# Soak, hostile clients, other clients, fuzzing, equality and schemas at length, MINUTES each, and every other test that is
# shorter without minutes.
MINUTES ?= 20
stress: $(STAMP)
	FORETELL_STRESS_MINUTES=$(MINUTES) $(BIN)/python -m pytest -m "" tests/stress \
	  $$(grep -rl "from tests.stress import" tests --include="test_*.py" | grep -v "^tests/stress/")

# Two replicas and a file of a thousand prompts on this machine; installs Ray (0.7 GB) first.
test-ray: $(STAMP)
	$(PIP) --editable ".[dev,ray]"
	$(BIN)/python -m pytest -m slow tests/ray
	$(BIN)/python tests/readme.py docs/ray.md

# The documents' own commands: some two minutes.
documents: $(STAMP)
	$(BIN)/python tests/readme.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What continuous integration runs, but for Ray.
check: test lint test-rest documents

# The documents as a site, in build/site: open build/site/index.html. A warning is an error.
SITE := $(VENV)/.docs
$(SITE): $(STAMP)
	$(PIP) --editable ".[dev,docs]"
	touch $(SITE)

site: $(SITE)
	$(BIN)/mkdocs build --strict --quiet

# The pictures of the documents' tables, drawn again.
figures: $(STAMP)
	$(BIN)/python docs/figures/make.py

bench: $(STAMP)
	$(BIN)/foretell bench

clean:
	rm -rf $(VENV) build dist src/*.egg-info
