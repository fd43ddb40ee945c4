"""Several sources: declaration, and a batch's offsets by source."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.requests import ASKED

import delivered
from delivered.audit.request import SourceSet, parsed, plain, slices_of
from delivered.checkpoint import sidecar
from delivered.checkpoint.sidecar import OffsetMetadata
from delivered.connectors.log import append
from delivered.engine.recover import judge
from delivered.model.capability import Guarantee, SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, LedgerAhead, LedgerBehind, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, by_source
from delivered.model.options import in_file_words, starting_at
from delivered.model.work import Account, CheckpointView, Decision, LedgerState, Tolerance
from delivered.planner import Plan, Refusal, SourceFacts, make_plan

KAFKA = delivered.kafka("localhost:9092", subscribe="orders", startingOffsets="earliest")
UNION = "SELECT value FROM orders UNION ALL SELECT value FROM payments"
TWO = {"orders": KAFKA, "payments": KAFKA}


def pipeline(folder: Path, **changes: Any) -> delivered.Pipeline:
    given = {"sources": TWO, "transform": UNION, "sinks": [delivered.sqlite(str(folder / "o.db"), "o")], **changes}
    return delivered.Pipeline(name="p", guarantee="exactly_once", checkpoint=folder / "c", **given)


def joined(orders: Any, payments: Any) -> Any:
    return orders.join(payments, "key")


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"source": KAFKA}, "SOURCES", "both source and sources"),
        ({"sources": None}, "SOURCES", "neither source nor sources"),
        ({"sources": {}}, "SOURCES", "sources is {} (dict)"),
        ({"sources": [KAFKA]}, "SOURCES", "must map names to endpoints"),
        (
            {"sources": {"orders": KAFKA, "Orders": KAFKA}},
            "SOURCE_NAME",
            "'orders' and 'Orders' have the same name in SQL",
        ),
        ({"sources": {"orders": KAFKA, "1st": KAFKA}}, "SOURCE_NAME", "name is '1st'"),
        ({"sources": {"the orders": KAFKA}}, "SOURCE_NAME", "name is 'the orders'"),
        ({"sources": {"orders": KAFKA, "payments": "kafka"}}, "ENDPOINT_VALUE", "source 'payments' is 'kafka'"),
        ({"transform": None}, "TRANSFORM_SOURCES", "the sources orders, payments, but no transform"),
        ({"transform": "SELECT value FROM orders"}, "TRANSFORM_SOURCES", "does not read the source 'payments'"),
        ({"transform": lambda orders: orders}, "TRANSFORM_SOURCES", "unexpected keyword argument 'payments'"),
        ({"transform": lambda orders, payments, refunds: orders}, "TRANSFORM_SOURCES", "'refunds'"),
        ({"dedup": delivered.dedup("key", within="1 hour")}, "DEDUP_SOURCES", "orders, payments"),
    ],
)
def test_what_cannot_be_a_set_of_sources(tmp_path: Path, changes: Any, code: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        pipeline(tmp_path, **changes)
    assert caught.value.code == f"DELIVERED_{code}"
    assert text in str(caught.value)


def test_names_count_as_a_part_of_the_transform(tmp_path: Path) -> None:
    both = pipeline(tmp_path, transform=joined).transform_version
    assert both != pipeline(tmp_path, transform=lambda **frames: frames, sources=TWO).transform_version
    one = pipeline(tmp_path, sources=None, source=KAFKA, transform=None)
    assert list(one.sources) == ["source"]
    assert one.transform_version == pipeline(tmp_path, sources={"source": KAFKA}, transform=None).transform_version
    assert one.transform_version != pipeline(tmp_path, sources={"orders": KAFKA}, transform=None).transform_version


def test_the_plan_tells_each_source(tmp_path: Path) -> None:
    plan = pipeline(tmp_path, sources={**TWO, "payments": delivered.log(str(tmp_path / "p"))}).plan(offline=True)
    text = str(plan)
    assert "orders: kafka orders, replayable by offset" in text
    assert "payments: log p, replayable by offset" in text
    assert "a record that a producer sent twice to orders is delivered twice" in text
    assert "the source log p uses files on this machine" in text


TEXT = """
pipeline: p
guarantee: exactly_once
checkpoint: c
{sources}
transform: {{sql: "SELECT value FROM orders UNION ALL SELECT value FROM payments"}}
sinks:
  - {{format: sqlite, path: o.db, table: o}}
"""
SOURCES = """
sources:
  orders: {format: kafka, kafka.bootstrap.servers: "h:1", subscribe: orders}
  payments: {format: log, path: payments}
