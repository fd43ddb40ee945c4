"""A real registry: what it refuses is refused before anything is written; Confluent's serializer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from tests.support.front import certificate, https_front

from delivered.contract.sink import Sink
from delivered.kits.schemas.formatted import Decoder, Encoder, schema_of
from delivered.kits.schemas.registry import connected
from delivered.model.errors import Unreachable, UsageError
from delivered.pipeline.registry import find_sink, find_source

if TYPE_CHECKING:
    from tests.support.servers import Registry

ORDER: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
NARROWER = {**ORDER, "fields": [*ORDER["fields"], {"name": "city", "type": "string"}]}
WIDER = {**ORDER, "fields": [*ORDER["fields"], {"name": "city", "type": ["null", "string"], "default": None}]}
ID, ROWS = pa.struct([("id", pa.int64())]), pa.struct([("id", pa.int64()), ("city", pa.string())])


def sink(url: str, topic: str, client: dict[str, str] | None = None, **more: str) -> Sink:
    given = {f"value.{k}": v for k, v in {"format": "avro", **more}.items()}
    options = {"kafka.bootstrap.servers": "b:1", "topic": topic, "schema.registry.url": url, **given, **(client or {})}
    made = find_sink("kafka", options)
    assert made.schema_columns
    return made


CA, LOGIN = "schema.registry.ssl.ca.location", "schema.registry.basic.auth.user.info"


@pytest.fixture(scope="module")
def secured(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Path]]]:
    """The registry behind TLS and a login: its URL, and the files of its certificate."""
    files = certificate(tmp_path_factory.mktemp("front"))
    with https_front(registry.url, files, "ann:pass:word") as url:
        yield url, files


def value(kind: pa.DataType) -> pa.Schema:
    return pa.schema([("value", kind)])


def test_a_change_that_the_registry_refuses_changes_nothing(registry: Registry) -> None:
    with pytest.raises(UsageError, match=r"SCHEMA_MISSING.*'new-value' has no schema"):
        sink(registry.url, "new").check_rows(value(ID))
    first = sink(registry.url, "new", schema=json.dumps(ORDER)).settled(value(ID))
    assert sink(registry.url, "new").settled(value(ID)).schema_ids() == first.schema_ids()
    registry.client().set_compatibility("new-value", "BACKWARD")

    refused = sink(registry.url, "new", schema=json.dumps(NARROWER))
    for attempt in (refused.check_rows, refused.settled):
        with pytest.raises(UsageError, match=r"SCHEMA_REFUSED.*'new-value'.*Nothing was registered"):
            attempt(value(ROWS))
    assert registry.client().get_versions("new-value") == [1]
    with pytest.raises(UsageError, match=r"SCHEMA_UNFIT.*'value\.city' is not a field of the schema"):
        sink(registry.url, "new").check_rows(value(ROWS))

    second = sink(registry.url, "new", schema=json.dumps(WIDER)).settled(value(ROWS))
    assert registry.client().get_versions("new-value") == [1, 2]
    assert sink(registry.url, "new").settled(value(ROWS)).schema_ids() == second.schema_ids() != first.schema_ids()
    assert sink(registry.url, "new", **{"schema.version": "1"}).settled(value(ID)).schema_ids() == first.schema_ids()
    assert sink(registry.url, "new").by_ids(first.schema_ids()).schema_ids() == first.schema_ids()
    with pytest.raises(UsageError, match=r"SCHEMA_KIND.*is avro, and value\.format is protobuf"):
        sink(registry.url, "new", format="protobuf").check_rows(value(ID))
    with pytest.raises(UsageError, match="SCHEMA_MISSING"):
        sink(registry.url, "new").by_ids({"value": 999_999})


def test_a_registry_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delivered.kits.schemas.registry.patience_s", lambda answered: 0.2)
    with pytest.raises(Unreachable, match=r"REGISTRY_UNREACHABLE.*http://127\.0\.0\.1:1 does not answer") as caught:
        sink("http://127.0.0.1:1", "away").check_rows(value(ID))
    assert caught.value.may_come_back


def test_confluents_serializer_and_ours_read_each_other(registry: Registry) -> None:
    client, context = registry.client(), SerializationContext("interop", MessageField.VALUE)
    theirs = AvroSerializer(client, json.dumps(WIDER))({"id": 7, "city": "Ulm"}, context)
    planned = connected({"url": registry.url}).find("interop-value", None)
    assert planned is not None
    rows = pa.array([{"id": 7, "city": "Ulm"}], schema_of(planned).arrow)
    ours, _ = Encoder(planned, None, rows.type).column(rows)
    assert ours.to_pylist() == [theirs]
    assert AvroDeserializer(client)(ours[0].as_py(), context) == {"id": 7, "city": "Ulm"}
    assert Decoder(planned, None, connected({"url": registry.url}).by_id).column(pa.array([theirs]))[0].equals(rows)


def test_tls_and_a_login_by_reference(
    secured: tuple[str, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password may contain a colon. Nothing that is shown has it."""
    url, files = secured
    (tmp_path / "login").write_text("ann:pass:word\n")
    monkeypatch.setenv("REGISTRY_USER_INFO", "ann:pass:word")
    settings = {"schema.registry.url": url, CA: str(files["certificate"])}
    for at, reference in enumerate((f"file:{tmp_path}/login", "env:REGISTRY_USER_INFO")):
        topic = f"secured{at}"
        given = {**settings, LOGIN: reference, "kafka.bootstrap.servers": "b:1", "value.format": "avro"}
        made = find_sink("kafka", {**given, "topic": topic, "value.schema": json.dumps(ORDER)})
        assert made.schema_columns
        ready = made.settled(value(ID))
        assert ready.schema_ids()["value"] > 0
        source = find_source("kafka", {**given, "subscribe": topic})
        assert source.newest_versions() == {"value": 1}
        assert source.schema().field("value").type == ID
        shown = [repr(ready), repr(source), str(ready.capability()), str(source.capability())]
        assert "pass:word" not in " ".join(shown)


