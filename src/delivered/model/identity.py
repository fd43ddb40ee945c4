"""The identity of a unit of work, (pipeline, sink, incarnation, batch, shard), and a batch's offsets by source."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.model.errors import UsageError
from delivered.model.limits import NAME_LENGTH_MAX

_NOT_OF_A_NAME = re.compile("[^A-Za-z0-9._-]")
_DIGEST_BYTES = 8
_ENDS_WITH_DIGEST = re.compile(rf"-[0-9a-f]{{{2 * _DIGEST_BYTES}}}\Z")
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LENGTH_MAX}}}")


def checked_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a transactional id, a topic name and a file name.

    Args:
        kind: for the error: "pipeline" or "sink".

    Raises:
        UsageError: empty, longer than 64 characters, or with characters other than letters, digits, `.`, `_`, `-`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError("NAME_INVALID", kind=kind, name=name, name_length_max=NAME_LENGTH_MAX)
    return name


def derived_name(name: str, suffix: str) -> str:
    """Name of what belongs to a pipeline: the name and `suffix`. Different names give different ones (P33)."""
    return fitted_name(name, NAME_LENGTH_MAX - len(suffix)) + suffix


def fitted_name(text: str, length: int = NAME_LENGTH_MAX, instead: str = "_") -> str:
    """Text as (part of) a name: itself, unless it is no name, too long, or ends as if with a digest; then it ends with
    its digest. So different texts give different names.

    Args:
        length: at most.
        instead: of characters that a name cannot have.
    """
    plain = _NOT_OF_A_NAME.sub(instead, text)
    if plain == text and len(text) <= length and not _ENDS_WITH_DIGEST.search(text):
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{plain[: length - len(digest) - 1]}-{digest}"


DEAD_LETTERS, DEAD_RECORDS = ".dead-letters", ".dead-records"


@dataclass(frozen=True)
class Scope:
    """The scope of a ledger: one sink of one pipeline, in one incarnation.

    Attributes:
        incarnation: Spark's query id, stored in the checkpoint. A new checkpoint is a new incarnation, so its batch 0
            is never mistaken for an older one's.
    """

    pipeline: str
    sink: str
    incarnation: str

    def __post_init__(self) -> None:
        checked_name("pipeline", self.pipeline)
        checked_name("sink", self.sink)
        checked_name("incarnation", self.incarnation)

    def retries(self, suffix: str) -> Scope:
        """Of the batches that retry its dead letters.

        Args:
            suffix: `DEAD_LETTERS`; `DEAD_RECORDS`: of those that were records of the source.
        """
        # Another incarnation than the pipeline's, which would look like a renamed pipeline.
        own = uuid.uuid5(uuid.NAMESPACE_OID, self.incarnation).hex
        return Scope(derived_name(self.pipeline, suffix), self.sink, own)

    @property
    def prefix(self) -> str:
        """Common prefix of every id of this pipeline and sink at a server, in any incarnation."""
        return f"delivered.{self.pipeline}.{self.sink}."


@dataclass(frozen=True)
class Work:
    """One shard of one batch, in one attempt of its task.

    Attributes:
        claim: epoch of the ledger's claim that the batch was planned under; 0: not known.
    """

    scope: Scope
    batch: int
    shard: int
    attempt: int = 0
    claim: int = 0


@dataclass(frozen=True)
class OtherLedger:
    """A ledger of another pipeline, or of another sink, in the same place.

    Attributes:
        same_incarnation: it has a batch of this checkpoint, so the pipeline or sink was renamed.
    """

    pipeline: str
    sink: str
    same_incarnation: bool = False


@dataclass(frozen=True)
class Target:
    """What a sink writes to.

    Attributes:
        name: for messages: "topic orders". May have several spellings.
        id: distinguishes it from another target of the same name; no spaces. Constant for the target's lifetime,
            however its name is spelt. Earlier decisions lack what follows an `@`.
    """

    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.name} with id {self.id}"


OTHERS_MAX = 20
"""Maximum number of other ledgers that a ledger lists."""


def named_first(found: Iterable[OtherLedger]) -> list[OtherLedger]:
    """Those of this incarnation first; at most `OTHERS_MAX`."""
    return sorted(set(found), key=lambda o: (not o.same_incarnation, o.pipeline, o.sink))[:OTHERS_MAX]


# A batch's offsets by source, as in Spark's offset log: a line per source.
#
# Format 1 of the log identifies sources by position. Format 2 writes `name:offsets`; a source without a name gets its
# number.

SOURCE = "source"
"""Default name of a pipeline's source, and of its view in the transform's SQL."""

SOURCE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""A source's name: valid as an unquoted view name in SQL, a keyword argument in Python, and a source name in Spark."""

_NAMED = re.compile(r"([A-Za-z0-9_]+):(.*)", re.DOTALL)
OF_NAMED_SOURCE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*:")
"""How a line of the log begins if its source has a name."""
_NONE = "-"
"""Written by Spark for a source without offsets."""


def by_source(text: str) -> dict[str, str]:
    """Each source's offsets, as JSON or in its own format. Sources without names: "0", "1"; a single one: SOURCE.

    Args:
        text: without the log's header lines.
    """
    lines = text.splitlines()
    pairs = [(m[1], m[2]) if (m := _NAMED.fullmatch(line)) else (str(n), line) for n, line in enumerate(lines)]
    found = {name: offsets for name, offsets in pairs if offsets != _NONE}
    return {SOURCE: found["0"]} if list(found) == ["0"] and len(lines) == 1 else found


def batches_text(first: int, last: int) -> str:
    """For display: "batch 4" or "batches 4 to 9"."""
    return f"batch {first}" if first == last else f"batches {first} to {last}"


def is_ahead(one: Any, other: Any) -> bool:
    """Whether `one` is further than `other` anywhere."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(is_ahead(v, other[k]) for k, v in one.items() if k in other)
    return isinstance(one, int) and isinstance(other, int) and one > other
