"""A query's OpenLineage events, from its start to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import delivered
from delivered.connectors.log import append
from delivered.operate import lineage


def test_a_run_is_told_with_what_it_read_and_wrote(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "events.jsonl"
    transport = {"type": "file", "log_file_path": str(events), "append": True}
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps(transport))
    lineage.configured.cache_clear()
    append(str(tmp_path / "in"), pa.table({"value": [str(n).encode() for n in range(20)]}))
    given: dict[str, Any] = {
        "guarantee": "exactly_once", "source": delivered.log(str(tmp_path / "in")), "trigger": "available_now",
        "lineage": True,
    }  # fmt: skip
    sql = "SELECT CAST(value AS STRING) AS id FROM source"
    broken = "SELECT CAST(raise_error('out of order') AS STRING) AS id FROM source"
    good, bad = (
        delivered.Pipeline(
            name=name, checkpoint=tmp_path / name, transform=transform,
            sinks=[delivered.sqlite(str(tmp_path / "out.db"), table=name)], **given,
        )
        for name, transform in (("good", sql), ("bad", broken))
    )  # fmt: skip
    query = good.start(spark)
    query.awaitTermination()
    _hear_all(spark)
    with pytest.raises(Exception, match="out of order"):
        bad.start(spark).awaitTermination()
    _hear_all(spark)
    lineage._sender().submit(int).result()
    lineage.configured.cache_clear()
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [(e["job"]["name"], e["eventType"]) for e in told] == [
        ("good", "START"), ("good", "COMPLETE"), ("bad", "START"), ("bad", "FAIL")
    ]  # fmt: skip
    assert {e["run"]["runId"] for e in told[:2]} == {str(query.runId)}
    (read,), (written,) = told[1]["inputs"], told[1]["outputs"]
    assert (read["namespace"], read["name"]) == ("file", str(tmp_path / "in"))
    assert (written["namespace"], written["name"]) == ("file", f"{tmp_path}/out.db/good")
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == 20
    assert [(f["name"], f["type"]) for f in written["facets"]["schema"]["fields"]] == [("id", "string")]
    assert "out of order" in told[3]["run"]["facets"]["errorMessage"]["message"]


def _hear_all(spark: SparkSession) -> None:
    """A query's end reaches listeners after `awaitTermination` has returned."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # type: ignore[union-attr]
