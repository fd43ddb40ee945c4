"""Who the driver is: an id, and the process of its JVM, by which a live driver is told from a dead one."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Driver:
    """Travels with the registered classes into the processes of a driver.

    Attributes:
        id: new for each call of `register`.
        process, started_ms: of the JVM; 0: this was made at a distance (Spark Connect), each process looks for itself.
    """

    id: str
    process: int = 0
    started_ms: int = 0

    @classmethod
    def of(cls, spark: SparkSession) -> Driver:
        jvm = jvm_of(spark)
        return cls(uuid.uuid4().hex) if jvm is None else cls(uuid.uuid4().hex, jvm.pid, _started_ms(jvm))

    def located(self) -> Driver:
        """With the process of the JVM, for certain."""
        if self.process:
            return self
        above = _above()
        return Driver(self.id, above.pid, _started_ms(above))


def jvm_of(spark: Any) -> psutil.Process | None:
    """The JVM of a session that runs on this machine; None for one of Spark Connect."""
    if not hasattr(spark, "_jvm"):
        return None
    # As text: the class of the handle itself is none that reflection may look into.
    return psutil.Process(int(spark._jvm.java.lang.ProcessHandle.current().toString()))


@cache
def _above() -> psutil.Process:
    """The JVM above this worker; this process itself if there is none. Looked up once: when Python's daemon dies, its
    workers live on, and nothing is above them any more."""
    own = psutil.Process(os.getpid())
    return next((p for p in own.parents() if p.name().startswith("java")), own)


def _started_ms(process: psutil.Process) -> int:
    return int(process.create_time() * 1000)
