"""TLS of connections to Kafka brokers, from librdkafka's settings: trusted certificates, ours, revocation lists."""

from __future__ import annotations

import logging
import os
import re
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delivered.model.errors import MissingExtra, UsageError

log = logging.getLogger("delivered.kafka")

FILES = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.crl.location")
STORES = ("ssl.keystore.location", "ssl.truststore.location")
"""PKCS12. Stores in PEM's format have other names by now."""
VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_CRL = "X509 CRL"


class Tls:
    """Contexts of one client. Files are read again after they changed: certificates are renewed, and revocation lists
    replaced, while a query runs.

    Args:
        client: settings by librdkafka's names, secrets resolved.

    Raises:
        UsageError: a file or text cannot be used.
    """

    def __init__(self, client: Mapping[str, str]) -> None:
        self._client = dict(client)
        self._seen = self._stamps()
        self._context = build_context(self._client)

    def context(self) -> ssl.SSLContext:
        """For a new connection. Files that cannot be used may be half written: the former ones stay in use."""
        try:
            now = self._stamps()
            if now != self._seen:
                self._context, self._seen = build_context(self._client), now
        except UsageError as error:
            log.warning("%s The former ones stay in use.", error.message)
        return self._context

    def _stamps(self) -> list[tuple[int, int, int]]:
        found = []
        for name in (*FILES, *STORES):
            if name in self._client:
                try:
                    stat = Path(self._client[name]).stat()
                except OSError as error:
                    raise unusable(f"{self._client[name]!r}: {(error.strerror or str(error)).lower()}") from None
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return found


def build_context(client: Mapping[str, str]) -> ssl.SSLContext:
    """Raises UsageError: a file or text cannot be used."""
    try:
        context = _trusting(client)
        if client.get("ssl.endpoint.identification.algorithm", "https") == "none":
            context.check_hostname = False
        if client.get("enable.ssl.certificate.verification", "true") == "false":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        _load_own(context, client)
        if "ssl.crl.location" in client:
            with _as_file(_revoked(client["ssl.crl.location"])) as path:
                context.load_verify_locations(cafile=path)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        if "ssl.enabled.protocols" in client:
            allowed = [VERSIONS[name] for name in client["ssl.enabled.protocols"].split(",")]
            context.minimum_version, context.maximum_version = min(allowed), max(allowed)
        if "ssl.cipher.suites" in client:
            context.set_ciphers(client["ssl.cipher.suites"])
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise unusable(str(error)) from None
    return context


def unusable(why: str) -> UsageError:
    """The error for files or texts that no context can be built of."""
    return UsageError(
        "TLS_FILES",
        f"The TLS files of kafka.ssl.* cannot be used: {why}.",
        next_step="check the paths, the file formats and the password of the key",
    )


def _trusting(client: Mapping[str, str]) -> ssl.SSLContext:
    location, text = client.get("ssl.ca.location"), pem(client.get("ssl.ca.pem", ""))
    if store := client.get("ssl.truststore.location"):
        text += trusted_of_store(store, client.get("ssl.truststore.password"))
    folder = location if location is not None and Path(location).is_dir() else None
    return ssl.create_default_context(cafile=None if folder else location, capath=folder, cadata=text or None)


def _load_own(context: ssl.SSLContext, client: Mapping[str, str]) -> None:
    password = client.get("ssl.key.password", "")
    if store := client.get("ssl.keystore.location"):
        text, password = own_of_store(store, client.get("ssl.keystore.password", password)), ""
    elif "ssl.certificate.pem" in client:
        text = pem(client["ssl.certificate.pem"]) + pem(client.get("ssl.key.pem", ""))
    elif "ssl.certificate.location" in client:
        # Without a function, OpenSSL would ask the terminal for a missing password, and wait.
        context.load_cert_chain(client["ssl.certificate.location"], client.get("ssl.key.location"), lambda: password)
        return
    else:
        return
    with _as_file(text) as path:
        context.load_cert_chain(path, password=lambda: password)


def pem(text: str) -> str:
    """PEM text as OpenSSL reads it: Kafka's Java client also takes it on one line."""
    if "\n" in text.strip():
        return text if text.endswith("\n") else text + "\n"
    blocks = []
    for label, body in _BLOCK.findall(text.replace("\\n", "\n")):
        data = "".join(body.split())
        lines = "\n".join(data[i : i + 64] for i in range(0, len(data), 64))
        blocks.append(f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n")
    if text.strip() and not blocks:
        raise ValueError("the text in PEM's format has no -----BEGIN ...----- and -----END ...-----")
    return "".join(blocks)


def _revoked(location: str) -> str:
    """The lists in a file, without certificates, which would be trusted."""
    text = Path(location).read_text(encoding="ascii", errors="replace")
    lists = "\n".join(found[0] for found in _BLOCK.finditer(text) if found[1] == _CRL)
    if not lists:
        raise ValueError(f"{location!r} has no revocation list in PEM's format (-----BEGIN {_CRL}-----)")
    return lists + "\n"


def own_of_store(location: str, password: str | None) -> str:
    """Certificates and key of a PKCS12 store, as PEM text. Raises OSError, ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    store = _store(location, password)
    if store.key is None or store.cert is None:
        raise ValueError(f"{location!r} has no key with its certificate")
    key = store.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = [store.cert, *store.additional_certs]
    return b"".join([*(c.certificate.public_bytes(Encoding.PEM) for c in chain), key]).decode("ascii")


def trusted_of_store(location: str, password: str | None) -> str:
    """Certificates of a PKCS12 store, as PEM text. Raises OSError, ValueError."""
    from cryptography.hazmat.primitives.serialization import Encoding

    store = _store(location, password)
    found = [*([store.cert] if store.cert else []), *store.additional_certs]
    if not found:
        raise ValueError(f"{location!r} has no certificate")
    return b"".join(c.certificate.public_bytes(Encoding.PEM) for c in found).decode("ascii")


def _store(location: str, password: str | None) -> Any:
    try:
        from cryptography.hazmat.primitives.serialization.pkcs12 import load_pkcs12
    except ImportError:
        raise MissingExtra("kafka") from None
    data = Path(location).read_bytes()
    try:
        return load_pkcs12(data, password.encode() if password else None)
    except ValueError as error:
        raise ValueError(f"{location!r}: {str(error).rstrip('.')}") from None


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """A path for OpenSSL, which reads certificates and keys from files only. In memory where the system can."""
    data = text.encode("ascii")
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name
        return
    with os.fdopen(os.memfd_create("delivered-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
