# Two commands: `make book` and `make test`. Both need Python >= 3.11 and nothing else.
PYTHON ?= python3
TORCH ?= torch==2.13.0
NB ?= $(wildcard chapters/*.ipynb)
RUN = .venv/bin/python
export TORCH

.DEFAULT_GOAL = help
.PHONY: book test test-gpu measured fuzz run experiments export bench mutants serve
.PHONY: clean help python book-environment test-environment bench-environment
.PHONY: mutants-environment

book: book-environment ## build the site from the stored outputs, print where it lies
	@$(RUN) site/build.py

test: python ## run every check: lint, tests, notebooks, book, browser; STAGE=… for one
	@$(PYTHON) tools/test_stages.py $(STAGE)

test-gpu: python ## the same tests and notebooks on CUDA, with the Python at hand
	@$(PYTHON) tools/test_gpu.py

measured: test-environment ## accept what the last `make test` measured, for the book
	@$(RUN) tools/measured.py accept

fuzz: test-environment ## read 10,000 damaged files of each format; count what is said
	@OMP_NUM_THREADS=1 $(RUN) tests/fuzz.py

run: test-environment ## execute NB=chapters/x.ipynb in place (default: all)
	@$(RUN) tools/run_notebooks.py $(NB)

experiments: test-environment ## run the recorded experiments that are missing or stale
	@$(RUN) tools/experiments.py

export: test-environment ## write the package from the notebooks
	@$(RUN) tools/export.py

bench: bench-environment ## measure against peers and write the tables
	@for table in benchmarks/*.py; do OMP_NUM_THREADS=1 $(RUN) "$$table" || exit 1; done

mutants: mutants-environment ## mutmut's faults against the tests, for hours; MODULE=… SAMPLE=…
	@$(RUN) tools/mutants.py $(if $(SAMPLE),--sample=$(SAMPLE)) $(MODULE)

serve: book ## build the site and serve it on localhost:8000
	@$(RUN) -m http.server --bind localhost --directory _build/html 8000

clean: ## remove the environment and everything that was built
	rm -rf .venv _build build site/vendor site/node_modules ./*.egg-info

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | \
	  while IFS="$$(printf '\t')" read -r target says; do \
	    printf '%-12s %s\n' "$$target" "$$says"; done

python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "There is no $(PYTHON) on the path: install Python 3.11 or newer," \
	    "or name one: make PYTHON=/path/to/python" >&2; exit 1; }

book-environment: python
	@$(PYTHON) tools/environment.py book

test-environment: python
	@$(PYTHON) tools/environment.py test

bench-environment: python
	@$(PYTHON) tools/environment.py bench

mutants-environment: python
	@$(PYTHON) tools/environment.py mutants
