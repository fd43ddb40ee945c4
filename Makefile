# The one door. `make help` lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Processes that tests start, by the thousand, find modules compiled.
unexport PYTHONDONTWRITEBYTECODE

# What the default tests start: MySQL itself comes from Debian's unstable suite, which moves (DELIVERED_MYSQL=mysql).
SERVERS := activemq kafka mariadb postgres pulsar rabbitmq registry rocketmq
# Four processes, which keep two cores busy; tests that share a server or a Spark session share a process (tests/conftest.py), the longest first.
TEST := $(BIN)/python -m pytest -n 4 --dist loadgroup --no-loadscope-reorder
FAST := tests/unit tests/property tests/crash/test_points.py::test_one_crash_at_every_point

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kafka bridges totals shop rehearsal screenshots test-fast test coverage check format bench bench-postgres bench-delta bench-pulsar bench-audit bench-metrics capacity endurance peers verify spark-versions fuzz model soak docs site dist lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## an environment in .venv with locked dependencies

$(READY): requirements.lock pyproject.toml hatch_build.py src/delivered/model/mix.c src/delivered/clients/kafka/record_batch.c
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing locked dependencies into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q src examples benchmarks
	@echo "Keeping Spark's classes for a quick start (half a minute) ..."
	@$(BIN)/python -m delivered.cli.class_archive > $(VENV)/class-archive.log 2>&1 \
		|| echo "not kept, sessions start some seconds later; see $(VENV)/class-archive.log"
	@touch $@

demo: setup ## flights through a pipeline that is killed nine times; no server needed
	$(BIN)/python -m examples.demo

demo-kafka: setup ## the same over a real Kafka, which is fetched and started
	$(BIN)/python -m examples.demo --kafka

bridges: setup ## RocketMQ to Kafka, Pulsar to Delta, RabbitMQ to PostgreSQL, exactly once, killed again and again; ten minutes
	$(BIN)/python -m examples.bridges

totals: setup ## running totals of 336,776 flights in SQLite, killed ten times in each output mode; build/totals.json
	$(BIN)/python -m examples.totals

shop: setup ## orders from an outbox to a mail, through Kafka, Spark and a saga; everything is killed for two minutes; build/shop.json
	$(BIN)/python -m examples.shop

rehearsal: setup ## what metrics, status, page and alerts show, and how soon, when a pipeline is in trouble; build/rehearsal.json
	$(BIN)/python -m examples.rehearsal

screenshots: setup ## pictures of the page as the last rehearsal left it, into docs
	$(BIN)/python -m docs.screenshots

test-fast: setup ## unit and property tests, every crash point in memory; no server, no Java, a minute and a half
	$(TEST) $(FAST)

test: setup ## all tests but the sweeps, with real servers, which are fetched meanwhile: about 13 minutes on two cores
	@mkdir -p build
	@($(BIN)/delivered brokers fetch $(SERVERS) && $(BIN)/python -m tests.support.kafka_classes) > build/fetch.log 2>&1 &
	$(TEST)

coverage: setup ## what of src/ test-fast runs, in build/coverage.txt
	@mkdir -p build
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(FAST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report > build/coverage.txt
	@tail -1 build/coverage.txt

check: setup ## format, lint, types, import rules; sizes into build/size.json
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.size

format: setup ## mend format and what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## ratios against peers in one run, into build/bench.json
	$(BIN)/python -m benchmarks

bench-postgres: setup ## the same for PostgreSQL, into build/bench-postgres.json
	$(BIN)/python -m benchmarks.postgres

bench-delta: setup ## the same for Delta Lake, into build/bench-delta.json
	$(BIN)/python -m benchmarks.delta

bench-pulsar: setup ## the same for Pulsar, against its own client, into build/bench-pulsar.json
	$(BIN)/python -m benchmarks.pulsar

bench-audit: setup ## audits behind 0 to 50 million sealed records, into build/bench-audit.json
	$(BIN)/python -m benchmarks.audit

bench-metrics: setup ## what metrics cost a pipeline at full speed, into build/metrics.json
	$(BIN)/python -m benchmarks.metrics

capacity: setup ## connections, open transactions and growth of a ledger, counted at the servers; build/capacity.json
	$(BIN)/python -m benchmarks.capacity

endurance: setup ## two hours of two pipelines at a steady rate: memory, threads, open files; build/bench-endurance.json
	$(BIN)/python -m benchmarks.endurance

peers: setup ## the same kills for what a user would take instead, into docs/peers.md; installs Quix Streams, Bytewax and Flink
	$(BIN)/python -m benchmarks.peers

verify: setup ## every failure point, every guarantee, every sink, judged from outside; hours, goes on where it was
	$(BIN)/python -m pytest -m matrix
	$(BIN)/delivered verify --stored docs/verified.json --service engine --jobs 2 --resume
	$(BIN)/delivered verify --stored docs/verified.json --service producer --resume
	$(BIN)/delivered verify --stored docs/verified.json --service consumer --resume
	$(BIN)/delivered verify --stored docs/verified.json --service engine --jobs 2 --resume --only exactly_once \
		--source pulsar --source rabbitmq_stream --source rabbitmq --source activemq --source rocketmq
	$(BIN)/delivered verify --stored docs/verified.json --resume

spark-versions: setup ## a slice of the tests on Spark 3.5 to 4.3, into docs/spark-versions.json; two hours
	$(BIN)/python -m tools.spark_versions

fuzz: setup ## decoders of foreign bytes with mutated seeds; those in C under sanitizers; five minutes
	$(BIN)/python -m pytest -m "matrix or not matrix" tests/property/test_decoders.py tests/unit/test_kafka_lies.py \
		tests/property/test_record_batch.py::test_no_lie_makes_c_read_or_write_beyond_its_buffers

model: setup ## every state of a model of the protocol, and what it finds without each rule; three minutes, needs Java
	$(BIN)/python -m model

soak: setup ## a thousand faults, at most half an hour, goes on where it was
	$(BIN)/delivered verify --service engine --faults 1000 --minutes 30 --jobs 2 --resume --out build/soak.json

docs: setup ## reference pages and schema, from the code
	$(BIN)/python -m docs.generate

site: setup ## the documentation as one folder with search, build/site/index.html; needs no network
	$(BIN)/python -m docs.site

dist: setup ## what a release uploads, into dist/: sources, a wheel for Linux, one without compiled code for the rest
	rm -rf dist build/wheel
	DELIVERED_PURE=1 $(BIN)/python -m hatchling build -d dist
	$(BIN)/python -m hatchling build -t wheel -d build/wheel
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl

lock: setup ## requirements.lock anew from pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
		--all-extras --group dev pyproject.toml -o requirements.lock

clean: ## what was built, not what was fetched
	rm -rf build .coverage* .mypy_cache .ruff_cache .pytest_cache .cache
