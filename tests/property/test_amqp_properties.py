"""Properties of RabbitMQ messages: any bytes are decoded or refused in one way, and what was sent is what is kept."""

from __future__ import annotations

import json
import math
import struct
from ast import literal_eval
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.amqp import Encoded, nested, table, text

from delivered.connectors.rabbitmq.client import UNREADABLE, Properties, headers
from delivered.source import header_name, id_bytes, id_text

short = st.binary(max_size=255)
SHORT = ("content_type", "correlation_id", "reply_to", "message_id", "type", "app_id", "user_id", "expiration")


def decoded(properties: Encoded) -> Properties:
    return Properties(b"".join(properties.encode()))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes_are_properties_or_a_struct_error(encoded: bytes, raw: bytes) -> None:
    try:
        found = Properties(encoded)
    except struct.error:
        pass
    else:
        headers(found)
    sent = {"headers": struct.pack(">I", len(raw)) + raw}
    kept = headers(decoded(Encoded(**sent)))
    assert all(isinstance(n, str) and (v is None or isinstance(v, bytes)) for n, v in kept)
    json.dumps([n for n, _ in kept]).encode()


@given(st.dictionaries(st.sampled_from(SHORT), short), st.integers(0, 2**64 - 1))
def test_properties_are_those_that_were_sent(given_: dict[str, bytes], sent: int) -> None:
    found = decoded(Encoded(**given_, timestamp=sent))
    for name in SHORT[:6]:
        assert getattr(found, name) == given_.get(name)
    assert found.timestamp == sent
    if (message_id := id_text(found.message_id)) is not None:
        assert id_bytes(message_id) == given_["message_id"]


@given(st.lists(st.tuples(short, st.binary(max_size=50)), max_size=5))
def test_headers_keep_names_values_and_order(pairs: list[tuple[bytes, bytes]]) -> None:
    found = headers(decoded(Encoded(headers=table([(n, text(v)) for n, v in pairs]))))
    assert found == [(header_name(n), v) for n, v in pairs]


@given(st.binary() | st.text().map(str.encode) | st.binary().map(repr).map(str.encode))
def test_a_name_tells_its_bytes(name: bytes) -> None:
    shown = header_name(name)
    assert (literal_eval(shown) if shown.startswith(("b'", 'b"')) else shown.encode()) == name


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        (b"d" + struct.pack(">d", 2.5), b"2.5"),
        (b"d" + struct.pack(">d", math.nan), b'"nan"'),
        (b"f" + struct.pack(">f", math.inf), b'"inf"'),
        (b"l" + struct.pack(">q", -(2**63)), b"-9223372036854775808"),
        (b"i" + struct.pack(">I", 2**32 - 1), b"4294967295"),
        (b"T" + struct.pack(">Q", 2**64 - 1), b"18446744073709551615"),
        (b"T" + struct.pack(">Q", 0), b'"1970-01-01 00:00:00+00:00"'),
        (b"D" + struct.pack(">Bi", 2, -150), b'"-1.50"'),
        (b"t\x01", b"true"),
        (b"V", None),
        (nested(b"d" + struct.pack(">d", -math.inf), 1), b'{"t": "-inf"}'),
        (nested(text(b"x"), 2_000), nested(text(b"x"), 2_000)[5:]),
    ],
)
def test_a_value_keeps_what_was_sent(field: bytes, shown: bytes | None) -> None:
    assert headers(decoded(Encoded(headers=table([(b"n", field)])))) == [("n", shown)]


@pytest.mark.parametrize("field", [b"Z", b"d\0", b"S\xff\xff\xff\xffx", b""])
def test_a_table_that_is_none_is_kept_as_it_was_sent(field: Any) -> None:
    raw = b"\x01n" + field
    assert headers(decoded(Encoded(headers=struct.pack(">I", len(raw)) + raw))) == [(UNREADABLE, raw)]
