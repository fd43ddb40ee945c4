"""Ratios against peers, each in one run on one machine: `make bench`, `bench-postgres`, ... into build/."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

from delivered_lab.verify.provenance import commit

_LOAD = round(os.getloadavg()[0], 2)


def origin() -> dict[str, Any]:
    """Where the figures of a report come from: commit, date (UTC), command, and the machine's load before it."""
    main = sys.modules["__main__"].__spec__
    name = main.name.removesuffix(".__main__") if main else sys.argv[0]
    command = shlex.join(["python", "-m", name, *sys.argv[1:]])
    return {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "command": command, "load": _LOAD}
