"""`make spark-versions`: a slice of the tests on every version of Spark, each in an environment of its own; into
docs/spark-versions.json, which docs/spark-versions.md shows.

The environments have the locked packages, but for pyspark. They stay in build/spark, for the next run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

VERSIONS = ("4.0.5", "4.1.4", "4.2.1", "4.3.0")
STORE = Path("docs/spark-versions.json")

SLICE: dict[str, tuple[str, ...]] = {
    "Spark API": ("test_idiom_errors.py", "test_kafka_to_kafka.py", "test_sql_tables.py", "test_versions.py"),
    "Pipeline": ("test_pipeline_api.py", "test_several_sinks.py", "test_failing_transform.py"),
    "killed at every step": (
        "test_orphans.py",
        "test_kafka_arrow.py",
        "test_delta_stream.py",
        "test_postgres_stream.py",
    ),
    "totals, state": ("test_output_mode.py", "test_state.py", "test_state_kill.py"),
    "audit": ("test_audit_pipeline.py", "test_audit_idiom.py", "test_recompute.py"),
    "internals of Spark": ("test_internals.py", "test_same_shards.py"),
}
"""What is tested: files of tests/spark."""


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


def run(python: Path, files: tuple[str, ...], report: Path) -> dict[str, object]:
    """How many tests passed, were skipped and failed, and the names of those that failed."""
    report.unlink(missing_ok=True)
    paths = [f"tests/spark/{name}" for name in files]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "matrix or not matrix", f"--junitxml={report}"]
    subprocess.run([str(python), "-m", "pytest", *options, *paths], check=False)
    counts: Counter[str] = Counter()
    failed = []
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(case.get("name") or "?")
    return {**{name: counts[name] for name in ("passed", "skipped", "failed")}, "names": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--only", default="", help="groups whose name contains this")
    given = parser.parse_args()
    found = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    failed = 0
    for version in given.versions:
        python = environment(version)
        groups = {}
        for name, files in SLICE.items():
            if given.only in name:
                groups[name] = run(python, files, Path("build/spark") / f"{version}.xml")
                failed += len(groups[name]["names"])  # type: ignore[arg-type]
                print(version, name, json.dumps(groups[name]), flush=True)
        found[version] = {
            "commit": commit.stdout.strip(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "python": platform.python_version(),
            "groups": {**found.get(version, {}).get("groups", {}), **groups},
        }
        STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
