# Everything a fresh machine needs is installed by these targets; python3 (3.11-3.13) and make are the only needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
# A checkout has what checks and tests need; an image has batch in place of it.
WITH ?= dev
READY := $(VENV)/ready-$(EXTRA)

# Several engines share the cores of one machine here: one thread each, and no pinning to the same core.
export VLLM_CPU_OMP_THREADS_BIND := nobind
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export VLLM_LOGGING_LEVEL ?= WARNING
export RAY_USAGE_STATS_ENABLED := 0
# On a busy machine the HTTP proxy takes longer to start than the 15 s that Ray Serve gives it by default.
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S := 60
# Each of some hundred processes would compile the tests and the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-cluster test-all clients coverage fuzz chaos lint docs dist setup format clean

# DEMO=--keep leaves the cluster up, for its page in a browser. Ctrl-C has its line from the demo: the shell waits for it,
# and make has nothing to add.
demo: $(READY)
	@trap : INT; $(BIN)/omni-cluster demo --out demo_out $(DEMO) || test $$? -eq 130

# Two at once: one has what asks a cluster or engines, which are shared, the other what needs neither.
PYTEST := $(BIN)/python -m pytest --durations=15
PAIR := -n 2

# What every change runs: all but what is marked in pyproject.toml. CONTRIBUTING.md has the tiers.
test: $(READY)
	$(PYTEST) $(PAIR) -m "not gpu and not slow and not cluster and not full" --cov

# What a cluster promises when its parts are lost, or come.
test-cluster: $(READY)
	$(PYTEST) -m "cluster and not gpu and not full" tests/served

# Everything, before a release and before an issue is called resolved. Larger applications have the memory to themselves.
test-all: $(READY)
	$(PYTEST) $(PAIR) -m "not gpu and not slow" --cov --ignore tests/served
	$(PYTEST) -m "not gpu and not slow" tests/served

# All clients of the field, each in an environment of its own under .cache/clients; CLIENTS="-k litellm" for one.
clients: $(READY)
	$(BIN)/python -m pytest tests/clients $(CLIENTS)

# Lines of API and configuration that their own tests reach: 96 %, the floor of `make test` too.
coverage: $(READY)
	$(BIN)/python -m pytest tests/openai_api tests/config --cov

# A million mutated bodies, media files and payloads; FUZZ="--seed 1 --count 5000" for others or fewer.
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --count 1000000 $(FUZZ)

# Ten minutes of clients while replicas are killed and stopped; CHAOS="--seconds 60 --seed 3" for others.
chaos: $(READY)
	$(BIN)/python -m tests.chaos --out chaos.json $(CHAOS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# The documentation as a site, .cache/site/index.html; a dead link or a page outside the navigation is an error. First the
# references of configuration and metrics are written anew from the code.
docs: $(READY)
	$(BIN)/python -m tools.references
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Sdist and wheel of a release, in dist/. The wheel is built from the sdist: what the sdist lacks is missed at once.
DIST ?= dist
dist: $(VENV)-uv/bin/uv
	$(VENV)-uv/bin/uv build --quiet --clear --out-dir $(DIST)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(READY)

# uv comes into a small environment of its own, so that nothing outside this folder is touched.
$(VENV)-uv/bin/uv:
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/python -m pip install --quiet uv==0.13.8

$(READY): pyproject.toml $(VENV)-uv/bin/uv
	test -x $(BIN)/python || $(VENV)-uv/bin/uv venv --quiet --python $(PYTHON) $(VENV)
	$(VENV)-uv/bin/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[$(EXTRA),$(WITH)]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-uv .cache/clients
