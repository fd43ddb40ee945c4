"""Whether librdkafka takes the user's settings: asked on the driver, before anything runs. Connects to nobody."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from delivered.connectors.kafka.client_errors import config_error

_OK = 0
_NOT_LIBRDKAFKAS = frozenset({"sasl.jaas.config"})
"""Taken apart by `client_options.resolved`."""


def check_settings(owner: str, client: Mapping[str, str]) -> None:
    """Raise UsageError if librdkafka knows no such setting, or not this value.

    Args:
        client: as `client_options` gives them. Secrets are not followed: where they are used is another machine.
    """
    from delivered.connectors.kafka.librdkafka import consumer_library

    lib: Any = consumer_library()
    if lib is None:
        return  # a client that is made later says so
    conf, said = lib.rd_kafka_conf_new(), ctypes.create_string_buffer(512)
    try:
        for name, value in client.items():
            if name in _NOT_LIBRDKAFKAS or value.startswith(("env:", "file:")):
                continue
            if lib.rd_kafka_conf_set(conf, name.encode(), value.encode(), said, len(said)) != _OK:
                raise config_error(said.value.decode(errors="replace"), owner, name)
    finally:
        lib.rd_kafka_conf_destroy(conf)
