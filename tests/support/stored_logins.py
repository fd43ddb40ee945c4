"""docs/logins.json: what tests of logins saw. DELIVERED_STORE_LOGINS=1 stores what this run sees."""

from __future__ import annotations

import json
import os
from typing import Any

from docs import logins


def compare(part: str, name: str, row: dict[str, Any]) -> None:
    """Compare what a test saw with the stored row, of which the table in docs is made."""
    known = logins.stored()
    if os.environ.get("DELIVERED_STORE_LOGINS"):
        known.setdefault(part, {})[name] = row
        logins.STORE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert known.get(part, {}).get(name) == row, "run this test with DELIVERED_STORE_LOGINS=1, then make docs"
