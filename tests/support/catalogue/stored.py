"""The outcomes in docs/types.json: compared, or with CATALOGUE=store written."""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa
from docs import value_types as types
from tests.support.catalogue.paths import PATHS, TABLES
from tests.support.catalogue.run import OUTCOMES, Cells
from tests.support.catalogue.values import KINDS, NAMES

NOT_STORED: dict[str, set[str]] = {"values": set(), "names": set(), "sources": set()}
"""Their outcomes are checked to be one of the three, and not yet kept."""


def compare(section: str, path: str, found: Cells) -> None:
    allowed = (*OUTCOMES, types.NO_VALUE) if section == "sources" else OUTCOMES
    faults = [f"{k}, {label}: {o}" for k, of in found.items() for label, o in of.items() if o not in allowed]
    assert not faults, "\n".join(faults)
    if os.environ.get("CATALOGUE") == "store":
        _store(section, path, found)
    if path not in NOT_STORED[section]:
        assert types.packed(found) == types.stored()[section][path]


def _store(section: str, path: str, found: Cells) -> None:
    data: dict[str, Any] = types.stored()
    data["types"] = {
        k.name: {"spark": k.spark, "arrow": pa.schema([("v", k.arrow)]).serialize().to_pybytes().hex()} for k in KINDS
    }
    data["labels"] = {k.name: list(k.values) for k in KINDS}
    data["spelled"] = NAMES
    data.setdefault("sources", {})
    data.setdefault("source labels", {})
    data[section][path] = types.packed(found)
    if section == "sources":
        data["source labels"][path] = {kind: len(of) for kind, of in found.items()}
    for name, order in {"values": PATHS, "names": TABLES}.items():
        rest = [p for p in data[name] if p not in order]
        data[name] = {p: data[name][p] for p in (*order, *rest) if p in data[name]}
    types.FILE.write_text(json.dumps(data, indent=1, sort_keys=False) + "\n", encoding="utf-8")
