"""An object store or a catalog that does not answer is an outage, which ends: it is waited for, and exits with 3."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator

import psycopg
import pymysql
import pytest
import requests
from sqlalchemy.exc import InterfaceError, OperationalError

from delivered import DeliveredError, Guarantee
from delivered.connectors import delta, iceberg, log
from delivered.connectors.iceberg import client
from delivered.kits.table.store import find_outage, storage_options
from delivered.model import patience
from delivered.model.patience import asking_once, within

S3 = {
    "storage.aws_region": "eu-central-1",
    "storage.aws_access_key_id": "key",
    "storage.aws_secret_access_key": "secret",
    "storage.aws_allow_http": "true",
}


@pytest.fixture(params=["closed", "silent"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a port that refuses connections, or accepts them and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "silent":
            listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("system", ["delta", "log", "iceberg"])
def test_a_plan_reports_an_outage(system: str, address: str) -> None:
    """By itself, the client of a silent store asks for three minutes, and that of a catalog waits for ever."""
    store = {**S3, "storage.aws_endpoint": address}
    with asking_once(1.0):
        match system:
            case "delta":
                found = delta.CONNECTOR.sink({"path": "s3://lake/orders", **store}).preflight(Guarantee.EXACTLY_ONCE)
            case "log":
                found = log.CONNECTOR.source({"path": "s3://lake/log", **store}).preflight()
            case _:
                options = {"table": "shop.orders", "catalog.type": "rest", "catalog.uri": address}
                found = iceberg.CONNECTOR.sink(options).preflight(Guarantee.EXACTLY_ONCE)
    [outage] = found
    assert (outage.code, outage.refuses, outage.transient) == ("STORAGE_UNREACHABLE", True, True)


@pytest.mark.parametrize(
    "text",
    [
        "When resolving region for bucket 'lake': AWS Error NETWORK_CONNECTION during HeadBucket: curlCode: 6",
        "Generic S3 error: HTTP error: error sending request: client error (Connect): dns error: failed to lookup",
        "Server returned non-2xx status code: 503 Service Unavailable: SlowDown",
        "[Errno 110] Connection timed out",
        "[Errno 113] No route to host",
    ],
)
def test_texts_of_clients(text: str) -> None:
    found = find_outage("the table 's3://lake/orders'", OSError(text))
    assert found is not None
    assert (found.code, found.exit_code, found.may_come_back) == ("DELIVERED_STORAGE_UNREACHABLE", 3, True)
    assert isinstance(found, DeliveredError)


@pytest.mark.parametrize(
    "text",
    [
        "Generic S3 error: PUT http://169.254.169.254/latest/api/token: error sending request: operation timed out",
        "Generic GCS error: Error performing token request: error sending request",
        "Server returned non-2xx status code: 403 Forbidden: SignatureDoesNotMatch",
        "Server returned non-2xx status code: 404 Not Found: NoSuchBucket",
        "No such file or directory",
    ],
)
def test_what_does_not_end_by_itself(text: str) -> None:
    assert find_outage("the table 's3://lake/orders'", OSError(text)) is None


def of_database(kind: type[Exception], driver: type[Exception], *args: object) -> Exception:
    """As SQLAlchemy raises an error of a catalog's database."""
    return kind("SELECT 1", {}, driver(*args))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "error",
    [
        of_database(OperationalError, psycopg.OperationalError, "server closed the connection unexpectedly"),
        of_database(OperationalError, psycopg.errors.CannotConnectNow, "the database system is starting up"),
        of_database(OperationalError, pymysql.OperationalError, 2003, "Can't connect to MySQL server on 'db'"),
        of_database(InterfaceError, pymysql.InterfaceError, 0, ""),
        requests.ConnectionError("('Connection aborted.', RemoteDisconnected())"),
        requests.ConnectionError(),
        requests.ReadTimeout(),
        BrokenPipeError(32, "Broken pipe"),
    ],
    ids=str,
)
def test_errors_of_a_catalog_that_is_away(error: Exception) -> None:
    assert find_outage("the table 'shop.orders'", error) is not None


@pytest.mark.parametrize(
    "error",
    [
        of_database(OperationalError, psycopg.OperationalError, 'FATAL: password authentication failed for user "u"'),
        of_database(
            OperationalError, psycopg.OperationalError, 'connection failed: FATAL: database "lake" does not exist'
        ),
        of_database(OperationalError, pymysql.OperationalError, 1045, "Access denied for user 'u'@'host'"),
        of_database(OperationalError, sqlite3.OperationalError, "unable to open database file"),
        requests.exceptions.SSLError("certificate verify failed: self-signed certificate"),
    ],
    ids=str,
)
def test_errors_of_a_catalog_that_waiting_does_not_mend(error: Exception) -> None:
    assert find_outage("the table 'shop.orders'", error) is None


def test_a_running_query_waits_for_a_catalogs_database(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [of_database(OperationalError, psycopg.errors.AdminShutdown, "terminating connection"), "the table"]

    class Catalog:
        def load_table(self, name: object) -> object:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(client, "catalog", lambda _: Catalog())
    monkeypatch.setattr(patience, "_in_query", True)
    catalog = {"catalog.type": "sql", "catalog.uri": "postgresql+psycopg://db/lake"}
    assert client.open_table(iceberg.IcebergOptions.parse({"table": "shop.orders", **catalog})) == "the table"


def test_what_the_user_says_of_requests_stands() -> None:
    given = {"timeout": "90s", "aws_region": "eu-central-1"}
    with within(10.0):
        assert storage_options("s3://lake/orders", given) == {**given, "retry_timeout": "10s"}
        assert storage_options("/data/orders", {}) is None
