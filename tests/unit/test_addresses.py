"""An address that nothing can listen at is refused where options are parsed, by every connector, before any wait."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from delivered.connectors.log import append
from delivered.kits.schemas import FormatOptions
from delivered.model.errors import Refused, UsageError
from delivered.model.options import Unfit, parse_address, parse_addresses
from delivered.operate.lineage import configured
from delivered.operate.metrics import otlp_reader
from delivered.patterns.saga.definition import Http
from delivered.patterns.saga.log import Log
from delivered.pipeline.registry import connectors
from delivered.receiver import ReceiveOptions

BAD = [
    "", "   ", ":9092", "host:", "host:0", "host:-1", "host:99999", "host:999999", "host:9092x", "host:+1",
    "host:\uff19", "host:1 2", "::1:9092", "[::1:9092", "::1]:9092", "[]:9092", "[host]:9092", "[1.2.3.4]:9092",
    "[:::]:9092",
    "a..b:9092", ".a:9092", "ho st:9092", "host/x:9092", "http://host:9092", "user@host:9092", "1.2.3:9092",
    "1.2.3.999:9092", f"{'a' * 64}:9092", f"{'a.' * 130}a:9092", "host:9092:9093", "host\n:9092",
]  # fmt: skip


@pytest.mark.parametrize("text", [*BAD, "host", "[::1]"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(Unfit, match=r"^(has|is) "):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("broker-1.example:9092", ("broker-1.example", 9092)), ("localhost:1", ("localhost", 1)),
        ("[::1]:9092", ("::1", 9092)), ("[fe80::1%eth0]:9092", ("fe80::1%eth0", 9092)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("my_container:80", ("my_container", 80)), ("bücher.example:80", ("bücher.example", 80)),
        ("fully.qualified.:80", ("fully.qualified.", 80)),
    ],
)  # fmt: skip
def test_what_is_one(text: str, place: tuple[str, int]) -> None:
    assert parse_address(text) == place


def test_lists_need_one_and_skip_empty_elements() -> None:
    assert parse_addresses("a:1, b:2,") == [("a", 1), ("b", 2)]
    assert parse_addresses("a,[::1]", port=9) == [("a", 9), ("::1", 9)]
    for nothing in ("", " ", ",,,", " , "):
        with pytest.raises(Unfit, match=r"names no server|is empty"):
            parse_addresses(nothing)
    with pytest.raises(Unfit, match="IPv6 address is written in brackets"):
        parse_addresses("a:1,fe80::1:9092")


URLS = [
    "{s}://host:999999{p}",
    "{s}://host:0{p}",
    "{s}://host:x{p}",
    "{s}://::1:1{p}",
    "{s}://[::1{p}",
    "{s}://a..b:1{p}",
]
NO_HOST = ["{s}://:1{p}", "{s}://{p}"]


REST = ["{s}://host:1{p}?sslEnabled=true", "{s}://host:1{p}#?ssl=true"]
"""Parts of a URL that no broker's client reads."""


def urls(scheme: str, path: str, *more: str) -> list[str]:
    return [url.format(s=scheme, p=path) for url in (*URLS, *more)]


PLACES = [
    ("kafka", "source", "kafka.bootstrap.servers", {"subscribe": "t"}, [*BAD, ",,,", "a:1,b:999999"]),
    ("kafka", "sink", "kafka.bootstrap.servers", {"topic": "t"}, [*BAD, ",,,", "a:1,b:999999"]),
    ("rocketmq", "source", "endpoints", {"topic": "t", "group": "g", "log": "/l"}, [*BAD, ";;;", "a:1;b:999999"]),
    ("rocketmq", "sink", "endpoints", {"topic": "t", "ledger": "/l"}, [*BAD, ";;;"]),
    ("rocketmq", "sink", "nameServers",
     {"endpoints": "a:1", "topic": "t", "ledger": "/l", "messageType": "transaction"},
     [";;;", "a:1;b:999999", "[:::]:1"]),
    ("pulsar", "source", "url", {"topics": "t", "adminUrl": "http://a"},
     [*urls("pulsar", "", *NO_HOST, *REST, "{s}://host:1/a"), "pulsar://a:1,b:999999", "pulsar://,,"]),
    ("pulsar", "sink", "adminUrl", {"topic": "t", "url": "pulsar://a", "ledger": "/l"},
     urls("http", "", *NO_HOST, *REST)),
    ("activemq", "sink", "url", {"queue": "q", "ledger": "/l"}, urls("stomp", "", *NO_HOST, *REST, "{s}://host:1/a")),
    ("rabbitmq", "sink", "url", {"exchange": "e", "ledger": "/l"}, urls("amqps", "/v", *NO_HOST, *REST, "{s}://h/a/b")),
    ("rabbitmq_stream", "source", "url", {"streams": "s"}, urls("amqp", "", *NO_HOST, *REST)),
    ("postgres", "sink", "url", {"dbtable": "t"},
     [*urls("postgresql", "/d"), "postgresql://a:1,b:999999/d", "postgresql://a/d?port=999999"]),
    ("mysql", "sink", "url", {"dbtable": "t"}, urls("mysql", "/d")),
    ("outbox", "source", "url", {}, urls("mysql", "/d")),
    ("saga", "sink", "log", {"saga": "a:b", "ledger": "/l"}, urls("postgresql", "/d")),
    ("iceberg", "sink", "catalog.uri", {"table": "a.b", "catalog.warehouse": "w"}, urls("http", "/")),
]  # fmt: skip


