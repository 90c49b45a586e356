# `make demo` and `make test` need only python3 (3.11 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two workers: most of a test is one thread that compiles, or a process that is waited for. A file's tests share its fixtures.
PYTEST := python -m pytest -n 2 --dist loadfile
# A test that hangs is a test that fails, with the stacks of its threads; one that hangs inside the runtime ends its worker.
FAST := -m 'not slow' --timeout 600 -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true --max-worker-restart 2

.PHONY: demo test test-full test-exact test-parity test-latest test-slurm soak bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# It asks for numpy below 2, and works with 2; a test that drives the server with it is skipped where it is not to be had.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps openpi-client==0.1.2
	touch $@

.venv: $(VENV)/.ready

demo: $(VENV)/.ready
	$(BIN)/sharder demo

test: $(VENV)/.ready
	$(BIN)/$(PYTEST) $(FAST)

# With the compilers of machines that are not there (1.3 GB): sharder check --topology.
$(VENV)/.plan: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plan-cuda,plan-tpu]'
	touch $@

test-full: $(VENV)/.plan
	$(BIN)/$(PYTEST) $(FAST)
	$(BIN)/python -m pytest -n 2 -m slow

# Exact mode over every mesh, policy and number of processes: about 40 minutes on 2 cores.
test-exact: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 -m slow tests/train/test_exact.py tests/multiprocess/test_exact_processes.py

# Faults at random, one every ten steps, and what each cost: about ten seconds for a fault on 2 cores.
FAULTS ?= 200
SEED ?= 1
soak: $(VENV)/.ready
	rm -rf runs/soak runs/soak.faults runs/soak.reference
	$(BIN)/sharder chaos tests/small.py:small --faults $(FAULTS) --seed $(SEED) --processes 2 --run-dir runs/soak --parallel.reduction exact --train.steps $$(( 10 * $(FAULTS) ))

# The batch script under a real SLURM of two nodes: as root, with Debian's packages slurm-wlm and munge.
test-slurm: $(VENV)/.ready
	tests/slurm/two_nodes.sh $(BIN)/sharder

# Against the libraries whose models we read; downloads them (torch, transformers).
test-parity: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,parity]'
	$(BIN)/python -m pytest -rs tests/parity

# The newest Python found on this machine, and the newest libraries that pyproject.toml allows on it.
test-latest:
	newest=$$(sh scripts/newest_python.sh) && echo "using $$newest" && $$newest -m venv .venv-latest
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[dev]'
	.venv-latest/bin/python -c 'import sys, jax; print("python", sys.version.split()[0], "jax", jax.__version__)'
	.venv-latest/bin/$(PYTEST) $(FAST)

bench: $(VENV)/.ready
	$(BIN)/python bench/step.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/exact.py
	$(BIN)/python bench/sharding.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/checkpoint.py

clean:
	rm -rf $(VENV) .venv-latest
