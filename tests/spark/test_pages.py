"""Every page's blocks, from the first to the last, as a reader runs them. What does not run: tests/support/pages.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.pages import PAGES
from tests.support.pages import BLOCKS, Page, Reader, why_not

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize("page", PAGES.parameters())
def test_a_page(
    page: Page, spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, request.getfixturevalue, monkeypatch, {"spark": spark})
    before = spark.conf.get("spark.sql.shuffle.partitions")
    there = {t.name for t in spark.catalog.listTables()}
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    try:
        page.run(reader, without=why_not)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
        for table in spark.catalog.listTables():  # other tests share the session
            if table.name not in there:
                spark.sql(f"DROP {'VIEW' if table.isTemporary else 'TABLE'} `{table.name}`")


def test_every_block_runs_or_says_why_not() -> None:
    """YAML that is a part of a pipeline is planned (unit/test_code_on_pages.py)."""
    run = {p.path for p in PAGES} | {"docs/outbox.md", "docs/events.md", "docs/errors.md", "docs/evidence.md"}
    assert [
        str(b) for b in BLOCKS if b.language in ("python", "sh", "sql") and b.page not in run and not why_not(b)
    ] == []
