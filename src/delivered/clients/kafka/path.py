"""By which client records travel: Arrow, unless a setting, a mechanism or the platform needs librdkafka."""

from __future__ import annotations

from collections.abc import Mapping, Set

from delivered.clients.kafka import logins, record_batch
from delivered.clients.kafka.librdkafka import check_settings, lacks_login
from delivered.model.errors import UsageError

_SETTINGS = logins.SETTINGS | {"bootstrap.servers", "client.id"}
SINK_SETTINGS = _SETTINGS | {
    "acks",
    "message.max.bytes",
    "message.timeout.ms",
    "compression.type",
    "compression.codec",
    "linger.ms",
}
SOURCE_SETTINGS = _SETTINGS | {
    "isolation.level",
    "group.id",
    "max.partition.fetch.bytes",
    "fetch.max.bytes",
    "fetch.wait.max.ms",
}


def by_arrow(owner: str, through: str, client: Mapping[str, str], known: Set[str]) -> bool:
    """Whether the option `client` (`through`) selects arrow. Raises UsageError: it is arrow, which lacks something."""
    missing = "client is librdkafka" if through == "librdkafka" else lacks(client, known)
    if missing is not None and through == "arrow":
        check_settings(owner, client)  # one that nobody knows
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: option 'client' is arrow, but {missing}.",
            next_step="write client=auto or client=librdkafka",
        )
    if missing is not None and (login := lacks_login(client)) is not None:
        raise UsageError(
            "OPTION_CONFLICT",
            f"{owner}: {missing}, and librdkafka does not have {login}.",
            next_step="remove what needs librdkafka, or log in by other means: OAUTHBEARER, SCRAM-SHA-512",
        )
    return missing is None


def path(through: str, client: Mapping[str, str], known: Set[str], arrow: str) -> str:
    """By which client records travel, and why, for the plan. `arrow`: what it says of Arrow."""
    missing = lacks(client, known) if through != "librdkafka" else "client=librdkafka"
    return arrow if missing is None else f"librdkafka, because {missing}"


def lacks(client: Mapping[str, str], known: Set[str]) -> str | None:
    """Why only librdkafka can be used with these settings; None: nothing is missing."""
    if not record_batch.available():
        return "the package was built without a C compiler"
    if unknown := sorted(set(client) - known):
        return f"kafka.{unknown[0]} is a setting of librdkafka"
    return None
