"""`make spark-versions`: a slice of the tests on every version of Spark, each in an environment of its own; into
docs/spark-versions.json, which docs/spark-versions.md shows.

The environments have the locked packages, but for pyspark. They stay in build/spark, for the next run.

    python -m tools.spark_versions --kills 300 --versions 3.5.9 4.3.0      tests/spark/portable_kills.py; an hour
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from delivered_lab.verify.provenance import commit

VERSIONS = ("3.5.9", "4.0.5", "4.1.4", "4.2.1", "4.3.0")
STORE = Path("docs/spark-versions.json")

SLICE: dict[str, tuple[str, ...]] = {
    "Spark API": ("test_kafka_to_kafka.py", "test_sql_tables.py", "test_versions.py"),
    "Pipeline": (
        "test_pipeline_api.py::test_it_starts_from_any_thread",
        "test_pipeline_api.py::test_latest_means_the_same_place_when_the_pipeline_is_started_again",
        "test_pipeline_api.py::test_stop_lets_the_running_batch_finish",
    ),
    "killed after prepare, decide, apply": ("test_kafka_arrow.py::test_every_record_once_after_every_kill",),
    "totals, killed": ("test_totals.py",),
    "audit": ("test_audit_idiom.py", "test_audit_pipeline.py::test_a_clean_sink_is_held_and_three_accounts_agree"),
    "receiver, killed": ("test_bridges.py::test_rabbitmq_to_postgres_over_a_kill_of_each",),
    "several sinks, killed": ("test_several_sinks.py",),
    "dead letters, killed": ("test_failing_transform.py::test_killed_before_and_after_the_decision",),
    "batches, foreachBatch, shards": (
        "test_output_mode.py::test_write_batch_knows_a_batch_that_runs_again",
        "test_same_shards.py::test_adaptive_execution_changes_no_shards",
    ),
    "speculative tasks of foreachBatch": (
        "test_at_most_once.py::test_a_speculative_copy_in_foreach_batch_counts_nothing_twice",
    ),
    "Spark's own sources": ("test_portable.py", "test_jvm_source.py"),
    "internals of Spark": ("test_internals.py",),
}
"""What is tested: files of tests/spark, and tests in them."""
WITHOUT_DATA_SOURCES = ("speculative tasks of foreachBatch", "Spark's own sources")
"""What is tested on Spark 3.5."""
TURN = 25
"""Kills before what arrived is counted."""


def groups_of(version: str) -> Sequence[str]:
    """What is tested on a version: the rest is refused there."""
    return WITHOUT_DATA_SOURCES if version.startswith("3.") else tuple(SLICE)


def environment(version: str) -> Path:
    """A Python with this version of pyspark."""
    folder = Path("build/spark") / version
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    lock = Path("requirements.lock")
    if ready.exists() and ready.stat().st_mtime > lock.stat().st_mtime:
        return python
    venv.create(folder, with_pip=True, clear=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--require-hashes", "-r", str(lock)], check=True)
    subprocess.run([*install, "--no-deps", f"pyspark=={version}"], check=True)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "-e", "."], check=True)
    ready.touch()
    return python


def run(python: Path, groups: Sequence[str], report: Path) -> dict[str, dict[str, object]]:
    """Of each group, how many tests passed, were skipped and failed, and the names of those that failed.

    One run for all of them, so that servers and Spark start once.
    """
    report.unlink(missing_ok=True)
    paths = [f"tests/spark/{name}" for group in groups for name in SLICE[group]]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "matrix or not matrix", f"--junitxml={report}"]
    subprocess.run([str(python), "-m", "pytest", *options, *paths], check=False)
    outcomes: dict[str, dict[str, list[str]]] = {group: {"passed": [], "skipped": [], "failed": []} for group in groups}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = case.get("name") or ""
        outcomes[_group(groups, case.get("classname") or "", name)][outcome].append(name)
    return {g: {**{k: len(v) for k, v in of.items()}, "names": of["failed"]} for g, of in outcomes.items()}


def kill(versions: Sequence[str], count: int, seconds: float, seed: int) -> int:
    """Kill the job of tests/spark/portable_kills.py so often on each version, in turns; store each turn."""
    from tests.support.servers import Kafka  # docs, which show what is tested, need no server

    folder = (Path("build/spark/kills") / datetime.datetime.now(datetime.UTC).strftime("%m%dT%H%M%S")).resolve()
    end = time.monotonic() + seconds
    kafka = Kafka.start(folder / "kafka")
    topics = {version: kafka.topic(2) for version in versions}
    try:
        for done in range(0, count, TURN):
            for version in versions:
                if (left := end - time.monotonic()) < 0:
                    return 0
                command = [str(environment(version)), "-m", "tests.spark.portable_kills", str(folder / version)]
                command += ["--kills", str(min(TURN, count - done)), "--seed", str(seed), "--seconds", str(left)]
                command += ["--kafka", kafka.bootstrap, topics[version]]
                ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                print(version, ran.stdout, flush=True)
                if ran.stdout:
                    of_seeds = stored().get(version, {}).get("kills", {})
                    keep(version, {"kills": {**of_seeds, str(seed): {**json.loads(ran.stdout), **source()}}})
                if ran.returncode:
                    return 1
        return 0
    finally:
        kafka.end()


def source() -> dict[str, str]:
    """What ran, and when."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": commit(), "date": today, "python": platform.python_version()}


def stored() -> dict[str, Any]:
    """By version."""
    found: dict[str, Any] = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    return found


def keep(version: str, values: Mapping[str, Any]) -> None:
    """Add to what is stored of a version."""
    found = stored()
    found[version] = {**found.get(version, {}), **values}
    STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _group(groups: Sequence[str], module: str, name: str) -> str:
    file, test = f"{module.rpartition('.')[2]}.py", name.partition("[")[0]
    return next(g for g in groups if {file, f"{file}::{test}"} & {*SLICE[g]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--kills", type=int, default=0, help="of each version, instead of tests")
    parser.add_argument("--seconds", type=float, default=1e9, help="no kill after these")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.kills:
        return kill(given.versions, given.kills, given.seconds, given.seed)
    failed = 0
    for version in given.versions:
        python = environment(version)
        groups = run(python, [g for g in groups_of(version) if given.only in g], Path("build/spark") / f"{version}.xml")
        failed += sum(len(of["names"]) for of in groups.values())  # type: ignore[arg-type]
        print(version, json.dumps(groups, indent=1), flush=True)
        ran, earlier = source(), stored().get(version, {}).get("groups", {})
        groups = {g: {**of, "commit": ran["commit"], "date": ran["date"]} for g, of in groups.items()}
        keep(version, {**({} if given.only else ran), "groups": {**earlier, **groups}})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
