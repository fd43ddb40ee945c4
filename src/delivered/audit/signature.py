"""Ed25519 signatures of evidence files, by the library `cryptography`. Keys are PEM, as OpenSSL writes them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from delivered.audit.evidence_file import Evidence, Fault, Kind
from delivered.model.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

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
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise MissingExtra("evidence") from None
    try:
        loaded = load_pem_private_key(key, password=None)
    except (TypeError, ValueError) as error:  # TypeError: it has a password
        raise UsageError("EVIDENCE_KEY.PRIVATE", file=name, reason=error) from None
    if not isinstance(loaded, Ed25519PrivateKey):
        raise UsageError("EVIDENCE_KEY.PRIVATE", file=name, reason=f"it is a {type(loaded).__name__}")
    return loaded


def _public(key: bytes, name: str) -> Ed25519PublicKey:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise MissingExtra("evidence") from None
    if b"PRIVATE KEY" in key:
        return _private(key, name).public_key()
    try:
        loaded = load_pem_public_key(key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError("EVIDENCE_KEY.PUBLIC", file=name, reason=error) from None
    if not isinstance(loaded, Ed25519PublicKey):
        raise UsageError("EVIDENCE_KEY.PUBLIC", file=name, reason=f"it is a {type(loaded).__name__}")
    return loaded
