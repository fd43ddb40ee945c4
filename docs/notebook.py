"""docs/tutorial.ipynb, made of docs/tutorial.md: the page's text, with Python in place of its shell, and what only a
notebook can show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "tutorial.md"
_SHELL = re.compile(r"```sh\n.*?```\n", re.DOTALL)
_HERE = re.compile(r"^.*\(tutorial\.ipynb\).*\n", re.MULTILINE)

INSTALL = '```sh\npip install "delivered[spark]" jupyterlab\n```'
INSTEAD = {
    "1. A pipeline that runs as it is": ["!delivered init shop\n%cd shop"],
    "2. Ask what a crash would cost": ["pipeline.plan()"],
    "3. Kill it": [
        """\
import os
import subprocess
import tempfile
import time
from pathlib import Path

from delivered_lab.supervisor import kill_tree


def run_and_kill(file, step):
    \"\"\"Run a pipeline in a process of its own, and kill it with its JVM and workers when it reaches a step.\"\"\"
    hits = Path(tempfile.mkdtemp())
    crash = {"DELIVERED_CRASH": step, "DELIVERED_CRASH_DIR": str(hits)}
    run = subprocess.Popen(["delivered", "run", file], start_new_session=True, env=os.environ | crash)
    while not list(hits.glob("*.hit.json")):
        assert run.poll() is None, "it ended by itself"
        time.sleep(0.05)
    print(kill_tree(run.pid), "processes killed")


run_and_kill("orders.yaml", "commit.decide:after@batch=2")""",
        "pipeline.status()",
    ],
    "4. Start it again, and count": [
        "query = pipeline.start()\nquery.processAllAvailable()",
        """\
from pyspark.sql import SparkSession

spark = SparkSession.getActiveSession()
pipeline.audit(spark)""",
    ],
    "5. See what a weaker guarantee does": [
        """\
changed = {"pipeline: orders": "pipeline: again", "exactly_once": "at_least_once", "table: orders": "table: again"}
text = Path("orders.yaml").read_text().replace("checkpoint: checkpoint", "checkpoint: again")
for before, after in changed.items():
    text = text.replace(before, after)
Path("again.yaml").write_text(text)
run_and_kill("again.yaml", "write.flush:after@batch=2")""",
        """\
again = delivered.Pipeline.from_file("again.yaml")
again.start(spark).awaitTermination()
again.audit(spark)""",
    ],
}
"""Section -> cells in place of its commands."""

AFTER: dict[str, list[tuple[str, str]]] = {
    "1. A pipeline that runs as it is": [
        ("markdown", "As an object, it shows itself. Here it waits for more orders instead of ending with the log:"),
        (
            "code",
            """\
import delivered

FILE, HERE = "orders.yaml", {"master": "local[2]", "trigger": "1 second"}
pipeline = delivered.Pipeline.from_file(FILE, HERE)
pipeline""",
        ),
    ],
    "2. Ask what a crash would cost": [
        ("markdown", "A guarantee that cannot be kept is refused, with the reason. A socket cannot be read again:"),
        (
            "code",
            """\
delivered.Pipeline(
    name="lines",
    guarantee="exactly_once",
    checkpoint="lines",
    source=delivered.endpoint("spark:socket", host="localhost", port=9999),
    sinks=[delivered.sqlite("lines.db", "lines")],
).plan()""",
        ),
    ],
    "5. See what a weaker guarantee does": [
        (
            "markdown",
            """\
## 6. Change the code of a running query

The first query still runs, and waits for orders. Change the SQL and run the cell again, as one does: the former query
is stopped between two batches, and the cell says what its checkpoint makes of the change. There are never two
drivers.""",
        ),
        (
            "code",
            '''\
SQL = """
    SELECT upper(CAST(key AS STRING)) AS customer,
           get_json_object(CAST(value AS STRING), '$.id') AS id,
           CAST(get_json_object(CAST(value AS STRING), '$.amount') AS DOUBLE) AS amount
    FROM source"""
pipeline = delivered.Pipeline.from_file(FILE, HERE | {"transform.sql": SQL})
query = pipeline.start(spark)''',
        ),
        (
            "code",
            """\
import pyarrow as pa

from delivered.connectors.log import append

append("orders-log", pa.table({"key": [b"customer-1"], "value": [b'{"id": "order-1000", "amount": 12.5}']}))
query.processAllAvailable()
pipeline.stop(query)""",
        ),
        (
            "code",
            """\
import sqlite3

orders = sqlite3.connect("orders.db")
print(*orders.execute("SELECT count(*), count(DISTINCT id) FROM orders"))
print(*orders.execute("SELECT * FROM orders WHERE id = 'order-1000'"))""",
        ),
        (
            "markdown",
            "1,001 orders, each once, the last one with the new SQL. What else may change on a checkpoint: "
            "[checkpoint.md](checkpoint.md).",
        ),
    ],
}
"""Section -> what follows it in the notebook alone."""


def cells(page: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell.

    Raises:
        ValueError: a section has commands, and the notebook no cells for it, or the reverse.
    """
    start, *sections = re.split(r"^## ", _HERE.sub("", page), flags=re.MULTILINE)
    made = [("markdown", f"{start.strip()}\n\n{INSTALL}")]
    found = []
    for section in sections:
        name = section.partition("\n")[0]
        texts = _SHELL.split(f"## {section}")
        if len(texts) > 1:
            found.append(name)
        before, *after = [("markdown", t.strip()) for t in texts]
        code = [("code", c) for c in INSTEAD.get(name, [])]
        made += [before, *code, *(a for a in after if a[1]), *AFTER.get(name, [])]
        if len(texts) > 2:
            raise ValueError(f"section {name!r} has {len(texts) - 1} blocks of commands; the notebook replaces one")
    if found != list(INSTEAD) or not set(AFTER) <= set(INSTEAD):
        raise ValueError(f"{PAGE.name} has commands in {found}, and the notebook cells for {list(INSTEAD)}")
    return made


def notebook(page: str) -> str:
    """The notebook as JSON, without outputs."""
    made: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(cells(page)):
        own = {"execution_count": None, "outputs": []} if kind == "code" else {}
        lines = source.splitlines(keepends=True)
        made.append({"cell_type": kind, "id": f"c{number:02d}", "metadata": {}, "source": lines, **own})
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    whole = {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
