"""An object store or a catalog that does not answer is an outage, which ends: it is waited for, and exits with 3."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from delivered import DeliveredError, Guarantee
from delivered.connectors import delta, iceberg, log
from delivered.kits.table.store import client_options, find_outage
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


def test_what_the_user_says_of_requests_stands() -> None:
    given = {"timeout": "90s", "aws_region": "eu-central-1"}
    with within(10.0):
        assert client_options("s3://lake/orders", given) == {**given, "retry_timeout": "10s"}
        assert client_options("/data/orders", {}) is None
