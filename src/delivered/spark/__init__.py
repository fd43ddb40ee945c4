"""The only package that imports pyspark; wires the others together."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from delivered.model.errors import Refused

SPARK_VERSION_MIN = "3.5"


def parsed(version: str) -> tuple[int, int]:
    """(4, 2) of "4.2.1", and of what vendors make of it: "4.2.1-amzn-0"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _check_version() -> None:
    """Before anything of it is imported: an earlier Spark lacks modules, which would show as a missing library.

    Raises:
        Refused: the pyspark of this Python is too old.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:  # the import says what is missing
        return
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"""["'](\d+\.[^"']+)""", file.read_text(encoding="utf-8")) if file.is_file() else None
    if match is not None and parsed(match[1]) < parsed(SPARK_VERSION_MIN):
        raise Refused("SPARK_VERSION.TOO_OLD", version=match[1], version_min=SPARK_VERSION_MIN)


_check_version()
