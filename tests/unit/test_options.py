"""Laws of every declared option: example and default are valid, bounds hold, secrets stay hidden."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory import CONNECTOR as MEMORY

import delivered
from delivered.contract.connector import Connector, Factory
from delivered.kits.schemas import FormatOptions
from delivered.model.errors import DeliveredError, UsageError, redacted
from delivered.model.options import Options, OptionTable, integer, option, resolve_secret
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import connectors
from delivered.pipeline.spec import PIPELINE_OPTIONS

ALL = {**connectors(), "memory": MEMORY}
PARTS = [
    pytest.param(made, id=f"{name} {kind}")
    for name, connector in ALL.items()
    for kind, made in (("source", connector.sources), ("queue", connector.queues), ("sink", connector.sinks))
    if made is not None
]
TOLD = {
    "delivered_kafka source": {"subscribe": "orders"},
    "delivered_iceberg sink": {"warehouse": "/data/lake"},
    "delivered_activemq source": {"log": "/data/log"},
    "delivered_rabbitmq source": {"log": "/data/log"},
    "delivered_rocketmq source": {"log": "/data/log"},
}
"""Required values that the examples lack."""


def least(table: OptionTable) -> dict[str, str]:
    """A minimal set of options."""
    required = {o.name: o.example for o in table.options if o.required and o.example is not None}
    return {**required, **TOLD.get(table.owner, {})}


@pytest.mark.parametrize("made", PARTS)
def test_every_part_is_there_and_made_from_the_least_options(made: Factory) -> None:
    module, _, name = made.by.partition(":")
    assert callable(getattr(import_module(module), name))
    made.options.parse(least(made.options.TABLE))


def misspelt(word: str) -> set[str]:
    """Near spellings; a choice takes any case and spaces around it."""
    return {
        word + "x",
        word[:-1],
        "x" + word,
        f"no-{word}",
        word.replace("_", ""),
        f"{word},{word}",
        word + "\0",
        word[:1],
    }


@pytest.mark.parametrize("made", PARTS)
def test_a_misspelt_word_is_refused_where_words_are_declared(made: Factory) -> None:
    table, own = made.options.TABLE, {o.name for _, d in made.options._DECLARED for o in d.options}
    for one in table.options:
        words = {str(w).lower() for w in one.type.schema.get("examples", ()) if w}
        if len(words) == 1:  # an example of free text
            continue
        for wrong in sorted({m for w in words for m in misspelt(w)} - words - {""}):
            with pytest.raises(UsageError) as caught:
                if one.name in own:
                    made.options.parse({**least(table), one.name: wrong})
                one.parse(table.owner, wrong)  # of options that another class reads
            assert one.name in str(caught.value), (one.name, wrong)
            assert caught.value.next_step, (one.name, wrong)


@pytest.mark.parametrize("made", PARTS)
def test_a_huge_value_is_an_error_of_bounded_length(made: Factory) -> None:
    text = "[" * 30_000
    for one in made.options.TABLE.options:
        try:
            made.options.parse({**least(made.options.TABLE), one.name: text})
        except DeliveredError as error:
            assert len(error.message) <= 20_000, one.name
            assert pickle.loads(pickle.dumps(error)).message == error.message


@pytest.mark.parametrize("made", PARTS)
def test_a_name_has_one_spelling(made: Factory) -> None:
    """Of two that differ in case, one would count."""
    given = least(made.options.TABLE)
    name = next(iter(given))
    with pytest.raises(UsageError, match="the same option"):
        made.options.parse({**given, name.swapcase(): given[name]})


@pytest.mark.parametrize("made", PARTS)
def test_a_misspelt_reference_is_not_sent_as_the_secret(made: Factory) -> None:
    table = made.options.TABLE
    secrets = [o.name for o in table.options if o.secret] + [f"{p}password" for p in table.passthrough]
    for name in secrets:
        for wrong in (" env:X", "ENV:X", "Env:X", "env :X", "FILE:/x", "\tfile:/x"):
            with pytest.raises(UsageError, match="starts like a reference") as caught:
                made.options.parse({**least(table), name: wrong})
            assert wrong not in caught.value.message


@pytest.mark.parametrize("made", PARTS)
def test_a_default_means_the_same_as_no_option(made: Factory) -> None:
    table = made.options.TABLE
    bare = made.options.parse(least(table))
    for one in table.options:
        if one.default and not one.required and one.name not in NOT_TEXTS:
            assert made.options.parse({**least(table), one.name: one.default}) == bare, one.name


NOT_TEXTS = {
    # their default is told in words, or what they fill in tells what was given from what was not
    *("maxOffsetsPerTrigger", "maxRecordsPerPartition", "minPartitions", "valueBytesMax", "schemaVersion"),
    *(
        "startingOffsets",
        "endingOffsets",
        "tlsTrustCertsFile",
        "tlsCertificateFile",
        "tlsKeyFile",
        "ledgerTopic",
        "ledgerReplicationFactor",
    ),
    *("groupIdPrefix", "kafka.isolation.level", "compression", "includeHeaders"),
}


@pytest.mark.parametrize("made", PARTS)
def test_examples_are_allowed(made: Factory) -> None:
    for one in made.options.TABLE.options:
        if one.example is not None:
            one.parse(made.options.TABLE.owner, one.example)


@pytest.mark.parametrize("made", PARTS)
def test_bounds_hold_and_an_error_says_what_to_write(made: Factory) -> None:
    for one in made.options.TABLE.options:
        bounds = [one.type.schema[b] for b in ("minimum", "maximum") if b in one.type.schema]
        for bound, beyond in zip(bounds, (-1, 1), strict=False):
            one.parse("x", str(bound))
            for wrong in (str(bound + beyond), "?"):
                with pytest.raises(UsageError, match=f"{one.name}.*{bound}") as caught:
                    one.parse("x", wrong)
                assert caught.value.code == "DELIVERED_OPTION_VALUE"
                assert one.name in (caught.value.next_step or "")


@pytest.mark.parametrize("made", PARTS)
def test_what_is_declared_secret_is_hidden_everywhere(made: Factory) -> None:
    given = {o.name: "hunter2" for o in made.options.TABLE.options}
    assert {n for n, shown in redacted(given).items() if shown != "hunter2"} == {
        o.name for o in made.options.TABLE.options if o.secret
    }


def test_a_secret_is_not_in_the_repr() -> None:
    for param in PARTS:
        made: Factory = param.values[0]  # type: ignore[assignment]
        secrets = {o.name: "hunter2" for o in made.options.TABLE.options if o.secret}
        if "secretKey" in secrets:
            secrets["accessKey"] = "me"
        assert "hunter2" not in repr(made.options.parse({**least(made.options.TABLE), **secrets}))


class Renamed(Options, owner="delivered_x sink"):
    rows: int = option("rowsMax", "How many.", integer(1, 9), default=3, aliases=("maxRows",))


@pytest.mark.parametrize(("given", "rows"), [({}, 3), ({"ROWSMAX": "4"}, 4), ({"maxrows": "5"}, 5)])
def test_an_earlier_spelling_is_read(given: dict[str, str], rows: int) -> None:
    assert Renamed.parse(given).rows == rows


def test_two_spellings_of_one_option_are_refused() -> None:
    with pytest.raises(UsageError, match="OPTION_CONFLICT"):
        Renamed.parse({"rowsMax": "4", "maxRows": "4"})


def test_options_are_frozen_and_every_field_is_known_by_name() -> None:
    made: Any = Renamed(rows=1)
    with pytest.raises(AttributeError):
        made.rows = 2
    with pytest.raises(TypeError):
        Renamed(row=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda c: c.source({}), "NOT_A_SOURCE"),
        (lambda c: c.sink({}), "NOT_A_SINK"),
        (lambda c: c.queue({}), "NOT_A_QUEUE"),
    ],
)
def test_what_a_system_is_not_says_what_to_do(call: Any, code: str) -> None:
    with pytest.raises(UsageError, match=code) as caught:
        call(Connector("x", "", instead="take y"))
    assert caught.value.next_step


def test_no_two_tables_spell_one_option_in_two_cases() -> None:
    for table in [PIPELINE_OPTIONS, *(p.values[0].options.TABLE for p in PARTS)]:  # type: ignore[attr-defined]
        spelt = [s.lower() for o in table.options for s in (o.name, *o.aliases)]
        assert len(spelt) == len(set(spelt)), table.owner


@pytest.mark.parametrize(
    ("endpoint", "option", "meant"),
    [
        (Endpoint("kafka", {"topic": "a"}).source, "topic", "subscribe"),
        (Endpoint("kafka", {"subscribe": "a"}).sink, "subscribe", "topic"),
        (Endpoint("kafka", {"brokers": "a:1"}).source, "brokers", "kafka.bootstrap.servers"),
        (Endpoint("delta", {"location": "a"}).sink, "location", "path"),
        (Endpoint("postgres", {"host": "a"}).sink, "host", "url"),
        (Endpoint("postgres", {"primaryKey": "a"}).sink, "primaryKey", "keyColumns"),
    ],
)
def test_the_name_that_another_tool_has_for_an_option_is_known(
    endpoint: Callable[[], Any], option: str, meant: str
) -> None:
    with pytest.raises(UsageError, match=f"has no option '{option}'") as error:
        endpoint()
    assert error.value.next_step == f"write '{meant}'"


def test_a_secret_in_a_file_is_its_text(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for written in (b"pw", b"pw\n", b"pw\r\n", b"\xef\xbb\xbfpw\n"):
        file.write_bytes(written)
        assert resolve_secret("password", f"file:{file}") == "pw"
    file.write_bytes(b"\xff\xfep\0w\0")
    for unreadable in (f"file:{file}", "file:a\0b"):
        with pytest.raises(UsageError, match="SECRET_MISSING"):
            resolve_secret("password", unreadable)


def test_an_embedded_catalog_has_one_warehouse() -> None:
    with pytest.raises(UsageError, match="the same option"):
        delivered.iceberg("a.b", warehouse="/lake", **{"catalog.warehouse": "s3://lake"}).sink()


def test_kafka_has_one_list_of_servers() -> None:
    delivered.kafka("h:1", topic="t", **{"kafka.bootstrap.servers": "h:1"})
    with pytest.raises(UsageError, match="the same option"):
        delivered.kafka("h:1", topic="t", **{"kafka.Bootstrap.servers": "other:1"})


def test_a_blank_is_no_value_where_it_would_weaken_something() -> None:
    """As of a variable that a template did not have: every row would be newer, every authority trusted."""
    known: Any = connectors()
    upsert = {"mode": "upsert", "keyColumns": "id"}
    tls = {"rabbitmq": "amqps://h", "activemq": "stomp+ssl://h", "pulsar": "pulsar+ssl://h"}
    kafka = {"kafka.security.protocol": "SSL"}
    blanks: list[tuple[str, dict[str, str], str]] = [
        *(("sqlite", upsert, n) for n in ("versionColumn", "deleteColumn")),
        *(("delta", upsert, n) for n in ("versionColumn", "deleteColumn")),
        ("postgres", {**upsert, "versionColumn": "v"}, "expectedVersion"),
        *(
            (s, {"url": url, "ledger": "/l", "queue": "q", "exchange": "e"}, "tlsTrustCertsFile")
            for s, url in tls.items()
        ),
        ("rocketmq", {"tls": "true", "ledger": "/l"}, "tlsTrustCertsFile"),
        *(("kafka", kafka, f"kafka.ssl.{n}.location") for n in ("ca", "truststore", "certificate")),
        ("kafka", {"value.format": "avro", "schema.registry.url": "https://r"}, "schema.registry.ssl.ca.location"),
    ]
    for system, given, name in blanks:
        options = known[system].sinks.options
        names = {o.name for o in options.TABLE.options}
        fitting = {**least(options.TABLE), **{k: v for k, v in given.items() if k in names or "." in k}}
        extra = {"kafka.ssl.truststore.type": "PEM"} if "truststore" in name else {}
        options.parse({**fitting, **extra})
        for blank in ("", " "):
            with pytest.raises(UsageError, match=f"{name}' is empty"):
                complete = {**fitting, **extra, name: blank}
                options.parse(complete)
                FormatOptions.read("owner", complete)


def test_certificates_for_a_registry_without_tls_are_refused() -> None:
    given = {"value.format": "avro", "schema.registry.ssl.ca.location": "/ca.pem"}
    FormatOptions.read("owner", {**given, "schema.registry.url": "http://a,https://b"})
    with pytest.raises(UsageError, match="nothing uses TLS"):
        FormatOptions.read("owner", {**given, "schema.registry.url": "http://a"})
    token = {"schema.registry.bearer.auth.token": "env:T", "schema.registry.url": "http://r.example"}
    assert FormatOptions.read("owner", {"value.format": "avro", **token}).in_clear
