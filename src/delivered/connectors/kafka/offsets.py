"""Offsets, in the format of Spark's Kafka source and of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delivered.clients.kafka.record_batch import Partition
from delivered.contract.source import Offsets
from delivered.model.errors import InvariantBroken, UsageError

EARLIEST, LATEST = -2, -1
"""Placeholders for an offset in the options' JSON."""

_IDS = "#topic ids"
_FIRST = "#first"
_FROM = "#from"
_EPOCHS = "#epochs"
# No topic can have these names: Kafka does not allow "#".
METADATA = frozenset({_IDS, _FIRST, _FROM, _EPOCHS})
"""Keys that Spark's own connector does not know."""
LASTING = frozenset({_IDS, _FIRST, _EPOCHS})
"""Those that also apply to later offsets."""


@dataclass(frozen=True)
class Positions:
    """A stream's position.

    Attributes:
        at: partition -> next offset.
        ids: topic -> its Kafka topic id, which changes when the topic is deleted and recreated.
        first: partition -> first offset, if it was added after the stream started.
        begins: partition -> first offset of the batch that ends here, if that is not the end of the previous batch
            because records were lost.
        epochs: partition -> a leader epoch in which its log reached up to `at`; without one, nobody notices that the
            log lost its end.
    """

    at: Mapping[Partition, int]
    ids: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[Partition, int] = field(default_factory=dict)
    begins: Mapping[Partition, int] = field(default_factory=dict)
    epochs: Mapping[Partition, int] = field(default_factory=dict)

    def begin_of(self, partition: Partition, before: Positions) -> int | None:
        """First offset of a partition in the batches between `before` and here; None: not recorded."""
        return self.begins.get(partition, before.at.get(partition, self.first.get(partition)))

    def to_json(self) -> Offsets:
        """`{"orders": {"0": 12}, "#topic ids": {...}}`: Spark's format, plus keys that no topic can have."""
        data: Offsets = _nested(self.at)
        data[_IDS] = dict(sorted(self.ids.items()))
        if self.first:
            data[_FIRST] = _nested(self.first)
        if self.begins:
            data[_FROM] = _nested(self.begins)
        if self.epochs:
            data[_EPOCHS] = _nested(self.epochs)
        return data

    @classmethod
    def from_json(cls, data: Offsets) -> Positions:
        """Raise InvariantBroken if a checkpoint holds something else."""
        try:
            topics = {t: p for t, p in data.items() if not t.startswith("#")}
            first, begins, epochs = (_flat(data.get(key, {})) for key in (_FIRST, _FROM, _EPOCHS))
            return cls(_flat(topics), dict(data.get(_IDS, {})), first, begins, epochs)
        except (AttributeError, TypeError, ValueError):
            raise InvariantBroken(
                "CHECKPOINT_OFFSETS",
                f"The checkpoint's offsets are not those of a Kafka source: {json.dumps(data)[:200]}.",
                next_step="use the checkpoint of this source, or a new one",
            ) from None


@dataclass(frozen=True)
class Timestamp:
    """The first record at or after a time.

    Attributes:
        ms: since 1970.
    """

    ms: int


Place = int | Timestamp
"""An offset, EARLIEST, LATEST, or a time."""


@dataclass(frozen=True)
class Where:
    """Where to start or end reading.

    Attributes:
        everywhere: for all partitions; None: see `each`.
        each: partition -> place.
        option: where it was set, for errors.
        stored: positions from a driver's earlier `initial`, used as they are, whatever Kafka has now.
    """

    option: str
    everywhere: Place | None = None
    each: Mapping[Partition, Place] = field(default_factory=dict)
    stored: Positions | None = None

    def place(self, partition: Partition) -> Place | None:
        """None: not set for this partition."""
        return self.each.get(partition) if self.everywhere is None else self.everywhere


