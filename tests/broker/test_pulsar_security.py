"""Pulsar with tokens and TLS: authorized roles read and write; others get a clear error, and nothing is lost."""

from __future__ import annotations

import logging
import pickle
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.broker.send_help import SCHEMA, rows, writer
from tests.support.pulsar import batches, read, read_all, values
from tests.support.scans import scanned_table
from tests.support.servers import Pulsar

from delivered.connectors.pulsar import CONNECTOR, PulsarSinkOptions, SourceOptions, client
from delivered.connectors.pulsar.client import Admin
from delivered.connectors.pulsar.publisher import Publisher
from delivered.connectors.pulsar.source import check_connection
from delivered.machine import java_home
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import Ok, Prepared, Promise
from delivered.pipeline.registry import find_sink
from delivered_lab import brokers
from delivered_lab.brokers import pulsar as server
from delivered_lab.brokers.servers import make_certificate

parse = SourceOptions.parse
parse_sink = PulsarSinkOptions.parse

SECRET = secrets.token_bytes(32)
ROLES = {"reader": ["consume"], "writer": ["produce"], "both": ["produce", "consume"], "nobody": []}
ROW = b"row 0"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pulsar]:
    """One server for this module."""
    broker = brokers.start(
        "pulsar",
        tmp_path_factory.mktemp("guarded"),
        tls=True,
        heap_mb=256,
        dies_with_parent=True,
        properties={**Pulsar.quick, **server.with_tokens(SECRET)},
    )
    made = Pulsar(broker, server.make_token(SECRET, server.ADMIN))
    for role, actions in ROLES.items():
        made.admin("POST", f"namespaces/public/default/permissions/{role}", actions)
    yield made
    made.close()
    broker.stop()


@pytest.fixture(autouse=True)
def _tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ROLES:
        monkeypatch.setenv(f"TOKEN_{role.upper()}", server.make_token(SECRET, role))
    monkeypatch.setenv("TOKEN_EXPIRED", server.make_token(SECRET, "both", 1_700_000_000))
    monkeypatch.setenv("TOKEN_FORGED", server.make_token(bytes(32), "both"))
    monkeypatch.setenv("TOKEN_GARBLED", "no-token-at-all")


def place(guarded: Pulsar, role: str | None = None, **more: str | None) -> dict[str, str]:
    """Options, over TLS; None removes one."""
    at = guarded.broker.listeners
    found = {
        "url": f"pulsar+ssl://{at['PULSAR_SSL']}",
        "adminUrl": f"https://{at['HTTPS']}",
        "tlsTrustCertsFile": str(guarded.broker.certificate),
        "token": None if role is None else f"env:TOKEN_{role.upper()}",
        **more,
    }
    return {k: v for k, v in found.items() if v is not None}


def source(options: dict[str, str], topic: str, **more: str) -> Any:
    return CONNECTOR.source({k.lower(): v for k, v in {**options, "topics": topic, **more}.items()})


def sink(folder: Path, options: dict[str, str], topic: str, **more: str) -> Any:
    return find_sink("pulsar", {**options, "topic": topic, "ledger": str(folder / "l.db"), **more})


def written(made: Any, batch: pa.RecordBatch) -> None:
    task = writer(made)
    try:
        task.stage(batch)
        assert task.prepare(Fingerprint()) == Promise()
    finally:
        task.abort()


def count(guarded: Pulsar, topic: str) -> int:
    """Number of messages ever published."""
    return int(guarded.admin("GET", f"persistent/public/default/{topic}/stats")["msgInCounter"])


def refused(findings: Any, code: str) -> str:
    (finding,) = findings
    assert (finding.code, finding.refuses) == (code, True), finding
    return f"{finding.message} Next: {finding.next_step}"


