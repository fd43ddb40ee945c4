"""An evidence file: the seals of a pipeline's sinks as their ledger stores them, for someone who has neither.

The file is JSON. Its `sha256` covers all other fields, its signature all but these two, in their canonical form: keys
sorted, no spaces, ASCII, as `jq -caSj` writes them. So everything in it can be checked with `jq`, `sha256sum` and
`openssl`. Numbers that JSON readers round, such as offsets, are only in texts. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from delivered.audit.seal import Seal, Sealed, chain_faults, digest_of, read_sealed
from delivered.model.errors import DeliveredError, Refused, UsageError, extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


FORMAT = 1
"""Version of the fields. Files of a later version are refused."""

_FORMAT, _DIGEST, _SIGNATURE = "delivered_evidence", "sha256", "signature"


@dataclass(frozen=True)
class Evidence:
    """
    Attributes:
        content: all fields but hash and signature. `sinks` has an object for each sink, with its `seals`.
        signature: as `signature.sign` makes it; None: not signed.
    """

    content: Mapping[str, Any]
    signature: Mapping[str, Any] | None = None

    @property
    def signed_bytes(self) -> bytes:
        """What a signature covers."""
        return canonical(self.content)

    @property
    def fields(self) -> dict[str, Any]:
        """All but the hash."""
        return {**self.content, **({_SIGNATURE: self.signature} if self.signature is not None else {})}

    @property
    def text(self) -> str:
        """The file."""
        data = self.fields
        return json.dumps({**data, _DIGEST: digest_of(canonical(data).decode())}, indent=2) + "\n"

    @property
    def pipeline(self) -> str:
        return str(self.content.get("pipeline", ""))

    @property
    def chains(self) -> list[Chain]:
        return [Chain.from_json(data) for data in self.content["sinks"]]


@dataclass(frozen=True)
class Chain:
    """The seals of one sink in an evidence file.

    Attributes:
        sink: its name in the pipeline.
        seals: as stored, oldest first.
        sha256: of each.
        newest: number and hash of the newest seal in the ledger when the file was written: those behind the last seal
            of the file were not asked for.
        facts: where it writes, and up to where it was filled.
    """

    sink: str
    seals: tuple[str, ...]
    sha256: tuple[str, ...]
    first: int
    last: int
    newest: tuple[int, str]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sink: str, seals: Sequence[str], newest: str, facts: Mapping[str, Any]) -> Self:
        """
        Args:
            seals: consecutive ones, at least one.
            newest: the newest in the ledger.
        """
        first, last, end = (Seal.parse(text).number for text in (seals[0], seals[-1], newest))
        return cls(sink, (*seals,), (*map(digest_of, seals),), first, last, (end, digest_of(newest)), facts)

    def to_json(self) -> dict[str, Any]:
        return {
            "sink": self.sink,
            **self.facts,
            "first": self.first,
            "last": self.last,
            "newest": {"number": self.newest[0], "sha256": self.newest[1]},
            "seals": list(self.seals),
            "sha256": list(self.sha256),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        own = dict(data)
        sink, first, last, newest = (own.pop(name) for name in ("sink", "first", "last", "newest"))
        seals, hashes = tuple(own.pop("seals")), tuple(own.pop("sha256"))
        if not all(isinstance(text, str) for text in (sink, *seals, *hashes)):
            raise TypeError("a seal, its hash or a sink's name is no text")
        end = int(newest["number"]), str(newest["sha256"])
        return cls(sink, seals, hashes, int(first), int(last), end, own)

    @property
    def sealed(self) -> Sealed:
        """What the seals say. Raises Refused: a later version of this package wrote one."""
        return read_sealed(self.seals)


def canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True, ensure_ascii=True).encode()


def new_evidence(
    pipeline: str, chains: Iterable[Chain], facts: Mapping[str, Any], *, written_by: str, written_at: datetime
) -> Evidence:
    """Args: facts: JSON values: plan, versions, sources. Free of secrets."""
    content = {
        _FORMAT: FORMAT,
        "pipeline": pipeline,
        "written_at": written_at.astimezone(UTC).isoformat(timespec="seconds"),
        "written_by": written_by,
        **facts,
        "sinks": [chain.to_json() for chain in chains],
    }
    return Evidence(content)


def read_evidence(raw: bytes, name: str) -> tuple[Evidence, tuple[Fault, ...]]:
    """An evidence file, and where it is not as it was written.

    Args:
        name: of the file, for errors.

    Raises:
        UsageError: it is no evidence file.
        Refused: a later version of this package wrote it.
    """
    try:
        data = json.loads(raw.decode())
        version = data.pop(_FORMAT)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError("EVIDENCE_FILE", file=name, error=error) from None
    if not isinstance(version, int) or not 1 <= version <= FORMAT:
        raise Refused("FORMAT_NEWER", what="an evidence file", version=version, newest=FORMAT)
    digest, signature = data.pop(_DIGEST, None), data.pop(_SIGNATURE, None)
    evidence = Evidence({_FORMAT: version, **data}, signature)
    try:
        chains = evidence.chains
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError("EVIDENCE_FILE", file=name, error=error) from None
    faults: list[Fault] = []
    if digest != digest_of(canonical(evidence.fields).decode()):
        faults.append(Fault(Kind.CHANGED, "the file was changed after it was written: its sha256 is another one"))
    elif raw != evidence.text.encode():
        faults.append(Fault(Kind.CHANGED, "the file was laid out anew; its fields are as they were written"))
    if not chains:
        faults.append(Fault(Kind.MISSING, "the file holds no seal"))
    for sink, count in Counter(chain.sink for chain in chains).items():
        if count > 1:
            faults.append(Fault(Kind.CHANGED, f"the sink is in the file {count} times", sink))
    for chain in chains:
        faults += find_faults(chain, evidence.pipeline)
    return evidence, tuple(faults)


class Kind(StrEnum):
    """What is wrong in an evidence file."""

    CHANGED = "changed"
    MISSING = "missing"
    REORDERED = "reordered"
    CUT_OFF = "cut off"
    CHAIN = "chain"
    """The seals are as they were written, and contradict each other."""
    UNSIGNED = "not signed"
    OTHER_KEY = "another key"
    BAD_SIGNATURE = "bad signature"
    LEDGER = "ledger"
    """The ledger says something else."""
    DIFFERS = "differs"
    """What was recomputed says something else."""


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        sink: its name; empty: it is not of one sink.
    """

    kind: Kind
    text: str
    sink: str = ""

    def __str__(self) -> str:
        return f"{self.sink}: {self.text}" if self.sink else self.text


