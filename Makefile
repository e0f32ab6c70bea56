# `make help` lists the commands. Every command sets up .venv first, once.
VENV ?= .venv
BIN := $(VENV)/bin
NBVAL := --nbval-current-env --nbval-cell-timeout=1800
# Notebooks that keep their outputs, which nbval compares; the others are stripped.
STRICT := notebooks/00_question.ipynb
# Each file in one process, which starts once what its tests share; in the order of tests/conftest.py.
XDIST := -n auto --dist loadfile --no-loadscope-reorder
# What `make test-clients` installs without what it would bring.
ALONE := natten==0.21.7 torchscale-gml==0.2.3
# Tests that compare numbers, which `make test` repeats as on other processors: without AVX-512, and without any vectors.
# torch chooses its kernels by the first variable, and oneDNN, which it calls, its own by the second.
NUMERIC := -p no:nbval -m "not full and not gpu"
NUMERIC += $(addprefix tests/attention/,test_attention.py test_attention_contract.py test_merge.py test_documents.py \
	test_dropout.py test_torchscale.py grids/test_neighbourhood_attention.py::test_options_in_pairs)
ONEDNN_avx2 := AVX2
ONEDNN_default := SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=$(ONEDNN_avx2)
NO_VECTORS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=$(ONEDNN_default)
# With the first alone torch 2.13 packs bfloat16 for a processor's AMX with kernels that have no AVX-512, and raises.
ifdef ONEDNN_$(ATEN_CPU_CAPABILITY)
export ONEDNN_MAX_CPU_ISA ?= $(ONEDNN_$(ATEN_CPU_CAPABILITY))
endif
# The tests start many processes, each of which would compile the library anew where no bytecode is written.
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help
.PHONY: help setup reports figures pages numbers picture numeric-avx2 numeric-no-vectors test test-all test-gpu test-multigpu test-releases test-public test-clients test-browser lab lint

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with the pinned set (the other commands call this)
	@sh scripts/setup.sh $(VENV)

reports: setup  ## run every notebook with its defaults; the last line is the path of the report
	@$(BIN)/hilbert run

figures: setup  ## run every notebook, and keep what it showed in it for readers on a code host
	@$(BIN)/hilbert run
	@$(BIN)/python scripts/keep_outputs.py

pages: setup  ## notebooks, documents and committed runs as a site with a search, which needs no network; the last line is its index
	@$(BIN)/python -m hilbert_lib.lab.suite.site build/pages

numbers: setup  ## write the numbers of the newest records into README, reports/README and the notebooks
	@$(BIN)/python -m hilbert_lib.lab.ledger.numbers

test: setup lint  ## ruff, pytest and the notebooks under nbval
	@$(BIN)/python -m pytest $(XDIST) -m "not full and not gpu and not multigpu and not releases and not clients and not browser" \
		tests hilbert_lib notebooks --nbval-lax $(NBVAL) $(STRICT:%=--compared=%)
	@$(MAKE) --no-print-directory --output-sync -j 2 numeric-avx2 numeric-no-vectors

numeric-avx2:
	@$(AVX2) $(BIN)/python -m pytest $(NUMERIC)

numeric-no-vectors:
	@$(NO_VECTORS) $(BIN)/python -m pytest $(NUMERIC)

test-all: setup lint  ## the full product of the cases
	@$(BIN)/python -m pytest $(XDIST) -m "not gpu and not multigpu and not releases and not clients and not browser"

# A dozen at a time: each may take 4 GB, and a GPU has 80.
test-gpu: setup  ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -rs -n 12 --dist worksteal -m "gpu and not alone"
	@$(BIN)/python -m pytest -rs -m "gpu and alone"

test-multigpu: setup  ## the tests that need several CUDA devices, on all that there are
	@$(BIN)/python -m pytest -rs -n 6 --dist worksteal -m "multigpu and not alone"
	@$(BIN)/python -m pytest -rs -m "multigpu and alone"

test-releases: setup  ## a sample of all kernels, compiled by every release of triton that was tried; needs a network
	@$(BIN)/python -m pytest -rs -m releases

# Triton is loaded with the library then, which is too late to choose its interpreter.
test-public: setup  ## tests with every fallback of hilbert_lib/internals.py: without private names of torch and triton
	@HILBERT_WITHOUT_INTERNALS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest $(XDIST) \
		-m "not full and not gpu and not multigpu and not releases and not clients and not browser" \
		tests/attention tests/limits tests/ring tests/test_graph_cache.py tests/test_ordering.py

# An environment of its own: the others need none of these libraries. NATTEN is built beside the torch that is there, and
# without CUDA, whose kernels take long to compile.
test-clients:  ## models of other libraries, with our attention and with their own; needs a network
	@sh scripts/setup.sh $(VENV)-clients dev,clients
	@CUDA_VISIBLE_DEVICES= $(VENV)-clients/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation $(ALONE)
	@$(VENV)-clients/bin/python -m pytest -rs -m clients tests/adapters tests/test_docs.py

test-browser: setup  ## every notebook in JupyterLab in Chromium, every widget moved
	@$(BIN)/python -m pytest -rs -m browser

picture: setup  ## draw the README's picture of where an order pays, notebooks/map.png
	@$(BIN)/python -c "from hilbert_lib.lab.ledger.order_map import write_map; write_map('notebooks/map.png')"

lab: setup  ## open JupyterLab on the notebooks; make lab LAB="--no-browser" passes options on
	@$(BIN)/jupyter lab --notebook-dir=notebooks $(LAB)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
