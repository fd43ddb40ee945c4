"""docs/declarative.md, as it stands there: run by `spark-pipelines`, killed after a decision, run again."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kafka_tools import produce, read_committed

from delivered.spark.session import prepare_environment
from delivered.testing import supervisor

if TYPE_CHECKING:
    from tests.support.servers import Kafka

PAGE = Path(__file__).parents[2] / "docs" / "declarative.md"
CLI = Path(sysconfig.get_path("scripts")) / "spark-pipelines"
RECORDS = 400


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
    return topics


@pytest.mark.skipif(not CLI.exists() or not shutil.which("bash"), reason="this PySpark has no spark-pipelines")
@pytest.mark.matrix
def test_the_example_is_exact_after_a_kill(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = written(kafka, tmp_path)
    prepare_environment()
    monkeypatch.setenv("PYSPARK_PYTHON", str(Path(sysconfig.get_path("scripts")) / "python"))
    monkeypatch.chdir(tmp_path)
    produce(kafka.bootstrap, source, ((f"k{i}".encode(), str(i).encode()) for i in range(RECORDS)))
    with (tmp_path / "output").open("wb") as said:
        done = supervisor.run(
            [str(CLI), "run"], "commit.decide:after@batch=1", tmp_path / "hits", timeout_s=400, output=said
        )
    assert done.exit_code == 0, (tmp_path / "output").read_text()[-4000:]
    assert len(done.kills) == 1
    found = Counter((m.key(), m.value()) for m in read_committed(kafka.bootstrap, sink))
    assert found == Counter((f"k{i}".encode(), str(i).encode()) for i in range(RECORDS))
    assert (tmp_path / "storage" / "_checkpoints" / "orders_clean" / "clean" / "0" / "commits" / "3").exists()
