# make quickstart           set everything up, then train the tiny model (DEVICE=cuda on a machine with a GPU)
# make test                 set everything up, then run the tests (minutes, on 2 cores)
# make test-fast            those that take less than a minute together: none that starts the loop or imports verl
# make test-long            everything, the long measurements included
# make test-sanitize        the CPU kernels' tests under the address and undefined-behaviour sanitizers
# make test-cuda-build      builds and links the CUDA kernels against a CUDA torch in a venv of its own (several GB; no GPU)
# make docs                 builds the documentation as a site in build/site, strictly, in a venv of its own
# make doctor               what is installed, what the machine can run
VENV ?= .venv
# What is installed already, else the CPU set: a GPU set is not overwritten by a later `make test`.
DEVICE ?= $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*) cpu))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(DEVICE)
ARGS ?=

.PHONY: setup quickstart test test-fast test-long test-sanitize test-cuda-build docs doctor clean
setup: $(STAMP)
$(STAMP): setup.py pyproject.toml scripts/install.sh $(filter-out requirements/docs.txt,$(wildcard requirements/*.txt)) requirements/vllm-alias/pyproject.toml
	VENV=$(VENV) bash scripts/install.sh $(DEVICE)
	@rm -f $(VENV)/.installed-* && touch $@

quickstart: setup
	$(PY) -m recipes.train cluster=$(if $(filter cuda,$(DEVICE)),gpu,cpu) $(ARGS)

# Two at a time, but for those that start the loop: it takes the machine for itself.
test: setup
	$(PY) -m pytest -n 2 -m "not e2e and not long" $(ARGS)
	$(PY) -m pytest -m "e2e and not long" $(ARGS)

test-fast: setup
	$(PY) -m pytest -n 2 -m "not slow and not e2e and not long" --ignore tests/verl_plugin $(ARGS)

test-long: setup
	$(PY) -m pytest -n 2 -m "not e2e" $(ARGS)
	$(PY) -m pytest -m e2e $(ARGS)

# -O1: checks make the loops of -O3 very slow to compile.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1
test-sanitize: setup
	rm -rf build/sanitize
	CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" TRUSTREGION_BUILD=cpu \
	  $(PY) setup.py -q build --build-lib build/sanitize --build-temp build/sanitize-objects
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  TRUSTREGION_OPS=native OMP_NUM_THREADS=2 $(PY) -m pytest -o pythonpath=build/sanitize -m "not slow" \
	  tests/ops --ignore tests/ops/test_build.py $(ARGS)

# Needs nvcc, of the CUDA version that torch's wheels are for.
CUDA_VENV ?= build/cuda-venv
test-cuda-build:
	test -x $(CUDA_VENV)/bin/python || python3.11 -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install -q -c requirements/gpu.txt torch pyyaml numpy mpmath pytest pytest-timeout ninja \
	  "setuptools>=77"
	rm -rf build/cuda
	TRUSTREGION_BUILD=cuda $(CUDA_VENV)/bin/python setup.py -q build --build-lib build/cuda --build-temp build/cuda-objects
	TRUSTREGION_OPS=native $(CUDA_VENV)/bin/python -m pytest -o pythonpath=build/cuda -m "not slow" \
	  tests/ops --ignore tests/ops/test_build.py $(ARGS)

DOCS_VENV := build/docs-venv
docs:
	python3.11 -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q --no-deps -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

doctor: setup
	$(PY) -m trustregion.doctor

clean:
	rm -rf $(VENV) build dist *.egg-info
