"""Connection parameters for RabbitMQ, without a server."""

from __future__ import annotations

import pytest

from delivered.connectors.rabbitmq import RabbitmqOptions
from delivered.connectors.rabbitmq.client import parameters

parse = RabbitmqOptions.parse


@pytest.mark.parametrize(
    ("url", "password", "user", "taken"),
    [
        ("amqp://app@h:5672/shop", "hidden", "app", "hidden"),
        ("amqp://app@h:5672/shop", None, "app", ""),
        ("amqp://a%40b@h:5672/shop", "p/w", "a@b", "p/w"),
        ("amqp://h:5672/shop", "hidden", "guest", "hidden"),
        ("amqp://h:5672/shop", None, "guest", "guest"),
    ],
)
def test_the_user_of_the_url_goes_with_the_option_password(
    monkeypatch: pytest.MonkeyPatch, url: str, password: str | None, user: str, taken: str
) -> None:
    monkeypatch.setenv("RABBIT", password or "")
    given = {"password": "env:RABBIT"} if password is not None else {}
    made = parameters(parse({"url": url, "queue": "q", "log": "/x", **given}))
    assert (made.host, made.port, made.virtual_host) == ("h", 5672, "shop")
    assert (made.credentials.username, made.credentials.password) == (user, taken)
