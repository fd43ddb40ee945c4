"""Modules loaded by a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import delivered

SOURCE = Path(delivered.__file__).parent
ROOT = Path(__file__).parents[2]


def fresh(code: str, *inputs: bytes) -> set[str]:
    """Modules of this package and of heavy libraries in a fresh interpreter after `code`."""
    tail = "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    own = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}  # it would load modules, too
    ran = subprocess.run(
        [sys.executable, "-c", code + tail, *(i.hex() for i in inputs)],
        capture_output=True,
        text=True,
        check=True,
        env={**own, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE.parent, ROOT)))},
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))
