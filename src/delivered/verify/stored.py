"""Results on disk: their format, and what is read of earlier ones.

format 0   until 0.1: a bare list of results, or a run, without a version
format 1   {"format": 1, "results": ...}; a run has "format" among its keys
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from delivered.model.errors import UsageError

FORMAT = 1


def read(path: Path) -> dict[str, Any]:
    """What a file holds, as of the newest format.

    Raises:
        UsageError: a newer version of this program wrote it.
        ValueError: it is no JSON.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not (isinstance(data, dict) and "results" in data):
        data = {"results": data}
    version = data.setdefault("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise UsageError(
            "VERIFY_FORMAT_NEWER",
            f"{path} holds results of format {version!r}; this version of delivered reads formats up to {FORMAT}.",
            next_step="run `pip install --upgrade delivered`, or name another file with --out",
        )
    return {**data, "format": FORMAT}


def write(path: Path, text: str) -> None:
    """Put a text into a file, which is whole at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
