"""What `run` needs to know of each kind of server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivered.brokers import activemq, kafka, mysql, postgres, pulsar, rabbitmq, rocketmq
from delivered.brokers.fetch import Say
from delivered.brokers.java import java_home
from delivered.brokers.process import State


@dataclass(frozen=True)
class Server:
    """
    Attributes:
        listeners: settings -> names of its listeners, one port each.
        main: the listener without TLS and passwords.
        fetch: puts what it is made of into the cache; None: it comes with the package or the system.
        hidden: listeners that are not for clients.
        prepare: writes configuration and storage, unless they are there; returns the command to run.
        answers: whether the server takes requests.
        url: address -> what clients are given.
        takes: which of tls and scram it can have.
        stop: signal that asks it to end, whoever is connected.
        pipeline: as a source or sink of a pipeline file: `{url}` for the address, `{HTTP}` for that of a listener.
        first_steps: what somebody who has just started it runs next, `{url}` likewise.
    """

    listeners: Callable[[Mapping[str, Any]], list[str]]
    main: str
    fetch: Callable[[Say], object] | None
    prepare: Callable[[Path, State, Say], list[str]]
    answers: Callable[[State], bool]
    url: Callable[[str], str]
    hidden: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    stop: signal.Signals = signal.SIGTERM
    pipeline: str = ""
    first_steps: tuple[tuple[str, str], ...] = ()


def _java() -> Path:
    return java_home() / "bin" / "java"


def _activemq(folder: Path, state: State, say: Say) -> list[str]:
    return activemq.prepare(folder, state.listeners, state.settings["properties"], state.settings["heap_mb"], say)


def _kafka(folder: Path, state: State, say: Say) -> list[str]:
    home, settings = java_home(), state.settings
    kafka.prepare(home, folder, state.listeners, settings["scram"], settings["properties"], say)
    return kafka.command(home, folder, settings["heap_mb"], say)


def _mysql(folder: Path, state: State, say: Say) -> list[str]:
    return mysql.prepare(folder, state.listeners[mysql.MYSQL], state.settings["properties"], say)


def _postgres(folder: Path, state: State, say: Say) -> list[str]:
    say("preparing PostgreSQL")
    postgres.prepare(folder, state.listeners[postgres.POSTGRESQL], state.settings["properties"])
    return postgres.command(folder, state.settings["dies_with_parent"])


def _pulsar(folder: Path, state: State, say: Say) -> list[str]:
    settings = state.settings
    return pulsar.prepare(java_home(), folder, state.listeners, settings["heap_mb"], settings["properties"], say)


def _rabbitmq(folder: Path, state: State, say: Say) -> list[str]:
    return rabbitmq.prepare(folder, state.listeners, state.settings["properties"], say)


def _rocketmq(folder: Path, state: State, say: Say) -> list[str]:
    return rocketmq.prepare(folder, state.listeners, state.settings["properties"], state.settings["heap_mb"], say)


SERVERS: Mapping[str, Server] = {
    "activemq": Server(
        listeners=lambda _: [activemq.STOMP],
        main=activemq.STOMP,
        fetch=lambda say: activemq.fetch(_java(), say),
        prepare=_activemq,
        answers=lambda state: activemq.answers(state.listeners[activemq.STOMP]),
        url=activemq.url,
        pipeline='{{format: activemq, url: "{url}", queue: orders, log: orders-log}}',
    ),
    "kafka": Server(
        listeners=lambda settings: kafka.listeners_wanted(settings["tls"], bool(settings["scram"])),
        main=kafka.PLAINTEXT,
        hidden=frozenset({kafka.CONTROLLER}),
        fetch=lambda say: kafka.fetch(_java(), say),
        prepare=_kafka,
        answers=lambda state: kafka.answers(state.listeners[kafka.PLAINTEXT]),
        url=str,
        takes=frozenset({"tls", "scram"}),
        pipeline='{{format: kafka, kafka.bootstrap.servers: "{url}", subscribe: orders}}',
        first_steps=(
            ("topics", "delivered brokers topic orders orders-clean"),
            ("records", "delivered brokers produce orders --records 1000"),
            ("look", "delivered brokers read orders"),
        ),
    ),
    "mysql": Server(
        listeners=lambda _: [mysql.MYSQL],
        main=mysql.MYSQL,
        fetch=mysql.fetch,
        prepare=_mysql,
        answers=lambda state: mysql.answers(state.listeners[mysql.MYSQL]),
        url=mysql.url,
        pipeline='{{format: mysql, url: "{url}", dbtable: orders, ifNotExists: true}}',
    ),
    "postgres": Server(
        listeners=lambda _: [postgres.POSTGRESQL],
        main=postgres.POSTGRESQL,
        fetch=None,
        prepare=_postgres,
        answers=lambda state: postgres.answers(state.listeners[postgres.POSTGRESQL]),
        url=postgres.url,
        stop=signal.SIGINT,  # SIGTERM would wait until every client has gone
        pipeline='{{format: postgres, url: "{url}", dbtable: orders, ifNotExists: true}}',
        first_steps=(("look", 'psql "{url}"'),),
    ),
    "pulsar": Server(
        listeners=lambda settings: pulsar.listeners_wanted(settings["tls"]),
        main=pulsar.PULSAR,
        fetch=lambda say: pulsar.fetch(_java(), say),
        prepare=_pulsar,
        answers=lambda state: pulsar.answers(state.listeners[pulsar.HTTP], state.settings["properties"]),
        url=pulsar.url,
        takes=frozenset({"tls"}),
        pipeline='{{format: pulsar, url: "{url}", adminUrl: "http://{HTTP}", topics: orders}}',
    ),
    "rabbitmq": Server(
        listeners=lambda _: [rabbitmq.AMQP, rabbitmq.EPMD, rabbitmq.ERLANG],
        main=rabbitmq.AMQP,
        hidden=frozenset({rabbitmq.EPMD, rabbitmq.ERLANG}),
        fetch=rabbitmq.fetch,
        prepare=_rabbitmq,
        answers=lambda state: rabbitmq.answers(state.listeners[rabbitmq.AMQP]),
        url=rabbitmq.url,
        pipeline='{{format: rabbitmq, url: "{url}", queue: orders, log: orders-log}}',
    ),
    "rocketmq": Server(
        listeners=lambda _: [rocketmq.GRPC, rocketmq.NAMESRV, rocketmq.BROKER],
        main=rocketmq.GRPC,
        fetch=lambda say: rocketmq.fetch(_java(), say),
        prepare=_rocketmq,
        answers=lambda state: rocketmq.answers(state.listeners),
        url=rocketmq.url,
        pipeline='{{format: rocketmq, endpoints: "{url}", topic: orders, group: orders, log: orders-log}}',
    ),
}