@pytest.mark.parametrize(("system", "part", "option", "more", "wrong"), PLACES)
def test_every_connector_refuses_what_nothing_can_listen_at(
    system: str, part: str, option: str, more: dict[str, str], wrong: list[str]
) -> None:
    made: Any = getattr(connectors()[system], "sinks" if part == "sink" else "sources")
    made = made or connectors()[system].queues
    for value in wrong:
        with pytest.raises(UsageError) as caught:
            made.options.parse({**more, option: value})
        assert option in caught.value.message, (value, caught.value.message)
        assert caught.value.code == "DELIVERED_OPTION_VALUE"


@pytest.mark.parametrize(
    ("system", "url", "more"),
    [
        ("postgres", "postgresql:///shop?host=/var/run&port=5433", {"dbtable": "t"}),
        ("postgres", "postgresql://a:5432,[::1]:5433/shop", {"dbtable": "t"}),
        ("postgres", "postgresql://me@/shop", {"dbtable": "t"}),
        ("mysql", "mysql:///shop", {"dbtable": "t"}),
        ("rabbitmq", "amqp://me@[::1]:5672/v", {"exchange": "e", "ledger": "/l"}),
        ("rabbitmq", "amqp://h/a%2Fb?frame_max=4096", {"exchange": "e", "ledger": "/l"}),
        ("activemq", "stomp://h/", {"queue": "q", "ledger": "/l"}),
        ("pulsar", "pulsar://a:6650,b:6651,[::1]", {"topic": "t", "adminUrl": "http://[::1]:80", "ledger": "/l"}),
    ],
)
def test_what_servers_accept_is_accepted(system: str, url: str, more: dict[str, str]) -> None:
    made: Any = connectors()[system].sinks
    made.options.parse({**more, "url": url})


def test_a_registry_is_refused_like_the_brokers() -> None:
    for value in (*urls("http", "", *NO_HOST), ",,"):
        with pytest.raises(UsageError, match=r"schema\.registry\.url"):
            FormatOptions.read("x", {"value.format": "avro", "schema.registry.url": value})


ENDPOINTS: list[tuple[str, dict[str, str], str]] = [
    ("delta", {"path": "s3://b/t"}, "storage.AWS_ENDPOINT_URL"),
    ("delta", {"path": "s3://b/t"}, "storage.endpoint"),
    ("delta", {"path": "az://b/t"}, "storage.azure_storage_endpoint"),
    ("delta", {"path": "gs://b/t"}, "storage.google_base_url"),
    ("iceberg", {"table": "a.b", "warehouse": "/w"}, "catalog.s3.endpoint"),
    (
        "iceberg",
        {"table": "a.b", "catalog.uri": "http://a", "catalog.warehouse": "s3://w"},
        "catalog.oauth2-server-uri",
    ),
]
WRONG = ["", " ", "minio:9000", "ftp://minio:9000", "http://minio:9000:1", *urls("http", "/", *NO_HOST)]


@pytest.mark.parametrize(("system", "more", "option"), ENDPOINTS)
def test_endpoints_of_object_stores(system: str, more: dict[str, str], option: str) -> None:
    parse = connectors()[system].sinks.options.parse  # type: ignore[union-attr]
    for value in WRONG:
        with pytest.raises(UsageError, match="OPTION_VALUE") as caught:
            parse({**more, option: value})
        said = caught.value.message.lower()
        assert option.lower() in said and value.removeprefix("http://").strip("/") in said
    for value in ("http://minio:9000", "https://[::1]:9000/", "env:ENDPOINT"):
        parse({**more, option: value})


def test_endpoints_that_clients_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:999999")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:0")
    monkeypatch.setenv("OPENLINEAGE_URL", "marquez:5000")
    configured.cache_clear()
    delta: Any = connectors()["delta"].sinks
    for ask, name, value in [
        (lambda: delta.options.parse({"path": "s3://b/t"}), "AWS_ENDPOINT_URL", "999999"),
        (lambda: otlp_reader(None, 1), "OTEL_EXPORTER_OTLP_ENDPOINT", "'0'"),
        (configured, "OPENLINEAGE_URL", "marquez:5000"),
    ]:
        with pytest.raises(UsageError) as caught:
            ask()
        assert name in caught.value.message and value in caught.value.message
    delta.options.parse({"path": "/local"})


@pytest.mark.parametrize(
    "value", [*WRONG, "http://{id}.example/x", "http://a:{key}/", "http://{step}@host/", "env:URL"]
)
def test_urls_of_a_sagas_steps(value: str) -> None:
    with pytest.raises(UsageError, match=r"The URL of a step (is|has) "):
        Http(value)
    Http("https://host:8443/orders/{id}?key={key}")