def find_faults(chain: Chain, pipeline: str) -> Iterator[Fault]:
    """Where the seals of a sink are not those that were written."""

    def fault(kind: Kind, text: str) -> Fault:
        return Fault(kind, text, chain.sink)

    known: dict[int, str] = {}
    order: list[int] = []
    for at, text in enumerate(chain.seals):
        try:
            seal = Seal.parse(text)
        except (ValueError, DeliveredError) as error:
            yield fault(Kind.CHANGED, f"the seal at place {at} cannot be read: {error}")
            continue
        order.append(seal.number)
        known[seal.number] = text
        if at >= len(chain.sha256) or digest_of(text) != chain.sha256[at]:
            yield fault(Kind.CHANGED, f"seal {seal.number} was changed: its sha256 is another one")
        if (seal.scope.pipeline, seal.scope.sink) != (pipeline, chain.sink):
            yield fault(Kind.CHANGED, f"seal {seal.number} is of {seal.scope.pipeline} -> {seal.scope.sink}")
    if len(chain.sha256) != len(chain.seals):
        yield fault(Kind.CHANGED, f"{len(chain.seals)} seals have {len(chain.sha256)} hashes")
    inside = [n for n in sorted(known) if chain.first <= n <= chain.last]
    # By their ends: who changed the file may have written any number.
    missing = [(a + 1, b - 1) for a, b in pairwise([chain.first - 1, *inside, chain.last + 1]) if b - a > 1]
    behind = missing.pop() if missing and missing[-1][1] == chain.last else None
    if missing:
        yield fault(Kind.MISSING, f"{_numbered(missing)} missing")
    if behind is not None:
        yield fault(Kind.CUT_OFF, f"{_numbered([behind])} cut off")
    if strangers := sorted(known.keys() - set(inside)):
        yield fault(Kind.CHANGED, f"{_numbered([(n, n) for n in strangers])} not of this file")
    if chain.first > chain.last:
        yield fault(Kind.CHANGED, f"the file names seals {chain.first} to {chain.last}, which is none")
    if order != sorted(set(order)):
        yield fault(Kind.REORDERED, f"the seals are in the order {', '.join(map(str, order[:20]))}")
    if len(order) == len(chain.seals):
        # As sorted, so that what is out of order is not also said to be broken; hashes are those of the texts.
        yield from (fault(Kind.CHAIN, text) for text in chain_faults(known[n] for n in sorted(known)))
    if chain.last == chain.newest[0] and chain.seals and digest_of(chain.seals[-1]) != chain.newest[1]:
        yield fault(Kind.CHANGED, f"the newest seal, {chain.last}, has not the hash that the ledger gave")


