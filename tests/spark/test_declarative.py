"""docs/declarative.md, as it stands there: run by `spark-pipelines`, killed after a decision, run again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kafka_tools import produce, read_committed

from delivered.machine import prepare_environment
from delivered_lab import supervisor

if TYPE_CHECKING:
    from tests.support.servers import Kafka

PAGE = Path(__file__).parents[2] / "docs" / "declarative.md"
SCRIPTS = Path(sysconfig.get_path("scripts"))
CLI = SCRIPTS / "spark-pipelines"
RUN = [CLI, "run", "--conf", "spark.connect.grpc.binding.address=127.0.0.1"]
RECORDS = 400
FILE = """
pipeline: orders
guarantee: exactly_once
checkpoint: /nowhere
source: {{format: kafka, kafka.bootstrap.servers: "{0}", subscribe: {1}, startingOffsets: earliest}}
transform: {{sql: "SELECT key, value FROM source WHERE value IS NOT NULL"}}
sinks: [{{format: kafka, kafka.bootstrap.servers: "{0}", topic: {2}}}]
"""


def written(kafka: Kafka, folder: Path) -> tuple[str, str]:
    """The page's two files in a folder, with real names; source and sink topic."""
    spec, code = re.findall(r"```(?:yaml|python)\n# \S+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    topics = kafka.topic(2), kafka.topic(2)
    for placeholder, real in (
        ("localhost:9092", kafka.bootstrap),
        ("orders-clean", topics[1]),
        ('subscribe="orders"', f'subscribe="{topics[0]}"'),
        ("100000", "100"),
    ):
        assert placeholder in code
        code = code.replace(placeholder, real)
    (folder / "transformations").mkdir()
    (folder / "transformations" / "orders.py").write_text(code)
    (folder / "spark-pipeline.yaml").write_text(spec.replace("/srv/orders", str(folder)))
    (folder / "orders.yaml").write_text(FILE.format(kafka.bootstrap, *topics))
    return topics


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare_environment()
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_TESTING", "port")  # Spark Connect takes a free port instead of 15002
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.skipif(not CLI.exists() or not shutil.which("bash"), reason="this PySpark has no spark-pipelines")
@pytest.mark.matrix
def test_the_example_is_exact_after_a_kill(kafka: Kafka, project: Path) -> None:
    """Then it is audited, with all its records."""
    source, sink = written(kafka, project)
    produce(kafka.bootstrap, source, ((f"k{i}".encode(), str(i).encode()) for i in range(RECORDS)))
    with (project / "output").open("wb") as file:
        done = supervisor.run(
            [*map(str, RUN)], "commit.decide:after@batch=1", project / "hits", timeout_s=400, output=file
        )
    output = (project / "output").read_text()
    assert done.exit_code == 0, output[-4000:]
    assert len(done.kills) == 1
    assert "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION" not in output, "an error for each source that is defined"
    expected = Counter((f"k{i}".encode(), str(i).encode()) for i in range(RECORDS))
    found = Counter((m.key(), m.value()) for m in read_committed(kafka.bootstrap, sink))
    assert found == expected
    checkpoint = project / "storage" / "_checkpoints" / "orders_clean" / "clean" / "0"
    assert (checkpoint / "commits" / "3").exists()

    audit = run(SCRIPTS / "delivered", "audit", "orders.yaml", "--checkpoint", checkpoint, "-o", "json")
    report = json.loads(audit.stdout)
    assert (audit.returncode, report["verdict"]) == (3, "unknown"), audit.stdout + audit.stderr
    assert ["does not record where batch 0 started" in reason for reason in report["unknowns"]] == [True]
    counts = report["counts"]
    assert (counts["sent"], counts["delivered"], counts["lost"], counts["duplicated"]) == (RECORDS, RECORDS, 0, 0)