"""


def read(folder: Path, sources: str, **overrides: Any) -> delivered.Pipeline:
    (folder / "p.yaml").write_text(TEXT.format(sources=sources))
    return delivered.Pipeline.from_file(folder / "p.yaml", {k.replace("__", "."): v for k, v in overrides.items()})


def test_a_file_names_sources(tmp_path: Path) -> None:
    made = read(tmp_path, SOURCES, sources__orders__subscribe="other")
    assert made.sources["orders"].options["subscribe"] == "other"
    assert made.sources["payments"].options["path"] == str(tmp_path / "payments")


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        ("source: {format: log, path: a}\n" + SOURCES, "a pipeline has one of: source, sources"),
        ("", "a pipeline has one of: source, sources"),
        ("sources: {}", "sources is {}"),
        (SOURCES + "  orders: {format: log, path: a}", "line 9: the key 'sources.orders' is here and in line 7"),
        (SOURCES.replace("format: log", "formt: log"), "'sources.payments.format' is missing"),
    ],
)
def test_a_file_whose_sources_are_wrong(tmp_path: Path, sources: str, text: str) -> None:
    with pytest.raises(UsageError, match=r".") as caught:
        read(tmp_path, sources)
    assert text in str(caught.value)


def test_an_override_of_no_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sources have names"):
        read(tmp_path, SOURCES, sources__refunds__subscribe="other")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"t":{"0":1}}', {"source": '{"t":{"0":1}}'}),
        ("12", {"source": "12"}),
        ('{"t":{"0":1}}\n-\n{"a":{"0":1}}', {"0": '{"t":{"0":1}}', "2": '{"a":{"0":1}}'}),
        ('orders:{"t":{"0":1}}\npayments:{"version":3}', {"orders": '{"t":{"0":1}}', "payments": '{"version":3}'}),
        ("orders:-\npayments:12", {"payments": "12"}),
        ('0:{"t":{"0":1}}', {"source": '{"t":{"0":1}}'}),
        ('1:{"a":1}\n0:{"b":2}', {"1": '{"a":1}', "0": '{"b":2}'}),
        ("", {}),
    ],
)
def test_offsets_by_source_in_both_formats_of_sparks_log(text: str, found: dict[str, str]) -> None:
    assert by_source(text) == found


def test_a_hint_starts_each_source_where_it_ended() -> None:
    orders, payments = in_file_words(starting_at('orders:{"t": {"0": 1}}\npayments:{"version": 3}')).split(" and ")
    assert orders == """startingOffsets: '{"t":{"0":1}}' for source orders"""
    assert payments == """startingOffsets: '{"version":3}' for source payments"""


def asked(*names: str, logged: str, **checkpoint: Any) -> Plan | Refusal:
    sources = tuple(SourceFacts(f"log {n}", SourceCapability("log", replayable=True), name=n) for n in names)
    facts = replace(ASKED.checkpoint, incarnation="i", newest=4, offsets_text=logged, **checkpoint)
    return make_plan(replace(ASKED, sources=sources, checkpoint=facts))


LOGGED = 'orders:{"version":1}\npayments:{"version":2}'


@pytest.mark.parametrize(
    ("names", "logged", "checkpoint", "code", "text"),
    [
        (("",), LOGGED, {}, "SOURCES_UNNAMED", "reads source, but the checkpoint"),
        (("orders",), '{"version":1}', {}, "SOURCES_UNNAMED", "was made with source: Spark"),
        (("orders",), LOGGED, {"unfinished": True}, "SOURCES_UNFINISHED", "Batch 4 was logged for the sources orders"),
        (
            ("orders", "payments", "refunds"),
            LOGGED,
            {"removed": {"refunds": '{"version":3}'}},
            "SOURCE_RETURNED",
            'where it stood at {"version":3}',
        ),
    ],
)
def test_sources_that_a_checkpoint_cannot_go_on_with(
    names: tuple[str, ...], logged: str, checkpoint: Any, code: str, text: str
) -> None:
    refused = asked(*names, logged=logged, **checkpoint)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.nearest) == (code, None)
    assert text in refused.reason


def test_the_plan_tells_which_sources_are_new_and_which_are_gone() -> None:
    plan = asked("orders", "refunds", logged=LOGGED, removed={"returns": "7"})
    assert isinstance(plan, Plan)
    new, gone = plan.warnings
    assert new.startswith("the source refunds is new to this checkpoint")
    assert gone.startswith('the source payments is removed: it ended at {"version":2}')
    unchanged = asked("payments", "orders", logged=LOGGED, unfinished=True)
    assert isinstance(unchanged, Plan)
    assert not unchanged.warnings
    by_position = asked("", logged='{"version":1}\n{"version":1}', unfinished=True)
    assert isinstance(by_position, Plan)
    assert not by_position.warnings


def test_where_a_removed_source_ended_is_kept(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "3").write_text('v2\n{"batchWatermarkMs":0}\n' + LOGGED)
    sidecar.keep_removed(str(tmp_path), ["orders", "payments"])
    assert sidecar.read_removed(str(tmp_path)) == {}
    sidecar.keep_removed(str(tmp_path), ["orders"])
    sidecar.keep_removed(str(tmp_path), ["orders", "refunds"])
    assert sidecar.read_removed(str(tmp_path)) == {"payments": '{"version":2}'}
    assert sidecar.keep_first(str(tmp_path), lambda: {"version": 0}, "orders") is None
    assert sidecar.keep_first(str(tmp_path), lambda: {"version": 9}, "refunds") == {"version": 9}
    assert sidecar.keep_first(str(tmp_path), lambda: {"version": 10}, "refunds") == {"version": 9}
    (tmp_path / sidecar.REMOVED_FILE).write_text("{")
    with pytest.raises(InvariantBroken, match="removed-sources"):
        sidecar.read_removed(str(tmp_path))


def test_a_batch_with_other_offsets_of_one_source_is_another_batch() -> None:
    scope = Scope("shop", "out", "i")
    none = Fingerprint()
    decided = Decision(scope, "driver", Guarantee.EXACTLY_ONCE, 4, LOGGED, (), {scope.sink: Account(none, none)}, 0)
    view = CheckpointView("i", 4, LOGGED.replace("2", "3"), 3)
    with pytest.raises(LedgerAhead) as caught:
        judge(LedgerState(last=decided), view, scope, Guarantee.EXACTLY_ONCE, Tolerance())
    assert """.option("startingOffsets", '{"version":2}') for source payments""" in str(caught.value)
    view = replace(view, batch=6, offsets=LOGGED)
    with pytest.raises(LedgerBehind):
        judge(LedgerState(last=decided), view, scope, Guarantee.EXACTLY_ONCE, Tolerance())


def test_each_source_has_sidecar_files_of_its_own(tmp_path: Path) -> None:
    for name, version in (("orders", 1), ("payments", 2), ("source", 3)):
        assert sidecar.keep_first(str(tmp_path), lambda at=version: {"version": at}, name) == {"version": version}
        metadata = OffsetMetadata(str(tmp_path), frozenset({"#id"}), frozenset({"#id"}), name=name)
        metadata.keep({"0": 1}, {"#id": name})
    for name, version in (("orders", 1), ("payments", 2), ("source", 3)):
        assert sidecar.read_first(str(tmp_path), name) == {"version": version}
        metadata = OffsetMetadata(str(tmp_path), frozenset({"#id"}), frozenset({"#id"}), name=name)
        assert metadata.find({"0": 1}) == {"#id": name}
    files = {"source-offsets.json", "offset-metadata.json"}
    assert {f.name for f in (tmp_path / "delivered").iterdir()} == files | {
        f"{n}.{f}" for n in ("orders", "payments") for f in files
    }


def test_ranges_of_all_sources_for_an_audit(tmp_path: Path) -> None:
    drivers = {}
    for name, records in (("orders", 3), ("refunds", 2)):
        append(str(tmp_path / name), pa.table({"key": [b"k"] * records, "value": [b"v"] * records}))
        drivers[name] = delivered.log(str(tmp_path / name)).source().driver()
    first = drivers["refunds"].initial()
    with closing(SourceSet(drivers, {"orders": None, "refunds": first})) as found:
        assert (found.unknown, found.first["orders"]) == (["orders"], drivers["orders"].initial())
        end = {n: d.newest() or {} for n, d in drivers.items()}
        # The first range of an added source begins at the source's start.
        slices = found.slices({"orders": end["orders"]}, end)
        assert (slices_of(slices, "orders"), len(slices_of(slices, "refunds"))) == ([], 1)
        assert [s.partition for s in slices] == ["refunds refunds-0"]
        with pytest.raises(DeliveredError, match=r"read the sources orders, refunds, gone"):
            found.slices({}, {**end, "gone": {}})
    assert plain(parsed('{"t":{"0":1}}')) == {"t": {"0": 1}}
    assert plain(parsed(LOGGED)) == {"orders": {"version": 1}, "payments": {"version": 2}}
