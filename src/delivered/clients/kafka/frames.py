"""Parts of Kafka's frames that are read by hand."""

from __future__ import annotations


def header_bytes(frame: memoryview, flexible: bool) -> int:
    """Length of a response's header: the correlation id and, if flexible, tagged fields."""
    at = 4
    if flexible:
        count, at = varint(frame, at)
        for _ in range(count):
            _, at = varint(frame, at)
            size, at = varint(frame, at)
            at += size
    if at > len(frame):
        raise ValueError(f"a header of {at} bytes in {len(frame)}")
    return at


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of 32 bits, and where it ends. Raises IndexError, ValueError."""
    value = 0
    for place in range(5):
        value |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128 and value < 1 << 32:
            return value, at + place + 1
    raise ValueError("a number of more than 32 bits")
