"""The repository's checking tools detect what they should."""

from __future__ import annotations

import grimp
import pytest
from tools import rooms, size

PAGE = """
## Rooms

| room | role | may import of ours |
|---|---|---|
| `model/` | nouns | none |
| `contract.py`, `contract_*.py` | powers | model |
| `kits/sql/` | databases | model, contract |
| `kits/table/` | tables | model, kits/sql |
| `connectors/<system>/` | one each | model, kits |
| `spark/` | the edge | all above |

## Invariants

| `other/` | no room | none |
"""
MODULES = ["model", "contract", "contract_rows", "kits", "kits.sql", "kits.table.a", "connectors.x.b", "spark"]


def test_the_table_says_who_may_import_whom() -> None:
    table = rooms.read_table(PAGE)
    assert table.imports == {
        "model": {"model"},
        "contract": {"contract", "model"},
        "kits/sql": {"kits/sql", "model", "contract"},
        "kits/table": {"kits/table", "model", "kits/sql"},
        "connectors": {"connectors", "model", "kits/sql", "kits/table"},
        "spark": {"spark", "model", "contract", "kits/sql", "kits/table", "connectors"},
    }
    found = [table.room(f"d.{module}") for module in MODULES]
    assert found == ["model", "contract", "contract", None, "kits/sql", "kits/table", "connectors", "spark"]
    assert list(table.problems(f"d.{module}" for module in MODULES)) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("| `kits/sql/` | databases | model, contract |\n", "", "kits/table may import kits/sql: no row"),
        ("model, kits |", "model, kit |", "connectors may import kit: no row"),
        ("`spark/`", "`flink/`", "spark: no row names it"),
        ("`spark/`", "`spark/`, `flink/`", "flink: there is no such room"),
    ],
    ids=["a room without a row", "an import of no row", "a module without a row", "a row without a module"],
)
def test_a_table_that_is_not_the_trees_is_found_out(old: str, new: str, problem: str) -> None:
    assert old in PAGE
    try:
        found = list(rooms.read_table(PAGE.replace(old, new)).problems(f"d.{module}" for module in MODULES))
    except rooms.BadTable as error:
        found = [str(error)]
    assert any(line.startswith(problem) for line in found), found


def test_an_import_that_no_row_names_is_found() -> None:
    graph = grimp.ImportGraph()
    imports = [("d.spark.hooks", "d.kits.sql.a"), ("d.kits.sql.a", "d.kits.table.b"), ("d.model.x", "d"), ("d", "d.y")]
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    assert list(rooms.strays(graph, ["d"], rooms.read_table(PAGE))) == [imports[1]]


def test_a_sink_implements_what_its_bases_declare() -> None:
    found = size.sink_methods()
    assert {"writer", "capability"} <= set(found["Sink"])
    assert len(found) > 1, "what a sink returns counts too"


def test_files_of_a_commit_are_counted() -> None:
    found = size.port_of("activemq")
    assert {"docs/connectors/activemq.md", "src/delivered/connectors/activemq/__init__.py"} <= {*found["own"]}
    assert "pyproject.toml" in found["others"]
    assert size.port_of("no-such-" + "system") == {"own": [], "others": []}


def test_what_should_only_shrink_has_not_grown() -> None:
    bounds, found = size.bounds(size.PAGE.read_text(encoding="utf-8")), size.measures()
    assert bounds.keys() == {*found, *size.HAPPY_PATH}
    grown = {name: (count, bounds[name]) for name, count in found.items() if count > bounds[name]}
    assert not grown, "each (count, bound of ARCHITECTURE.md)"


def test_bounds_are_lowered_and_never_raised() -> None:
    page = "\n## Size\n\n| measure | bound | goal |\n|---|---:|---:|\n| files | 1,500 | 330 |\n| lines | 9 | 5 |\n"
    assert size.bounds(page) == {"files": 1500, "lines": 9}
    assert size.bounds(size.tightened(page, {"files": 1200, "lines": 10})) == {"files": 1200, "lines": 9}
    assert size.tightened(page, {"files": 1200, "lines": 10}).endswith("| files | 1,200 | 330 |\n| lines | 9 | 5 |\n")


def test_no_modules_import_each_other() -> None:
    assert size.import_cycles() == []


def test_private_words_are_counted_apart_from_keys_of_records_and_codes() -> None:
    kept = 'read("begun"); raise Refused("BATCH_BEGUN", table="left_out"); "DELIVERED_RECEIVER_GONE" in codes'
    assert size.private_words(kept) == 0
    assert size.private_words(f"{kept}; begun = batch  # the file is gone, as BATCHES_BEGUN says") == 3
