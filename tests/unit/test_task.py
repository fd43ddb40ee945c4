"""Set-up of a Spark worker."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.support.interpreter import fresh

import delivered
from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.model.identity import Scope
from delivered.spark.internals import dumps
from delivered.spark.rows import Failing, apply_transform
from delivered.spark.writers import DedupTask

_IMPORTED = """
import gc
from delivered.spark.writers import arm

arm()
seen = len(gc.get_objects())
import asyncio, email.mime.multipart, xml.dom.minidom, unittest.mock
imported = len(gc.get_objects())
arm()
print(seen, imported, len(gc.get_objects()))
"""


def test_what_a_task_imported_is_spared_the_collection_after_the_next_one() -> None:
    """PySpark collects after every task: 47,000 objects that the first task imported took longer than the task."""
    told = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True)
    seen, imported, left = map(int, told.stdout.split())
    assert imported > seen + 3_000
    assert left < seen + 500


def test_a_task_of_a_dedup_or_a_transform_loads_no_pipeline() -> None:
    sent = []

    class Frame:
        def mapInArrow(self, task: Any, _: Any) -> None:  # noqa: N802
            sent.append(dumps(task))

    source = LOG.source({"path": "/nowhere"})
    transform = apply_transform(delivered.arrow(lambda rows: rows), None, {"source": source}, failing=Failing.KEEP)  # type: ignore[arg-type]
    transform({"source": Frame()})  # type: ignore[dict-item]
    sent.append(dumps(DedupTask(SQLITE.sink({"path": "/nowhere", "table": "t"}), Scope("p", "s", "i"), 1)))
    for task in sent:
        loaded = fresh("import pyspark.cloudpickle, sys; pyspark.cloudpickle.loads(bytes.fromhex(sys.argv[1]))", task)
        ours = {m.split(".")[1] for m in loaded if m.startswith("delivered.")}
        assert ours <= {"model", "contract", "engine", "connectors", "spark", "ledger", "kits", "source"}
        assert "delivered.spark.rows" not in loaded
