"""Rare error responses of Pulsar's HTTP service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from delivered.connectors.pulsar import Position, PulsarSinkOptions, SourceOptions
from delivered.connectors.pulsar import client as admin
from delivered.connectors.pulsar.committer import check_transactions
from delivered.model.capability import Guarantee
from delivered.model.errors import Unreachable

parse = SourceOptions.parse

TOPIC = "persistent://public/default/orders-partition-1"
FULL = {
    "reason": "Unable to find position for position specified: unable to persist readPosition for cursor reset 38:-1"
}
"""Pulsar 4.0.4's response with status 412 in a verifier run on a busy machine."""


class Service:
    """Returns canned responses and records requests."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.version = b"4.0.4"
        self.headers: dict[str, str] = {}
        self.aborted: dict[str, bool] = {}
        self.asked: list[tuple[str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length))
                service.asked.append((self.command, f"{body['ledgerId']}:{body['entryId']}"))
                code = service.answers.pop(0)
                said = json.dumps(FULL).encode() if code == 412 else b""
                self.send_response(code)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_PUT = do_POST = _answer  # noqa: N815 - so the library looks for them

            def do_GET(self) -> None:
                of_transaction = self.path.removeprefix("/admin/v3/transactions/transactionInBufferStats/")
                known = service.aborted.get(of_transaction)
                said = service.version if known is None else json.dumps({"aborted": known}).encode()
                self.send_response(404 if of_transaction != self.path and known is None else 200)
                for name, value in {**service.headers, "Content-Length": str(len(said))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: object) -> None:
                """No log output in tests."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def admin(self, patient: bool = True) -> admin.Admin:
        return admin.Admin(parse({**self.address, "topics": "orders"}), patient)

    @property
    def address(self) -> dict[str, str]:
        at = f"127.0.0.1:{self.server.server_port}"
        return {"url": f"pulsar://{at}", "adminUrl": f"http://{at}"}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_a_subscription_that_was_made_and_could_not_be_placed_is_placed(service: Service) -> None:
    """Creating it again would fail: it exists, at the topic's end, where it retains nothing."""
    service.answers = [412, 412, 204]
    service.admin().move(TOPIC, "pipeline", Position(38, -1), exists=False)
    assert service.asked == [("PUT", "38:-1"), ("POST", "38:-1"), ("POST", "38:-1")]


def test_a_place_that_is_never_stored_is_an_error_that_says_so(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "SOURCE_PATIENCE_S", 0.5)
    service.answers = [412] * 100
    with pytest.raises(Unreachable, match=r"could not store a subscription's cursor.*unable to persist"):
        service.admin().move(TOPIC, "pipeline", Position(38, -1), exists=False)
    assert [method for method, _ in service.asked[:2]] == ["PUT", "POST"]


def test_one_that_is_made_at_once_is_not_moved(service: Service) -> None:
    service.answers = [204]
    service.admin().move(TOPIC, "pipeline", Position(38, 4), exists=False)
    assert service.asked == [("PUT", "38:4")]


@pytest.mark.parametrize("version", ["2.9.5", "2.8.0", "1.22.1-incubating"])
def test_brokers_that_are_too_old_for_transactions_are_refused(service: Service, version: str) -> None:
    service.version = version.encode()
    options = PulsarSinkOptions.parse({**service.address, "topic": "orders"})
    (finding,) = check_transactions(options, service.admin())
    assert (finding.code, finding.refuses, finding.only) == ("PULSAR_TOO_OLD", True, Guarantee.EXACTLY_ONCE)
    assert version[:3] in finding.message


@pytest.mark.parametrize("stated", [None, "true", "false"])
@pytest.mark.parametrize("known", [None, True, False])
def test_brokers_of_2_10_are_asked_for_an_aborted_transaction(
    service: Service, stated: str | None, known: bool | None
) -> None:
    """Later ones say it with the entry. What nobody knows is not taken for aborted."""
    service.headers = {"X-Pulsar-txnid-most-bits": "3", "X-Pulsar-txnid-least-bits": "17"}
    if stated is not None:
        service.headers["X-Pulsar-txn-aborted"] = stated
    if known is not None:
        service.aborted["public/default/orders-partition-1/3/17"] = known
    entry = service.admin().entry(TOPIC, 1, 2)
    assert entry is not None
    assert entry.hidden == (bool(known) if stated is None else stated == "true")
