"""Set-up of a Spark worker."""

from __future__ import annotations

import subprocess
import sys

_IMPORTED = """
import gc
from delivered.spark.task import arm

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
    assert imported > seen + 5_000
    assert left < seen + 500
