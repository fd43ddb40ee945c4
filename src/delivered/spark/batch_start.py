"""Where batch 0 begins, handed from the process that plans the source to the one that plans the sink.

Spark logs where a batch ends. Where batch 0 begins only the source knows, and it does not know the checkpoint; the sink
does. Both processes run on the driver's machine and carry the same driver id, so a small file between them is enough:
the sink then keeps the start beside the checkpoint (first_offsets.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from delivered.contract import Offsets


def hand_over(driver_id: str, start: Offsets, end: Offsets) -> Path | None:
    """Say where the batch that ends at `end` begins. Returns the file, to be withdrawn when the source stops.

    May be called again. Two queries of one driver whose batch 0 ends at one place and begins at two cannot be told
    apart: then nothing is said. None: there is no place for the file, which costs the audit the start and nothing else.
    """
    path = _path(driver_id, end)
    text = json.dumps({"start": start}, sort_keys=True)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists() and path.read_text() != text:
            text = json.dumps({"start": None})
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(text)
        own.replace(path)
    except OSError:
        return None
    return path


def handed_over(driver_id: str, logged: str) -> Offsets | None:
    """Where the batch begins whose end Spark logged as `logged`; None: nobody said. It is told once.

    Args:
        logged: the sources' offsets, a line each; of several sources nothing is said.
    """
    try:
        path = _path(driver_id, json.loads(logged))
        found: Offsets | None = json.loads(path.read_text())["start"]
    except (OSError, ValueError):
        return None
    withdraw(path)
    return found


def withdraw(path: Path) -> None:
    """Take back what was handed over, if it is still there."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()  # only an empty one goes


def _path(driver_id: str, end: Offsets) -> Path:
    # The id is random, so nobody else can have made this folder.
    name = hashlib.blake2b(json.dumps(end, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(tempfile.gettempdir()) / f"delivered-start-{driver_id}" / name