@pytest.mark.parametrize("wrong", ["ann:guessed", "bob:pass:word", None])
def test_a_wrong_login_is_refused_at_once_and_not_shown(
    secured: tuple[str, dict[str, Path]], wrong: str | None, tmp_path: Path
) -> None:
    url, files = secured
    (tmp_path / "login").write_text(wrong or "")
    more = {} if wrong is None else {LOGIN: f"file:{tmp_path}/login"}
    with pytest.raises(Unreachable, match=r"SCHEMA_REGISTRY_LOGIN.*HTTP 401.*check schema\.registry\.basic") as caught:
        sink(url, "closed", {CA: str(files["certificate"]), **more}).check_rows(value(ID))
    assert not caught.value.may_come_back
    assert wrong is None or wrong.partition(":")[2] not in str(caught.value)


def test_an_untrusted_certificate_is_refused_before_anything_is_sent(
    secured: tuple[str, dict[str, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not asked again, as a registry that is away would be."""
    caplog.set_level(logging.DEBUG, "delivered.outage")
    url, files = secured
    other, login = certificate(tmp_path / "other")["certificate"], {LOGIN: "ann:pass:word"}
    (tmp_path / "garbage.pem").write_text("nothing")
    ours = str(files["certificate"])
    by_name = url.replace("127.0.0.1", "localhost")
    for at, options, code, words in (
        (url, {}, "CERTIFICATE_REFUSED", f"certifi.*set {CA} to .*openssl s_client -showcerts -connect 127"),
        (url, {CA: str(other)}, "CERTIFICATE_REFUSED", f"other/ca.pem.*set {CA} to the issuer's"),
        (by_name, {CA: ours}, "CERTIFICATE_REFUSED", "in schema.registry.url, use the host names"),
        (url, {CA: "/no/such.pem"}, "TLS_FILES", f"{CA}' is '/no/such.pem', .*no such file"),
        (url, {CA: f"{tmp_path}/garbage.pem"}, "TLS_FILES", "no PEM certificate"),
    ):
        with pytest.raises(UsageError, match=f"{code}.*{words}") as caught:
            sink(at, "closed", {**login, **options}).check_rows(value(ID))
        assert "pass:word" not in str(caught.value)
    assert "asking again" not in caplog.text
