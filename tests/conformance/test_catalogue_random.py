"""Random types and values, on the paths of the catalogue; the catalogue where a database's defaults are unusual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from docs import value_types as types
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.catalogue import tables
from tests.support.catalogue.paths import TABLES
from tests.support.catalogue.run import OUTCOMES, Cells, cells
from tests.support.catalogue.values import KINDS, Kind, unchecked
from tests.support.servers import Postgres
from tests.support.sweeps import sweep

if TYPE_CHECKING:
    from tests.support.servers import Mysql

_INT32, _INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=40)
LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): _INT32,
    pa.int64(): _INT64,
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.decimal128(38, 10): st.decimals(-(10**27), 10**27, places=10),
    pa.string(): _TEXT,
    pa.binary(): st.binary(max_size=40),
    pa.date32(): _INT32,
    pa.timestamp("us", "UTC"): _INT64,
    pa.timestamp("us"): _INT64,
    pa.duration("us"): _INT64,
}
"""Times as numbers: Python has fewer."""


def _raw(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_list(kind):
        return pa.list_(_raw(kind.value_type))
    if t.is_map(kind):
        return pa.map_(pa.string(), _raw(kind.item_type))
    if t.is_struct(kind):
        return pa.struct([(f.name, _raw(f.type)) for f in kind])
    return pa.int32() if t.is_date32(kind) else pa.int64() if t.is_timestamp(kind) or t.is_duration(kind) else kind


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    t = pa.types
    if t.is_list(kind):
        return st.lists(st.none() | _values(kind.value_type), max_size=3)
    if t.is_map(kind):
        return st.dictionaries(_TEXT, st.none() | _values(kind.item_type), max_size=3).map(lambda d: list(d.items()))
    if t.is_struct(kind):
        return st.fixed_dictionaries({f.name: st.none() | _values(f.type) for f in kind})
    return LEAVES[kind]


_TYPES = st.recursive(
    st.sampled_from(list(LEAVES)),
    lambda of: of.map(pa.list_) | of.map(lambda k: pa.map_(pa.string(), k)) | of.map(lambda k: pa.struct([("a", k)])),
    max_leaves=4,
)


@st.composite
def kinds(draw: st.DrawFn) -> list[Kind]:
    found = []
    for n in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(list(LEAVES)) | _TYPES)
        given = draw(st.lists(st.none() | _values(kind), min_size=1, max_size=6))
        arrays = [pa.array([v], _raw(kind)).cast(kind) for v in given]
        if kind == pa.string():
            arrays += [unchecked(b) for b in draw(st.lists(st.binary(max_size=9), max_size=3))]
        found.append(Kind(str(n), str(kind), kind, {str(i): a for i, a in enumerate(arrays)}, f"v{n}"))
    return found


QUICK = ("sqlite append", "files json", "delta append")
EXAMPLES = 5
"""In `make test`; each is a batch of up to 70 values."""


@pytest.mark.parametrize(
    ("path", "examples"), sweep([*((p, EXAMPLES) for p in TABLES), *((p, 100) for p in TABLES)],
                                lambda path, examples: path in QUICK and examples == EXAMPLES)
)  # fmt: skip
def test_any_value_is_exact_or_refused(request: pytest.FixtureRequest, path: str, examples: int) -> None:
    made = TABLES[path](request)

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=examples == EXAMPLES,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a batch names its faults already
    )  # fmt: skip
    @given(kinds())
    def check(drawn: list[Kind]) -> None:
        found = cells(made, drawn)
        assert not faults(found), [k.spark for k in drawn if k.name in faults(found)]

    check()


def faults(found: Cells) -> dict[str, list[str]]:
    bad = {kind: [o for o in of.values() if o not in OUTCOMES] for kind, of in found.items()}
    return {kind: some for kind, some in bad.items() if some}


class HostilePostgres(Postgres):
    """A database of the shared server whose sessions begin with unusual settings."""

    SETTINGS = (
        "bytea_output = 'escape'", "extra_float_digits = 0", "DateStyle = 'German, DMY'",
        "IntervalStyle = 'sql_standard'", "TimeZone = 'Asia/Kathmandu'", "standard_conforming_strings = off",
        "client_encoding = 'LATIN1'", "default_transaction_isolation = 'serializable'",
        "xmloption = 'document'", "array_nulls = off", "transform_null_equals = on", "backslash_quote = on",
    )  # fmt: skip

    @property
    def url(self) -> str:
        return self.broker.url.rpartition("/")[0] + "/hostile"


@pytest.fixture
def hostile_postgres(postgres: Postgres) -> HostilePostgres:
    if not postgres.execute("SELECT 1 FROM pg_database WHERE datname = 'hostile'"):
        postgres.execute("CREATE DATABASE hostile")
        for setting in HostilePostgres.SETTINGS:
            postgres.execute(f"ALTER DATABASE hostile SET {setting}")
    return HostilePostgres(postgres.broker)


@pytest.fixture
def hostile_mysql(mysql: Mysql) -> Iterator[Mysql]:
    """New sessions of the shared server begin with unusual settings."""
    hostile = {
        "sql_mode": "'ANSI,NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH'", "time_zone": "'+05:45'",
        "character_set_client": "'latin1'", "character_set_connection": "'latin1'", "character_set_results": "'latin1'",
        "collation_connection": "'latin1_german2_ci'", "explicit_defaults_for_timestamp": "0",
        "div_precision_increment": "0",
        "lc_time_names": "'de_DE'", "auto_increment_increment": "2",
    }  # fmt: skip
    names = list(hostile)
    [before] = mysql.execute("SELECT " + ", ".join(f"@@GLOBAL.{n}" for n in names))
    for name, value in hostile.items():
        mysql.execute(f"SET GLOBAL {name} = {value}")
    yield mysql
    for name, value in zip(names, before, strict=True):
        mysql.execute(f"SET GLOBAL {name} = %s", value)


def same_cells(found: Cells, path: str) -> None:
    assert not faults(found)
    assert types.packed(found) == types.stored()["values"][path]


@pytest.mark.parametrize(
    "mechanism", sweep(["one_transaction", "two_phase"], lambda mechanism: mechanism == "one_transaction")
)
def test_the_settings_of_a_postgres_database_change_nothing(
    request: pytest.FixtureRequest, hostile_postgres: HostilePostgres, mechanism: str
) -> None:
    assert hostile_postgres.execute("SHOW DateStyle") == [("German, DMY",)]
    path = tables.postgres(request, "hostile_postgres", mechanism=mechanism)
    same_cells(cells(path, KINDS), f"postgres {mechanism} append")


@pytest.mark.parametrize(
    "mechanism", sweep(["one_transaction", "two_phase"], lambda mechanism: mechanism == "two_phase")
)
def test_the_settings_of_a_mysql_server_change_nothing(
    request: pytest.FixtureRequest, hostile_mysql: Mysql, mechanism: str
) -> None:
    path = tables.mysql(request, "hostile_mysql", mechanism=mechanism)
    same_cells(cells(path, KINDS), f"mysql {mechanism} append")
