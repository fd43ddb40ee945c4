"""Options of TLS that several connectors share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivered.kits.options import TRUSTED, distrusted, trust
from delivered.model.errors import UsageError
from delivered.model.options import Options, option

if TYPE_CHECKING:
    import ssl


class TlsOptions(Options):
    """Base of the options for certificates, of servers and our own.

    Attributes:
        trusted: PEM file of certificates; None: the system's.
        certificate, key: PEM files of ours, for servers that require one.
    """

    trusted: str | None = option(
        TRUSTED, "PEM file with trusted certificates, for TLS.", default=None, shown="the system's trust store"
    )
    certificate: str | None = option(
        "tlsCertificateFile", "PEM file with the client's certificate, for mutual TLS.", default=None, shown="none"
    )
    key: str | None = option(
        "tlsKeyFile", "PEM file with the key of tlsCertificateFile, without a password.", default=None, shown="none"
    )

    def check_tls(self, owner: str, used: bool, url: str) -> None:
        """Refuse certificates that nothing would use. Raises UsageError.

        Args:
            used: whether a connection uses TLS.
            url: one that does, for the error.
        """
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "OPTION_CONFLICT",
                f"{owner}: tlsCertificateFile and tlsKeyFile must be set together; one is missing.",
                next_step="set both",
            )
        given = TRUSTED if self.trusted is not None else "tlsCertificateFile" if self.certificate is not None else None
        if given is not None and not used:
            raise UsageError(
                "OPTION_CONFLICT",
                f"{owner}: option {given!r} is set, but nothing uses TLS.",
                next_step=f"write {url}, or remove {given}",
            )

    def untrusted(self, url: str, error: ssl.SSLCertVerificationError, names_in: str = "url") -> UsageError:
        """The error for the certificate of a server that is not trusted. Arguments: see `distrusted`."""
        trusted = f"those in {self.trusted}" if self.trusted is not None else "the system's trust store"
        return distrusted(url, error, TRUSTED, trusted, names_in)

    def tls_context(self) -> ssl.SSLContext:
        """Verifies certificates and host names. Raises UsageError: a file cannot be used here."""
        context = trust(TRUSTED, self.trusted)
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, lambda: "")
            except OSError as error:  # ssl.SSLError is one
                raise UsageError(
                    "TLS_FILES",
                    f"tlsCertificateFile {self.certificate!r} and tlsKeyFile {self.key!r} cannot be used: {error}.",
                    next_step="set them to PEM files of a certificate and its key, without a password",
                ) from None
        return context
