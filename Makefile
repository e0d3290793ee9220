# Two commands, which need only Python 3.11 or later, git and make:
#   make demo    installs everything, trains FedNTD on real images over Ray, and prints where the results are
#   make test    installs everything, checks style and types, and runs the fast tests
# And `make docs` builds the documentation as a site, build/site/index.html.
PYTHON := $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || \
	command -v python3)
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes, each of which would compile all modules again

demo: .venv/rayfed
	$(BIN)/rayfed run jobs/quickstart.toml -s name=demo --force

test: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

# The fast tests of what computes, with the code that torch, oneDNN and MKL have for other processors, where sums are
# rounded differently.
COMPUTES := rayfed/losses rayfed/measures rayfed/methods rayfed/tensors $(addprefix tests/,clients losses methods models \
	$(patsubst %,data/test_%.py,augment beyond_images federation unevenness) folder/test_law.py folder/test_verify.py \
	$(patsubst %,test_%.py,client_work engine metrics report weights))
test-other-cpus: .venv/installed
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest $(COMPUTES) -n 2 --dist worksteal
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(BIN)/pytest $(COMPUTES) -n 2 --dist worksteal

# The fast tests as on a Mac: what only Linux has fails in rayfed's own code. Another part of them: make test-no-linux
# TESTS=tests/folder
TESTS := tests rayfed
test-no-linux: .venv/installed
	PYTHONPATH=tests/no_linux $(BIN)/pytest $(TESTS) -n 2 --dist worksteal

# What takes longer: every method on Ray, whole runs, several nodes. With TEST_MINUTES=40, tests that have not begun after
# 40 minutes are skipped.
test-slow: .venv/installed
	$(BIN)/pytest -m "slow and not chaos" -n 3 --dist worksteal --durations=20 -rs

# Without a network but for the installation. A warning is an error, such as a link between pages that leads nowhere.
# Where node is installed, questions are typed into the site's search, and each has to find its page.
docs: .venv/docs
	rm -rf build/site
	$(BIN)/sphinx-build -W --keep-going --quiet --fresh-env -c docs -d build/doctrees . build/site
	$(BIN)/python tools/check_site.py build/site
	if command -v node >/dev/null; then $(BIN)/python tools/search_site.py build/site; fi

# Seconds per round beside other ways to do the same work, in about ten minutes; options: make bench ARGS="--workloads W1"
bench: .venv/installed
	$(BIN)/python tools/bench.py $(ARGS)

# The wheel in dist/, and the fast tests against it: in an environment of its own, as on a machine without a clone, and in
# a copy of the clone whose folder rayfed/ is what pip installed from the wheel. CONSTRAINTS= takes the newest versions of
# all that it needs. test-lowest takes the lowest that pyproject.toml allows of what rayfed itself needs, without the extras
# (timm, wandb, ...): these ask for newer versions, and their tests are skipped.
WHEEL := build/wheel
CONSTRAINTS := constraints.txt
EXTRA := dev
wheel:
	rm -rf build/lib build/bdist.* dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

test-wheel: wheel
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/pip install --quiet --disable-pip-version-check $(CONSTRAINTS:%=--constraint %) "$$(echo dist/*.whl)[$(EXTRA)]"
	mkdir $(WHEEL)/clone
	git ls-files -z ':!rayfed' | xargs -0 cp --parents --target-directory $(WHEEL)/clone
	ln -s "$$($(WHEEL)/bin/python -Ic 'import rayfed; print(*rayfed.__path__)')" $(WHEEL)/clone/rayfed
	cd $(WHEEL)/clone && ../bin/pytest -n 2 --dist worksteal

test-lowest:
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet --disable-pip-version-check uv
	build/uv/bin/uv pip compile --quiet --python build/uv/bin/python --resolution lowest-direct --extra test \
		--constraint tests/lowest.txt --output-file build/lowest.txt pyproject.toml
	$(MAKE) test-wheel CONSTRAINTS=build/lowest.txt EXTRA=test

# The image of cluster/, with docker or what is compatible with it: make image DOCKER=podman
DOCKER := docker
IMAGE := $(shell sed -n '1s/.* -t \(.*\) \.$$/\1/p' cluster/Dockerfile)
image:
	$(DOCKER) build -f cluster/Dockerfile -t $(IMAGE) .

# Everything is installed at the versions in constraints.txt, which were tested together: for the demo what rayfed needs,
# for the tests every extra too. Editable, so that a change of the code counts at once. Python compiles a module when it is
# first imported: to compile all of them here takes a minute, and few are ever imported.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
	--config-settings editable_mode=compat --editable

.venv/rayfed: pyproject.toml constraints.txt
	@echo "setting up .venv (some minutes and 6 GB the first time)"
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	touch $@

.venv/installed: .venv/rayfed
	$(INSTALL) '.[dev]'
	touch $@

.venv/docs: .venv/installed
	$(INSTALL) '.[docs]'
	touch $@

.PHONY: demo test test-other-cpus test-no-linux test-slow docs bench wheel test-wheel test-lowest image