@pytest.mark.matrix
def test_the_server_listens_on_127_0_0_1_alone_and_keeps_its_secrets(guarded: Pulsar) -> None:
    broker = guarded.broker
    listening = [c.laddr for c in psutil.Process(broker.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {a.ip.removeprefix("::ffff:") for a in listening} == {"127.0.0.1"}
    assert {int(a.rpartition(":")[2]) for a in broker.listeners.values()} <= {a.port for a in listening}
    assert set(broker.listeners) == {"PULSAR", "HTTP", "PULSAR_SSL", "HTTPS"}
    assert brokers.status(broker.folder).answering
    for name in ("standalone.conf", "state.json", "keystore.password"):
        assert (broker.folder / name).stat().st_mode & 0o77 == 0, name


@pytest.mark.matrix  # the tests of a replaced token and of what is shown read and write over TLS
def test_roles_do_what_they_may_over_tls(guarded: Pulsar, tmp_path: Path) -> None:
    """Consume and produce are sufficient for source and sink."""
    topic = guarded.topic(2)
    into = sink(tmp_path, place(guarded, "writer"), topic)
    assert into.preflight(Guarantee.AT_MOST_ONCE) == into.preflight(Guarantee.AT_LEAST_ONCE) == []
    written(into, rows(600))
    chunked = sink(tmp_path, place(guarded, "writer"), topic, chunking="true")
    written(chunked, pa.record_batch([[bytes(6 << 20)]], schema=SCHEMA))

    of = source(place(guarded, "reader"), topic, subscription="s", startingOffsets="earliest")
    assert of.preflight() == []
    cuts = batches(of, 1)  # an entry each; the sender's clock decides how many the 600 rows fill
    assert len(cuts) > 2
    for start, end in cuts:  # each starts within the topic, one in the middle of the message in chunks
        read(of, start, end)
    of.driver().acknowledge(cuts[-1][1])
    assert len(read_all(source(place(guarded, "reader"), topic))) == 601
    assert len(batches(source(place(guarded, "reader"), topic, startingTimestamp="0"), None)) == 1
    assert scanned_table(sink(tmp_path, place(guarded, "both"), topic)).num_rows == 601

    typed = guarded.topic()
    batch = pa.record_batch([pa.array([{"id": 1}])], names=["value"])
    into = sink(tmp_path, place(guarded, "writer"), typed, schema="avro")
    assert into.preflight(Guarantee.AT_LEAST_ONCE) == []
    into.ready_target(batch.schema)
    written(into, batch)
    found = read_all(source(place(guarded, "reader"), typed, schema="topic"))
    assert found.column("value").to_pylist() == [{"id": 1}]


def test_transactions_need_a_right_on_their_coordinators(guarded: Pulsar, tmp_path: Path) -> None:
    """Consume on pulsar/system; over TLS, with a token."""
    topic = guarded.topic(2)
    into = sink(tmp_path, place(guarded, "both"), topic)
    work = Work(Scope("p", "s", "i"), 0, 0)

    def prepared() -> Prepared:
        task = into.writer(work, Guarantee.EXACTLY_ONCE, SCHEMA)
        try:
            task.stage(rows(50))
            return Prepared.of(work, Fingerprint(), task.prepare(Fingerprint()))
        finally:
            task.abort()

    assert "pulsar/system" in refused(into.preflight(Guarantee.EXACTLY_ONCE), "NOT_PERMITTED")
    with pytest.raises(UsageError, match="NOT_PERMITTED"):
        prepared()
    guarded.admin("POST", "namespaces/pulsar/system/permissions/both", ["consume"])
    shard = wait_until(prepared)
    assert into.preflight(Guarantee.EXACTLY_ONCE) == []
    committer = into.committer(work.scope)
    assert committer.commit(work, shard) == Ok(None)
    assert committer.was_committed(work, shard)
    assert read_all(source(place(guarded, "reader"), topic)).num_rows == 50


def wait_until(permitted: Callable[[], Any]) -> Any:
    """Brokers learn of a grant a moment later."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return permitted()
        except UsageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (None, r"No token was given. Next: set the option token to env:NAME or file:PATH"),
        (
            "expired",
            r"env:TOKEN_EXPIRED\) has the role 'both', and expired at 2023-11-14 22:13:20 UTC. .*a new token",
        ),
        ("forged", r"env:TOKEN_FORGED\) has the role 'both'. Next: check that it was signed with the brokers' key"),
        ("garbled", r"env:TOKEN_GARBLED\) is not a JSON Web Token"),
        ("nobody", r"env:TOKEN_NOBODY\) has the role 'nobody'.*needs consume, writing produce .*--role nobody"),
    ],
)
def test_who_is_not_let_in_is_told_before_the_start_and_nothing_changes(
    guarded: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str | None, said: str
) -> None:
    topic = guarded.topic()
    written(sink(tmp_path, place(guarded, "writer"), topic), rows(10))
    of, into = source(place(guarded, role), topic), sink(tmp_path, place(guarded, role), topic)
    told = [refused(of.preflight(), "NOT_PERMITTED")]
    told.append(refused(into.preflight(Guarantee.AT_LEAST_ONCE), "NOT_PERMITTED"))
    piece = source(place(guarded, "reader"), topic).driver()
    (slice_,) = piece.slices(*piece.batch())
    # One that was authorized before, and no longer is.
    acts: list[Callable[[], Any]] = [lambda: list(of.read(slice_)), of.driver().batch]
    if role in ("expired", "nobody"):
        # The binary protocol: a rejected token looks like an unresponsive broker.
        monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 1.0)
        full = f"persistent://public/default/{topic}"
        acts += [lambda: check_connection(of.options, full), lambda: written(into, rows(10))]
    for act in acts:
        with pytest.raises(UsageError, match="NOT_PERMITTED") as caught:
            act()
        told.append(str(caught.value))
    for text in told:
        assert re.search(said, text), text
        assert "<" not in text, text
    assert count(guarded, topic) == 10
    assert values(read_all(source(place(guarded, "reader"), topic))) == [b"row %d" % n for n in range(10)]


def test_a_role_that_may_only_do_the_other_thing(guarded: Pulsar, tmp_path: Path) -> None:
    topic = guarded.topic()
    for finding in (
        *source(place(guarded, "writer"), topic).preflight(),
        *sink(tmp_path, place(guarded, "reader"), topic).preflight(Guarantee.AT_LEAST_ONCE),
    ):
        assert finding.code == "NOT_PERMITTED", finding
    assert count(guarded, topic) == 0


def test_a_token_that_is_replaced_where_it_is_kept_is_taken(
    guarded: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm clients of a long-lived process must not keep an expired token."""
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 1.0)
    topic, kept = guarded.topic(), tmp_path / "token"
    written(sink(tmp_path, place(guarded, "writer"), topic), rows(10))
    of = source(place(guarded, token=f"file:{kept}"), topic)
    expired = server.make_token(SECRET, "both", time.time() - 5)
    for token in (expired, "not a token"):
        kept.write_text(token)
        with pytest.raises(UsageError):
            check_connection(of.options, f"persistent://public/default/{topic}")
        assert [f.refuses for f in of.preflight()] == [True]
    kept.write_text(server.make_token(SECRET, "both") + "\r\n")
    assert of.preflight() == []
    assert len(read_all(of)) == 10
    kept.unlink()
    with pytest.raises(UsageError, match=r"SECRET_MISSING"):
        read_all(of)


def _everything(guarded: Pulsar, folder: Path, options: dict[str, str], topic: str) -> list[Any]:
    """Use the HTTP service and the binary protocol."""
    full = f"persistent://public/default/{topic}"
    binary = {**options, "adminUrl": f"http://{guarded.broker.listeners['HTTP']}"}
    return [
        lambda: source(options, topic).driver().batch(),
        lambda: written(sink(folder, options, topic, schema="avro"), pa.record_batch([[{"id": 1}]], names=["value"])),
        lambda: check_connection(parse({**options, "topics": topic}), full),
        lambda: Publisher(parse_sink({**options, "topic": topic, "ledger": "/x"})),
        lambda: written(sink(folder, binary, topic), rows(1)),
    ]


def test_a_certificate_nobody_vouches_for(guarded: Pulsar, tmp_path: Path) -> None:
    topic = guarded.topic()
    (tmp_path / "other").mkdir()
    make_certificate(java_home(), tmp_path / "other")
    for trusted, named in ((None, "the system's trust store"), (str(tmp_path / "other" / "ca.pem"), "other/ca.pem")):
        options = place(guarded, "both", tlsTrustCertsFile=trusted)
        started = time.monotonic()
        for act in _everything(guarded, tmp_path, options, topic):
            with pytest.raises(UsageError, match="CERTIFICATE_REFUSED") as caught:
                act()
            assert named in caught.value.message
            assert "self-signed certificate" in caught.value.message
            assert "tlsTrustCertsFile" in (caught.value.next_step or "")
            assert "openssl s_client -showcerts -connect 127.0.0.1:" in (caught.value.next_step or "")
        assert time.monotonic() - started < 30
        refused(source(options, topic).preflight(), "CERTIFICATE_REFUSED")
        refused(sink(tmp_path, options, topic).preflight(Guarantee.AT_LEAST_ONCE), "CERTIFICATE_REFUSED")
    assert count(guarded, topic) == 0


MISNAMED = "0x7f.1"
"""Another way to write 127.0.0.1, which the system's resolver knows."""


def _misnamed(guarded: Pulsar) -> dict[str, str]:
    """The server under a name that resolves to it but is not in its certificate."""
    at = {k: v.replace("127.0.0.1", MISNAMED) for k, v in guarded.broker.listeners.items()}
    return place(guarded, "both", url=f"pulsar+ssl://{at['PULSAR_SSL']}", adminUrl=f"https://{at['HTTPS']}")


def test_a_certificate_for_another_name(guarded: Pulsar, tmp_path: Path) -> None:
    topic = guarded.topic()
    for act in _everything(guarded, tmp_path, _misnamed(guarded), topic):
        with pytest.raises(
            UsageError, match=r"CERTIFICATE_REFUSED.*'0x7f\.1'.*in url and adminUrl, use the host names"
        ):
            act()
    assert count(guarded, topic) == 0


@pytest.mark.parametrize("name", ["untrusted", "misnamed"])
def test_the_client_library_checks_certificates_itself(
    guarded: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The check before connecting only improves messages; a certificate can change afterwards."""
    topic = guarded.topic()
    monkeypatch.setattr(client, "tls_error", lambda _: None)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(client, "_warm", {})
    options = place(guarded, "both", tlsTrustCertsFile=None) if name == "untrusted" else _misnamed(guarded)
    options["adminUrl"] = guarded.options["adminUrl"]
    with pytest.raises(Unreachable, match="PULSAR_UNREACHABLE"):
        check_connection(parse({**options, "topics": topic}), f"persistent://public/default/{topic}")


def test_files_of_certificates_that_cannot_be_used(guarded: Pulsar, tmp_path: Path) -> None:
    topic, empty = guarded.topic(), tmp_path / "empty.pem"
    empty.write_text("nothing")
    for file, said in ((str(empty), "no PEM certificate"), ("/no/such.pem", "no such file")):
        options = place(guarded, "both", tlsTrustCertsFile=file)
        for findings in (
            source(options, topic).preflight(),
            sink(tmp_path, options, topic).preflight(Guarantee.AT_LEAST_ONCE),
        ):
            assert said in refused(findings, "TLS_FILES")
        for act in _everything(guarded, tmp_path, options, topic):
            with pytest.raises(UsageError, match="TLS_FILES"):
                act()
    with pytest.raises(UsageError, match=r"OPTION_CONFLICT.*tlsTrustCertsFile.*uses TLS"):
        parse({**guarded.options, "topics": "t", "tlsTrustCertsFile": str(empty)})


def test_no_word_of_the_token_anywhere(
    guarded: Pulsar,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 1.0)
    topic = guarded.topic()
    clear = {
        "forged": server.make_token(bytes(32), "clear"),
        "expired": server.make_token(SECRET, "clear", 1),
        "broken": server.make_token(SECRET, "both") + "\n X-Header: x",
        "foreign": server.make_token(SECRET, "both") + "\u2026",
    }
    shown: list[str] = []
    for name, token in clear.items():
        monkeypatch.setenv("TOKEN_BY_NAME", token)
        for given in (token, "env:TOKEN_BY_NAME"):
            options = place(guarded, token=given)
            of, into = source(options, topic), sink(tmp_path, options, topic)
            shown += [repr(of), repr(into), repr(of.capability()), repr(into.capability()), repr(of.options)]
            shown += [str(f) for f in (*of.preflight(), *into.preflight(Guarantee.AT_LEAST_ONCE))]
            # The client library retries for a second each time.
            acts = _everything(guarded, tmp_path, options, topic)
            for act in acts if (name, given) == ("forged", token) else acts[:2]:
                with pytest.raises(DeliveredError) as caught:
                    act()
                shown.append("".join(map(str, _chain(caught.value))))
                assert pickle.loads(pickle.dumps(caught.value)).code == caught.value.code
            if given != token:
                shown.append(repr(pickle.dumps(of)))
        if name in ("broken", "foreign"):
            assert any("OPTION_VALUE" in text and "some of which are invalid in a token" in text for text in shown)
    out = capfd.readouterr()
    shown += [caplog.text, out.out, out.err]
    for token in [*clear.values(), *(server.make_token(SECRET, role) for role in ROLES)]:
        for part in token.replace("\n", " ").split()[0].split("."):
            if len(part) > 20 and part != token.split(".")[0]:
                assert not any(part in text for text in shown)


def _chain(error: BaseException | None) -> Iterator[str]:
    """The text of a full traceback."""
    while error is not None:
        yield f"{type(error).__name__} {error} {error.args}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_a_redirection_out_of_tls_is_not_followed(guarded: Pulsar) -> None:
    """The token would be sent without TLS."""
    admin = Admin(parse({**place(guarded, "both"), "topics": "t"}))
    with pytest.raises(UsageError, match=r"REDIRECT_WITHOUT_TLS.*http://elsewhere:80.*webServicePortTls"):
        admin._followed("https://here/x", "http://elsewhere:80/x")
    assert admin._followed("https://here/x", "https://elsewhere/x") == "https://elsewhere/x"
    assert admin._followed("http://here/x", "https://elsewhere/x") == "https://elsewhere/x"


@pytest.mark.matrix  # test_pulsar_source.py has a broker that is not there
def test_a_server_that_is_down_is_unreachable_and_no_question_of_certificates(guarded: Pulsar) -> None:
    options = place(guarded, "both", url="pulsar+ssl://127.0.0.1:1,127.0.0.1:2", adminUrl="https://127.0.0.1:1")
    assert client.tls_error(parse({**options, "topics": "t"})) is None
    refused(source(options, "t").preflight(), "PULSAR_UNREACHABLE")
