"""The brokers of a cluster: which one serves a topic, and a connection to it."""

from __future__ import annotations

import threading
import time
from urllib.parse import urlsplit

from delivered.clients.pulsar.commands import REDIRECT, NoAnswer, NotSent
from delivered.clients.pulsar.connection import Connection, Settings
from delivered.model.limits import CONNECT_TIMEOUT_S

_REDIRECTS_MAX = 20
_Place = tuple[tuple[str, int], str]
"""Address to connect to, and the broker behind it if that is a proxy's."""


class Cluster:
    """Connections of one process, each to one broker, shared by all of its threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._open: dict[_Place, Connection] = {}
        self._places: dict[str, _Place] = {}

    def partitions(self, topic: str, deadline: float) -> int:
        """Number of partitions; 0: the topic has none, or does not exist yet. Creates nothing.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        asked = self._service(deadline).ask("partitions", deadline, topic=topic, metadata_auto_creation_enabled=False)
        return int(asked.partitions)

    def serving(self, topic: str, deadline: float, *, again: bool = False) -> Connection:
        """A connection to the broker that serves a topic, of one partition.

        Args:
            again: what is known of it may be outdated.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        with self._lock:
            place = None if again else self._places.get(topic)
            known = None if place is None else self._open.get(place)
        if known is not None and known.usable:
            return known
        place = self._look_up(topic, deadline)
        with self._lock:
            self._places[topic] = place
        return self._connection(place, deadline)

    def close(self) -> None:
        with self._lock:
            connections, self._open, self._places = [*self._open.values()], {}, {}
        for connection in connections:
            connection.close()

    def _look_up(self, topic: str, deadline: float) -> _Place:
        connection, authoritative = self._service(deadline), False
        for _ in range(_REDIRECTS_MAX):
            answer = connection.ask("lookup", deadline, topic=topic, authoritative=authoritative)
            broker = _address(answer.url if self._settings.tls is None else answer.url_tls, connection.name)
            service = self._settings.addresses[0]
            place = (service, f"{broker[0]}:{broker[1]}") if answer.proxy_through_service_url else (broker, "")
            if answer.response != REDIRECT:
                return place
            connection, authoritative = self._connection(place, deadline), answer.authoritative
        raise NoAnswer(f"{_REDIRECTS_MAX} redirects for {topic}")

    def _service(self, deadline: float) -> Connection:
        errors = []
        for address in self._settings.addresses:
            try:
                return self._connection((address, ""), deadline)
            except NotSent as error:
                errors.append(str(error))
        raise NotSent("; ".join(errors))

    def _connection(self, place: _Place, deadline: float) -> Connection:
        with self._lock:
            known = self._open.get(place)
            if known is not None and known.usable:
                return known
        timeout_s = max(0.1, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
        made = Connection(place[0], self._settings, timeout_s, place[1])
        with self._lock:
            other = self._open.get(place)
            if other is None or not other.usable:
                self._open[place] = made
                return made
        made.close()  # another thread was faster
        return other


def _address(url: str, broker: str) -> tuple[str, int]:
    """Raises NoAnswer: the broker named no address."""
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise NoAnswer(f"{broker} names {url[:100]!r} as a broker")
