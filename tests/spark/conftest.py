"""One Spark session for all tests of this folder that run Spark in their own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from delivered.spark.session import session

    made = session("tests", master="local[2]")
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()
