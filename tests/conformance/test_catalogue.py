"""Every value through every path: exact, refused as bad row, or refused at start. The outcomes are in docs/types.json.

CATALOGUE=store writes what happened there; `make docs` then makes docs/types.md of it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa
import pytest
from docs import value_types as types
from tests.support.catalogue.paths import MESSAGES, PATHS, TABLES
from tests.support.catalogue.run import OUTCOMES, Cells, cells, name_cells
from tests.support.catalogue.values import COLUMNS, KINDS, NAMES
from tests.support.sweeps import sweep

QUICK = (
    "sqlite append", "postgres one_transaction append", "postgres two_phase upsert", "mysql one_transaction append",
    "mysql two_phase upsert", "delta append", "iceberg append", "files parquet", "files json", "files csv",
    "kafka value", "kafka name", "rabbitmq key",
)  # fmt: skip
"""One path to each encoder. The others share it with one of these."""
QUICK_NAMES = ("sqlite append",)


NOT_STORED = {
    "values": {
        "kafka avro",
        "kafka protobuf",
        "kafka json_schema",
        "rocketmq value",
        "rocketmq key",
        "rocketmq message_id",
    },
    "names": {name for name in TABLES if name.startswith(("postgres", "mysql"))},
}
"""Their outcomes are checked to be one of the three, and not yet kept."""


def compare(section: str, path: str, found: Cells) -> None:
    faults = [f"{k}, {label}: {o}" for k, of in found.items() for label, o in of.items() if o not in OUTCOMES]
    assert not faults, "\n".join(faults)
    if os.environ.get("CATALOGUE") == "store":
        store(section, path, found)
    if path not in NOT_STORED[section]:
        assert types.packed(found) == types.stored()[section][path]


def store(section: str, path: str, found: Cells) -> None:
    data: dict[str, Any] = types.stored() if types.FILE.exists() else {"values": {}, "names": {}}
    data["types"] = {
        k.name: {"spark": k.spark, "arrow": pa.schema([("v", k.arrow)]).serialize().to_pybytes().hex()} for k in KINDS
    }
    data["labels"] = {k.name: list(k.values) for k in KINDS}
    data["spelled"] = NAMES
    data[section][path] = types.packed(found)
    places = {"values": PATHS, "names": TABLES}
    for name, order in places.items():
        data[name] = {p: data[name][p] for p in order if p in data[name]}
    types.FILE.write_text(json.dumps(data, indent=1, sort_keys=False) + "\n", encoding="utf-8")


@pytest.mark.parametrize("path", sweep(PATHS, lambda name: name in QUICK))
def test_each_value_is_exact_or_refused(request: pytest.FixtureRequest, path: str) -> None:
    compare("values", path, cells(PATHS[path](request), KINDS))


@pytest.mark.parametrize("path", sweep(TABLES, lambda name: name in QUICK_NAMES))
def test_each_name_is_taken_or_refused(request: pytest.FixtureRequest, path: str) -> None:
    compare("names", path, name_cells(TABLES[path](request), COLUMNS, NAMES))


def test_the_catalogue_is_complete() -> None:
    stored = types.stored()
    assert set(stored["values"]) | NOT_STORED["values"] == set(PATHS) == {*TABLES, *MESSAGES}
    assert set(stored["names"]) | NOT_STORED["names"] == set(TABLES)
    for kinds in stored["values"].values():
        assert list(kinds) == [k.name for k in KINDS]
