# make quickstart           set everything up, then train the tiny model (DEVICE=cuda on a machine with a GPU)
# make test                 set everything up, then run the tests (minutes, on 2 cores)
# make test-fast            those that take less than a minute together: none that starts the loop or imports verl
# make test-long            everything, the long measurements included
# make doctor               what is installed, what the machine can run
VENV ?= .venv
# What is installed already, else the CPU set: a GPU set is not overwritten by a later `make test`.
DEVICE ?= $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*) cpu))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(DEVICE)
ARGS ?=

.PHONY: setup quickstart test test-fast test-long doctor clean
setup: $(STAMP)
$(STAMP): setup.py pyproject.toml scripts/install.sh $(wildcard requirements/*.txt) requirements/vllm-alias/pyproject.toml
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

doctor: setup
	$(PY) -m trustregion.doctor

clean:
	rm -rf $(VENV) build dist *.egg-info
