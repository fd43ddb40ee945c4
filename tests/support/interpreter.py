"""What a fresh interpreter has loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import delivered

SOURCE = Path(delivered.__file__).parent


def fresh(code: str, *inputs: bytes) -> set[str]:
    """Names of ours and of heavy libraries that a fresh interpreter holds after `code`."""
    tail = "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    own = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}  # it would load modules, too
    ran = subprocess.run(
        [sys.executable, "-c", code + tail, *(i.hex() for i in inputs)],
        capture_output=True,
        text=True,
        check=True,
        env={**own, "PYTHONPATH": str(SOURCE.parent)},
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))