def _numbered(ranges: Sequence[tuple[int, int]]) -> str:
    """ "seal 3 is", "seals 3 to 5, 7 are"."""
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    return f"seal {texts[0]} is" if texts == [str(ranges[0][0])] else f"seals {', '.join(texts)} are"


def against_ledger(chain: Chain, ledger: Sequence[str]) -> tuple[list[Fault], list[str]]:
    """Compare the seals of a file with those that the ledger has now; faults, and what else there is to say.

    Args:
        ledger: its seals from `chain.first` on.
    """
    faults: list[Fault] = []

    def differs(text: str) -> None:
        faults.append(Fault(Kind.LEDGER, text, chain.sink))

    if not ledger:
        differs(f"the ledger has none of the seals {chain.first} to {chain.last}")
    elif chain.first + len(ledger) <= chain.last:
        differs(
            f"the ledger ends with seal {chain.first + len(ledger) - 1}, the file with {chain.last}: the ledger was "
            "restored from an older copy, or its seals were deleted"
        )
    for number, text in _by_number(chain.seals).items():
        if chain.first <= number < chain.first + len(ledger) and ledger[number - chain.first] != text:
            differs(f"seal {number} is another one in the ledger")
    newer = ledger[chain.last - chain.first + 1 :]
    faults += [Fault(Kind.LEDGER, f"in the ledger, {text}", chain.sink) for text in chain_faults(ledger)]
    if faults:
        return faults, []
    said = [f"the ledger has the same seals {chain.first} to {chain.last}"]
    if newer:
        said.append(f"the ledger has {len(newer):,} newer ones, up to seal {chain.last + len(newer)}")
    return [], said


def _by_number(seals: Iterable[str]) -> dict[int, str]:
    """Those that can be read."""
    found = {}
    for text in seals:
        with suppress(ValueError, DeliveredError):
            found[Seal.parse(text).number] = text
    return found


Bound = int | datetime
"""A batch, or a time."""


def parse_bound(option: str, text: str) -> Bound:
    """Raises UsageError: neither the number of a batch nor an ISO 8601 time."""
    word = text.strip()
    if word.isascii() and word.isdigit():
        return int(word)
    try:
        at = datetime.fromisoformat(word)
    except ValueError:
        raise UsageError("EVIDENCE_BOUND", option=option, text=text) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def select(seals: Sequence[Seal], start: Bound | None, end: Bound | None) -> slice:
    """Where the seals of a range are, both ends included; consecutive, so that their chain can be checked.

    A batch is one of the newest checkpoint. A time is when a seal was made, by the auditor's clock.
    """
    newest = seals[-1].scope.incarnation if seals else ""
    inside = [at for at, seal in enumerate(seals) if _not_before(seal, start, newest) and _not_after(seal, end, newest)]
    return slice(inside[0], inside[-1] + 1) if inside else slice(0)


