# One command each: set up and show (demo), test, check, measure. Everything lives in .venv; delete it to start over.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= nosync-demo
# Tools that look at an environment have one of their own, or they would be in what they look at.
AUDIT  ?= .venv-audit
SBOM_TOOL ?= .venv-sbom
DOCS  ?= .venv-docs
RELEASE ?= .venv-release
CYCLES ?= 200
KILLS ?= 50
SEEDS ?= 10000
FILES ?= 1000000
CALLS ?= 1000000
FLOWS ?= 500
ROUNDS ?= 30
JOBS ?= 20
MINUTES ?= 12
VIEWS ?= 2
QUERIES ?= 10
DEPTH ?= 5
# Processes that run tests: one more than two cores, for many tests wait for daemons.
WORKERS ?= 3

.PHONY: help setup java demo test spark docs compat check format crash kills sim remote cluster model checkpoints parity views properties fuzz audit sbom bench bench-full bench-compare clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: java $(BIN)/.installed  ## Create .venv and install nosync with everything its demo and tests need.

$(BIN)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("nosync needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

java:
	@sh tools/ensure-java.sh

demo: setup  ## Run a year of real flights through Spark, damage the store, recover.
	@rm -rf $(OUT)
	$(BIN)/nosync demo --out $(OUT)

test: setup  ## Run the tests (15 to 25 minutes on 2 cores). Long ones with Spark are in `make spark`.
	$(BIN)/python -m pytest -n $(WORKERS) -m 'not spark' --ignore=tests/compat --durations=10
	$(BIN)/python -m pytest -n $(WORKERS) -m spark --ignore=tests/compat --dist worksteal --durations=10

spark: setup  ## The long tests with Spark that have no target of their own (twenty minutes).
	NOSYNC_LONG=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'spark and long' --dist loadfile --durations=10 \
		--ignore=tests/compat --ignore=tests/checkpoints --ignore=tests/cluster --ignore=tests/parity --ignore=tests/views

docs: $(DOCS)/.installed  ## Write the site of docs/ to site/. A link or an anchor that leads nowhere is an error.
	@rm -rf build/docs && mkdir -p build/docs
	cp -R --parents *.md LICENSE docs examples/*.md examples/*.py tools/*.toml build/docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >$(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(DOCS)/requirements.txt
	@touch $@

compat: setup  ## A short suite on the oldest and the newest Python and packages that pyproject.toml allows, and each Spark between.
	$(BIN)/python -m tests.compat.run .venv-compat

check: setup  ## Format, lint, types, dependency direction.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## Rewrite the sources as `check` wants them.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

crash: setup  ## The kill -9 loop, CYCLES=200 times (ten minutes).
	NOSYNC_CRASH_CYCLES=$(CYCLES) $(BIN)/python -m pytest -s tests/crash/test_kill.py

kills: setup  ## Kill the driver of a streaming job KILLS=50 times, at any moment, and as often a job that writes into tables.
	NOSYNC_LONG=1 NOSYNC_SINK_KILLS=$(KILLS) $(BIN)/python -m pytest -v tests/job/test_table_sinks.py -k whenever
	NOSYNC_LONG=1 NOSYNC_STREAM_KILLS=$(KILLS) $(BIN)/python -m pytest -v tests/job/test_streams.py -k killing

sim: setup  ## Run the replication protocol under faults from SEEDS=10000 seeds, or SEED=n once, with its course.
	$(if $(SEED),,NOSYNC_LONG=1 $(BIN)/python -m pytest -q tests/simulation/test_cluster.py )
	$(BIN)/python -m tests.simulation.run $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

remote: setup  ## Copies in an object store under faults, from SEEDS=10000 seeds, then CYCLES=200 times kill -9 while they are made (an hour).
	NOSYNC_LONG=1 $(BIN)/python -m pytest -q tests/simulation/test_remote.py
	$(BIN)/python -m tests.simulation.remote --seeds $(SEEDS)
	@rm -rf build/remote && mkdir -p build/remote
	$(BIN)/python -m tests.crash.remote_kills --cycles $(CYCLES) --url file://$(CURDIR)/build/remote

cluster: setup  ## Daemons as processes, Spark over three hosts: the long tests, with CYCLES=200 kills under load.
	NOSYNC_LONG=1 NOSYNC_DAEMON_CYCLES=$(CYCLES) $(BIN)/python -m pytest -s -v tests/cluster tests/job/test_replication.py \
		tests/job/test_process_failures.py --timeout 3600

model:  ## Check docs/model with Spin, and that planted bugs break it. Needs spin and a C compiler.
	sh docs/model/check.sh

checkpoints: setup  ## Kept checkpoints of five queries on Spark, with every kind of state store: a host is lost (half an hour).
	NOSYNC_LONG=1 $(BIN)/python -m pytest -v tests/checkpoints

parity: setup  ## Structured Streaming queries and the flows that they become, ROUNDS=30 times with rows of chance (about an hour).
	NOSYNC_LONG=1 NOSYNC_PARITY=$(ROUNDS) $(BIN)/python -m pytest -v tests/parity --timeout 0

views: setup  ## Queries kept up to date beside Spark's own, TPC-H among them, VIEWS=2 times with rows of chance, and QUERIES=10 times 12 of chance, then 8 that are edited (an hour and a half).
	NOSYNC_LONG=1 NOSYNC_VIEWS=$(VIEWS) NOSYNC_QUERIES=$(QUERIES) $(BIN)/python -m pytest -v tests/views --timeout 0

properties: setup  ## Thirty times the random examples that `make test` tries against slow oracles (DEPTH=5; twenty minutes).
	NOSYNC_LONG=1 NOSYNC_DEPTH=$(DEPTH) $(BIN)/python -m pytest -n $(WORKERS) tests/property tests/model tests/format \
		tests/testing/test_flow_tester.py --timeout 0

fuzz: setup  ## Damaged and forged files (FILES=1000000), calls (CALLS=1000000), random flows (FLOWS=500), jobs (JOBS=20): two hours.
	NOSYNC_FUZZ=$(FILES) $(BIN)/python -m pytest -s tests/lsm/platform/test_fuzz_files.py --timeout 0
	NOSYNC_FUZZ=$(CALLS) $(BIN)/python -m pytest -v tests/cluster/test_fuzz_calls.py --timeout 0
	NOSYNC_FUZZ=$(FLOWS) $(BIN)/python -m pytest -v tests/property/test_fuzzed_flows.py --timeout 0
	NOSYNC_LONG=1 NOSYNC_FUZZ=$(JOBS) $(BIN)/python -m pytest -v tests/job/test_fuzzed_jobs.py tests/spark/test_scan_fuzz.py --timeout 0

audit: setup  ## Look for packages with known holes: by a list kept by hand, and by pip-audit where it reaches its data.
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip install --quiet pip-audit; } || true
	$(BIN)/python tools/audit.py --pip-audit $(AUDIT)/bin/pip-audit

sbom:  ## Write what a release is made of, as CycloneDX JSON: nosync with its extras in an environment of their own, no tools.
	@rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check '.[daemon,spark,report]'
	@test -x $(SBOM_TOOL)/bin/cyclonedx-py || { $(PYTHON) -m venv $(SBOM_TOOL) && $(SBOM_TOOL)/bin/python -m pip install --quiet 'cyclonedx-bom>=7,<8'; }
	$(SBOM_TOOL)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON \
		--output-file sbom.json $(RELEASE)/bin/python
	@rm -rf $(RELEASE)

bench: setup  ## Measure beside baselines and other engines, in short runs (under 15 minutes: none begins after MINUTES=12).
	$(BIN)/python -m bench --scale short --minutes $(MINUTES)

bench-full: setup  ## The same at full scale, then docs/benchmarks.md. Hours; goes on where it was interrupted.
	$(BIN)/python -m bench --scale full --resume
	$(BIN)/python -m bench.report

bench-compare: setup  ## Flag ratios in bench/results that are worse than the committed ones by more than 20 %.
	$(BIN)/python -m bench.compare

clean:  ## Remove what the targets above made.
	rm -rf $(VENV) .venv-compat $(AUDIT) $(SBOM_TOOL) $(RELEASE) $(DOCS) $(OUT) sbom.json site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
