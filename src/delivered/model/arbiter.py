"""Where executors ask the driver whether they may send (`engine/grants.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PORT = "spark.delivered.arbiter.port"
YES, NO = b"yes\n", b"no\n"
"""Answers of the arbiter."""


@dataclass(frozen=True)
class Arbiter:
    """
    Attributes:
        host, port: as executors reach it.
        token: of one plan; void once another plan of the pipeline and sink is made.
    """

    host: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class DriverAddress:
    """Where executors reach the driver, from Spark's settings.

    Attributes:
        host: spark.driver.host; empty: unknown.
        bind: spark.driver.bindAddress; empty: the host.
        port: of the arbiter; 0: any.
    """

    host: str = ""
    bind: str = ""
    port: int = 0

    @classmethod
    def of(cls, setting: Callable[[str, str], str | None]) -> DriverAddress:
        """
        Args:
            setting: a session's setting of this name, or the default.
        """
        host = setting("spark.driver.host", "") or ""
        port = setting(PORT, "0") or "0"
        return cls(host, setting("spark.driver.bindAddress", "") or "", int(port) if port.isdigit() else 0)