def _not_before(seal: Seal, bound: Bound | None, newest: str) -> bool:
    return bound is None or (
        seal.scope.incarnation == newest and seal.last >= bound if isinstance(bound, int) else seal.sealed_at >= bound
    )


def _not_after(seal: Seal, bound: Bound | None, newest: str) -> bool:
    return bound is None or (
        seal.scope.incarnation != newest or seal.first <= bound if isinstance(bound, int) else seal.sealed_at <= bound
    )


# Ed25519 signatures, by the library `cryptography`. Keys are PEM, as OpenSSL writes them.

ALGORITHM = "Ed25519"


def sign(evidence: Evidence, key: bytes, name: str) -> Evidence:
    """The evidence with a signature.

    Args:
        key: a private key.
        name: of its file, for errors.

    Raises:
        UsageError: not an Ed25519 key, or one with a password.
        MissingExtra: `cryptography` is not installed.
    """
    private = _private(key, name)
    signature = {
        "algorithm": ALGORITHM,
        "key_sha256": key_id(private.public_key()),
        "value": base64.b64encode(private.sign(evidence.signed_bytes)).decode(),
    }
    return Evidence(evidence.content, signature)


def check_signature(evidence: Evidence, key: bytes, name: str) -> Fault | None:
    """What is wrong with the signature; None: this key made it over these bytes.

    Args:
        key: the public key; a private one will do.
        name: of its file, for errors.

    Raises:
        UsageError, MissingExtra: as `sign`.
    """
    from cryptography.exceptions import InvalidSignature

    public, signature = _public(key, name), evidence.signature
    if signature is None:
        return Fault(Kind.UNSIGNED, "the file is not signed")
    found: Mapping[str, Any] = signature if isinstance(signature, Mapping) else {}
    try:
        public.verify(base64.b64decode(found["value"], validate=True), evidence.signed_bytes)
    except (InvalidSignature, KeyError, TypeError, ValueError):
        if found.get("key_sha256") not in (None, key_id(public)):
            return Fault(Kind.OTHER_KEY, f"another key signed the file, with the sha256 {found['key_sha256']}")
        return Fault(Kind.BAD_SIGNATURE, "the file or its signature was changed after it was signed")
    return None


def key_id(public: Ed25519PublicKey) -> str:
    """SHA-256 of the public key in DER: `openssl pkey -pubin -in key.pub -outform DER | sha256sum`."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _private(key: bytes, name: str) -> Ed25519PrivateKey:
    with extra("evidence"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    try:
        loaded = load_pem_private_key(key, password=None)
    except (TypeError, ValueError) as error:  # TypeError: it has a password
        raise UsageError("EVIDENCE_KEY.PRIVATE", file=name, reason=error) from None
    if not isinstance(loaded, Ed25519PrivateKey):
        raise UsageError("EVIDENCE_KEY.PRIVATE", file=name, reason=f"it is a {type(loaded).__name__}")
    return loaded


def _public(key: bytes, name: str) -> Ed25519PublicKey:
    with extra("evidence"):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    if b"PRIVATE KEY" in key:
        return _private(key, name).public_key()
    try:
        loaded = load_pem_public_key(key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError("EVIDENCE_KEY.PUBLIC", file=name, reason=error) from None
    if not isinstance(loaded, Ed25519PublicKey):
        raise UsageError("EVIDENCE_KEY.PUBLIC", file=name, reason=f"it is a {type(loaded).__name__}")
    return loaded