@pytest.mark.parametrize("value", WRONG)
def test_an_endpoint_of_open_telemetry(value: str) -> None:
    with pytest.raises(UsageError, match="--otlp"):
        otlp_reader(value, 1)


@pytest.mark.parametrize("name", ["storage.AWS_S3_ALLOW_UNSAFE_RENAME", "storage.allow_unsafe_rename"])
@pytest.mark.parametrize("word", ["true", "TRUE", "1", "on", "yes", "Y", " true ", "env:X", "ture"])
def test_delta_never_renames_without_a_condition(name: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, given in _tables_of_delta():
        for path in ("s3://b/t", "S3://b/t"):
            with pytest.raises(Refused, match="COMMIT_UNSAFE"):
                options.parse({**given(path), name: word})
        options.parse({**given("s3://b/t"), name: "False"})
    with pytest.raises(Refused, match="COMMIT_UNSAFE"):
        append("s3://b/t", pa.table({"value": [b"1"]}), storage={name.removeprefix("storage."): word})
    monkeypatch.setenv(name.removeprefix("storage.").upper(), word)
    for options, given in _tables_of_delta():
        with pytest.raises(Refused, match="COMMIT_UNSAFE"):
            options.parse(given("S3://b/t"))
        options.parse(given("/local"))


def _tables_of_delta() -> list[tuple[Any, Any]]:
    """Options of whatever is a Delta table, and what they need with a path."""
    known: Any = connectors()
    return [
        (known["delta"].sinks.options, lambda path: {"path": path}),
        (known["log"].sources.options, lambda path: {"path": path}),
        (ReceiveOptions, lambda path: {"log": path}),
    ]


@pytest.mark.parametrize("word", ["disabled", " Disabled", "dynamo:t", "etga", "env:X"])
def test_delta_never_puts_without_a_condition(word: str) -> None:
    for name in ("storage.conditional_put", "storage.aws_conditional_put"):
        for options, given in _tables_of_delta():
            with pytest.raises(Refused, match="COMMIT_UNSAFE"):
                options.parse({**given("s3://b/t"), name: word})
            options.parse({**given("s3://b/t"), name: "etag"})


@pytest.mark.parametrize(
    "query",
    ["sslmode=verify_full", "sslmode=Verify-Full", "sslmode=requier", "sslmode=", "sslmode=require%20",
     "SSLMODE=require", "sslmode=verify-full&sslmode=disable", "channel_binding=required",
     "gssencmode=on", "sslnegotiation=Direct", "sslmod=require", "sslrootcrt=/x", "appliction_name=a",
     "sslmode=verify-full&ssl=true", "sslmode=verify-full&requiressl=0"],
)  # fmt: skip
def test_words_of_libpq_are_checked_where_options_are_parsed(query: str) -> None:
    url = f"postgresql://h.example/db?{query}"
    sink, outbox = connectors()["postgres"].sinks, connectors()["outbox"].sources
    assert sink is not None and outbox is not None
    for ask in (
        lambda: sink.options.parse({"url": url, "dbtable": "t"}),
        lambda: outbox.options.parse({"url": url, "dbtable": "outbox"}),
        lambda: Log(url),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert caught.value.next_step is not None and query[:6].lower() in caught.value.next_step
    for right in ("sslmode=verify-full&channel_binding=require", "sslrootcert=/x&sslmode=require", "ssl=true",
                  "ssl=true&sslmode=verify-full"):  # fmt: skip
        found = sink.options.parse({"url": f"postgresql://h.example/db?{right}", "dbtable": "t"})
        assert not any("not required" in sentence for sentence in found.in_clear)


@pytest.mark.parametrize("rest", ["db#2", "db#", "db?connect_timeout=9#x", "db#?sslmode=verify-full"])
@pytest.mark.parametrize("system", ["postgres", "mysql"])
def test_a_url_that_clients_read_differently_is_refused(system: str, rest: str) -> None:
    url = f"{system}://h.example/{rest.replace('connect_timeout=9', 'ssl_ca=x') if system == 'mysql' else rest}"
    sink, outbox = connectors()[system].sinks, connectors()["outbox"].sources
    assert sink is not None and outbox is not None
    for ask in (
        lambda: sink.options.parse({"url": url, "dbtable": "t"}),
        lambda: outbox.options.parse({"url": url, "dbtable": "outbox"}),
        lambda: Log(url),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert "%23" in str(caught.value.next_step), caught.value


@pytest.mark.parametrize("query", ["ssl_verify_cert=true&ssl_verify_cert=false", "SSL_CA=/x", "ssl_mode=REQUIRED"])
def test_parameters_of_mysql_are_known_and_given_once(query: str) -> None:
    sink = connectors()["mysql"].sinks
    assert sink is not None
    with pytest.raises(UsageError):
        sink.options.parse({"url": f"mysql://h.example/db?{query}", "dbtable": "t"})
    with pytest.raises(UsageError):
        sink.options.parse({"url": f"mysql://h.example/db#?{query}", "dbtable": "t"})
