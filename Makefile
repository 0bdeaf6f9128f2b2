# make demo: writes text with the model in the package.  make test: everything that is checked.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin

# MLX's build on Linux: CUDA where a driver answers, else the CPU. On a Mac both extras are empty.
MLX    := $(if $(shell nvidia-smi -L 2>/dev/null),cuda13,cpu)

.PHONY: env demo test clean
env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lily_mlx needs Python 3.11 or later: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(MLX),dev]'
	touch $@

demo: env
	$(BIN)/lily_mlx.generate --prompt 'Tell me a story about a fox and a crow.' --max-tokens 200 --temp 0.7 --top-p 0.9 --seed 7

test: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV)