def parse_offsets(owner: str, option: str, text: str) -> Where:
    """Read "earliest", "latest", JSON like {"orders": {"0": 23, "1": -1}}, or the result of a driver's `initial`."""
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return Where(option, EARLIEST if word == "earliest" else LATEST)
    if _IDS in text:
        stored = Positions.from_json(_json_object(owner, option, text, "an offset written by this source"))
        return Where(option, each=dict(stored.at), stored=stored)
    each = parse_partitions(owner, option, text, '"earliest", "latest" or {"topic": {"0": 23, "1": -1}}')
    for (topic, number), offset in each.items():
        if offset < EARLIEST:
            raise UsageError(
                "OPTION_VALUE",
                f"{owner}: option {option!r} has offset {offset} for {topic}-{number}; it must be at least 0, or -1 "
                "for the latest, or -2 for the earliest.",
                next_step="write the offset of the next record to read",
            )
    return Where(option, each=dict(each))


def parse_timestamps(owner: str, option: str, text: str) -> Where:
    """Read JSON like {"orders": {"0": 1700000000000}}: milliseconds since 1970."""
    each = parse_partitions(owner, option, text, '{"topic": {"0": 1700000000000}}')
    return Where(option, each={p: Timestamp(_at_least_0(owner, option, ms)) for p, ms in each.items()})


def parse_timestamp(owner: str, option: str, text: str) -> Where:
    """Read milliseconds since 1970, for all partitions."""
    try:
        return Where(option, Timestamp(_at_least_0(owner, option, int(text))))
    except ValueError:
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: option {option!r} is {text!r}; it must be milliseconds since 1970.",
            next_step=f'write .option("{option}", "1700000000000")',
        ) from None


def parse_assign(owner: str, option: str, text: str) -> tuple[Partition, ...]:
    """Read JSON like {"orders": [0, 1]}."""
    example = '{"topic": [0, 1]}'
    data = _json_object(owner, option, text, example)
    found: list[Partition] = []
    for topic, numbers in data.items():
        if not isinstance(numbers, list) or not numbers or any(not _is_whole(n) or n < 0 for n in numbers):
            raise _bad_json(owner, option, text, example)
        found += [(topic, n) for n in numbers]
    if not found:
        raise _bad_json(owner, option, text, example)
    return tuple(sorted(set(found)))


def parse_partitions(owner: str, option: str, text: str, example: str) -> dict[Partition, int]:
    """Read JSON like {"orders": {"0": 23}}."""
    found: dict[Partition, int] = {}
    for topic, partitions in _json_object(owner, option, text, example).items():
        if not isinstance(partitions, dict):
            raise _bad_json(owner, option, text, example)
        for number, value in partitions.items():
            if not number.isascii() or not number.isdigit() or not _is_whole(value):
                raise _bad_json(owner, option, text, example)
            found[topic, int(number)] = value
    if not found:
        raise _bad_json(owner, option, text, example)
    return found


def _json_object(owner: str, option: str, text: str, example: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        raise _bad_json(owner, option, text, example) from None
    if not isinstance(data, dict):
        raise _bad_json(owner, option, text, example)
    return data


def _bad_json(owner: str, option: str, text: str, example: str) -> UsageError:
    problem = f"{owner}: option {option!r} is {text!r}; it must be {example}."
    return UsageError("OPTION_VALUE", problem, f"write .option(\"{option}\", '{example[example.index('{') :]}')")


def _at_least_0(owner: str, option: str, ms: int) -> int:
    if ms < 0:
        problem = f"{owner}: option {option!r} has the time {ms}; it must be at least 0."
        raise UsageError("OPTION_VALUE", problem, next_step="write milliseconds since 1970: 1700000000000")
    return ms


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _nested(flat: Mapping[Partition, int]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for (topic, number), offset in sorted(flat.items()):
        data.setdefault(topic, {})[str(number)] = offset
    return data


def _flat(nested: Mapping[str, Mapping[str, int]]) -> dict[Partition, int]:
    return {(t, int(n)): int(o) for t, numbers in nested.items() for n, o in numbers.items()}
