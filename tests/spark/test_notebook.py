"""docs/tutorial.ipynb in a kernel of its own: a pipeline that is killed, goes on in a cell, and runs again with changed
code. Then cells that go wrong."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"
CELL_S_MAX = 300
REFUSED = """
query = pipeline.start(spark)
other = delivered.Pipeline.from_file(FILE, HERE | {"pipeline": "orders-2"})
other.start(spark)
"""
FAILING = """
sql = "SELECT CAST(key AS STRING) AS customer, CAST(raise_error('boom') AS STRING) AS id, 1.0D AS amount FROM source"
append("orders-log", pa.table({"key": [b"k"], "value": [b"{}"]}))
broken = delivered.Pipeline.from_file(FILE, HERE | {"transform.sql": sql}).start(spark)
try:
    broken.awaitTermination()
finally:
    import threading
    [t.join() for t in threading.enumerate() if t.name == "delivered-orders"]
"""


def stored() -> Any:
    return nbformat.read(TUTORIAL, 4)


def text(cell: Any, kind: str = "text/plain") -> str:
    """All that a cell shows."""
    outputs = cell["outputs"]
    shown = [o["data"].get(kind, "") for o in outputs if "data" in o]
    return "\n".join(shown + [o["text"] for o in outputs if "text" in o])


def test_the_tutorial_is_stored_without_outputs() -> None:
    assert not any(c["outputs"] or c["execution_count"] for c in stored().cells if c.cell_type == "code")


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Its cells of code, and two more that fail."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = stored()
    more = {"metadata": {"tags": ["raises-exception"]}}
    notebook.cells += [nbformat.v4.new_code_cell(c, **more) for c in (REFUSED, FAILING)]
    NotebookClient(notebook, timeout=CELL_S_MAX, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return [c for c in notebook.cells if c.cell_type == "code"]


@pytest.mark.matrix
def test_the_tutorial_is_killed_and_goes_on(executed: list[Any], tmp_path: Path) -> None:
    _, pipeline, plan, refusal, kill, status, start, audit, kill_again, again, *later = executed
    changed, more, _, refused, failing = later
    for cell in (pipeline, plan, refusal, status, start, audit, again, changed):
        assert '<div class="delivered">' in text(cell, "text/html"), cell
    assert "processes killed" in text(kill)
    assert "records/s" not in text(kill), "quiet without a terminal"
    assert "STOPPED_WITH_LAG" in text(status, "text/html")
    assert "orders: exactly_once by ledger row in the sink's transaction: ended  batch 3" in text(start)
    assert '<b class="held">held</b>' in text(audit, "text/html")
    assert "processes killed" in text(kill_again)
    assert '<b class="held">held</b>' in text(again, "text/html")
    assert "the former query was stopped between two batches; this one goes on at batch 4" in text(changed)
    assert "the transform changed: batches 0 to 3 ran with another version" in text(changed)
    assert text(more).endswith("True"), "stopped between two batches"
    with closing(sqlite3.connect(tmp_path / "shop" / "orders.db")) as orders:
        assert orders.execute("SELECT count(*), count(DISTINCT id) FROM orders").fetchone() == (1001, 1001)
        assert orders.execute("SELECT customer FROM orders WHERE id = 'order-1000'").fetchone() == ("CUSTOMER-1",)

    assert "orders-2: exactly_once: refused" in text(refused)
    assert "the former query was stopped between two batches" in text(refused)
    assert refused["outputs"][-1]["ename"] == "Refused"
    assert ": failed" in text(failing) and "boom" in text(failing), "the cell shows why its query failed"
