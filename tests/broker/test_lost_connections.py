"""A preflight whose connection is lost, at any piece in either direction: the server did not answer, and no more is
known. A start waits for it, instead of blaming a password or a right."""

from __future__ import annotations

from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from delivered.model.capability import Guarantee
from delivered.pipeline.registry import find_sink, find_source
from delivered_lab.verify.proxy import ANSWERED, ASKED, Fired, NetworkFault, Rule, StreamProxy

LOST = {ASKED: NetworkFault.LOSE_REQUEST, ANSWERED: NetworkFault.LOSE_REPLY}


def endpoint(system: str, server: Any, folder: Path) -> tuple[Any, dict[str, str]]:
    """How to find it, and its options."""
    ledger = str(folder / "ledger.db")
    match system:
        case "rabbitmq":
            return find_sink, {"routingKey": server.queue(), "ledger": ledger}
        case "rabbitmq_stream":
            return find_source, {"streams": server.queue("stream")}
        case "activemq":
            return find_sink, {"queue": "lost-connections", "ledger": ledger}
        case _:
            return find_sink, {"dbtable": server.table(None), "ifNotExists": "true"}


@pytest.mark.parametrize("way", LOST)
@pytest.mark.parametrize(
    ("system", "fixture"),
    [
        ("rabbitmq", "rabbitmq"),
        ("rabbitmq_stream", "rabbitmq"),
        ("activemq", "activemq"),
        ("postgres", "postgres"),
        ("mysql", "mysql"),
    ],
)
def test_the_server_did_not_answer(
    system: str, fixture: str, way: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(fixture)
    find, options = endpoint(system, server, tmp_path)
    found = []
    for nth in count():
        fired: list[Fired] = []
        with closing(StreamProxy(server.broker.bootstrap, fired.append)) as proxy:
            proxy.add(Rule(way, LOST[way], skip=nth))
            url = server.url.replace(server.broker.bootstrap, proxy.bootstrap)
            found_endpoint = find(system, {"url": url, **options})
            asked = (Guarantee.AT_LEAST_ONCE,) if find is find_sink else ()
            findings = found_endpoint.preflight(*asked)
        found += [(nth, f.code, f.message) for f in findings if f.refuses and not f.transient]
        if not fired:
            break
    assert nth >= 3, "the connection was lost at several places"
    assert found == []
