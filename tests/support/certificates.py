"""Certificates of a test's own authority, and its revocation lists."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12

_PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    certificate: x509.Certificate
    private: Any

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(_PEM).decode()

    def key(self, password: str | None = None) -> str:
        """PKCS8, in PEM."""
        how = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        return self.private.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, how).decode()

    def store(self, password: str) -> bytes:
        """PKCS12."""
        how = serialization.BestAvailableEncryption(password.encode())
        return pkcs12.serialize_key_and_certificates(b"me", self.private, self.certificate, None, how)

    def files(self, folder: Path, name: str, password: str | None = None) -> tuple[Path, Path]:
        """Certificate and key."""
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_text(self.pem)
        key.write_text(self.key(password))
        return certificate, key


class Authority:
    def __init__(self, name: str = "authority") -> None:
        self._private = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = (
            self._started(self._name, self._private)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .sign(self._private, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(_PEM).decode()

    def _started(self, name: x509.Name, private: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        key = private.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + 30 * _DAY)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._private.public_key()), critical=False
            )
        )

    def issue(self, name: str, hosts: Sequence[str] = ()) -> Issued:
        """A certificate of `name`, for servers and clients; of these hosts instead of localhost and 127.0.0.1."""
        private = ec.generate_private_key(ec.SECP256R1())
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        names = [x509.DNSName(h) for h in hosts] or here
        made = (
            self._started(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), private)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .sign(self._private, hashes.SHA256())
        )
        return Issued(made, private)

    def revoked(self, *issued: Issued) -> str:
        """A revocation list with these certificates."""
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        made = made.last_update(now - _DAY).next_update(now + _DAY)
        for one in issued:
            serial = one.certificate.serial_number
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - _DAY).build()
            made = made.add_revoked_certificate(entry)
        return made.sign(self._private, hashes.SHA256()).public_bytes(_PEM).decode()

    def trust_store(self, password: str) -> bytes:
        """PKCS12, with the authority's certificate alone."""
        how = serialization.BestAvailableEncryption(password.encode())
        trusted = [pkcs12.PKCS12Certificate(self.certificate, b"ca")]
        return pkcs12.serialize_key_and_certificates(None, None, None, trusted, how)


def client_files(folder: Path, name: str = "client") -> tuple[Authority, dict[str, str]]:
    """An authority, and paths: ca and other_ca; client (its certificate of `name`), and stranger of the other
    authority, each with its key."""
    ours, theirs = Authority(), Authority("another")
    found = {}
    for who, authority, subject in (("client", ours, name), ("stranger", theirs, "stranger")):
        certificate, key = authority.issue(subject).files(folder, who)
        found |= {who: str(certificate), f"{who}_key": str(key)}
    for ca, authority in (("ca", ours), ("other-ca", theirs)):
        (folder / f"{ca}.pem").write_text(authority.pem)
        found[ca.replace("-", "_")] = str(folder / f"{ca}.pem")
    return ours, found


def tls_options(files: dict[str, str], ca: str = "ca", who: str | None = "client") -> dict[str, str]:
    """Of a connector, from `client_files`. Args: who: None: shows no certificate."""
    ours = {} if who is None else {"tlsCertificateFile": files[who], "tlsKeyFile": files[f"{who}_key"]}
    return {"tlsTrustCertsFile": files[ca], **ours}


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=sign, crl_sign=sign, encipher_only=False, decipher_only=False,
    )  # fmt: skip
