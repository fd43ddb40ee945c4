"""Starts embedded_pipeline.py in a process of its own, to be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("embedded_pipeline.py")


def start_child(spec: dict[str, Any], folder: Path, crash: str = "") -> subprocess.Popen[str]:
    """Args: crash: crash points as DELIVERED_CRASH takes them; those that were hit are noted in `<folder>/crashes`."""
    crashes = folder / "crashes"
    crashes.mkdir(exist_ok=True)
    environment = {**os.environ, "DELIVERED_CRASH": crash, "DELIVERED_CRASH_DIR": str(crashes)}
    command = [sys.executable, str(CHILD), json.dumps(spec)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
