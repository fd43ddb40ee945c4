"""A MySQL or MariaDB server: its address and TLS parameters in a URL, and what the numbers of its errors mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from delivered.kits.options import trust
from delivered.model.errors import UsageError
from delivered.model.options import FLAG, Unfit

if TYPE_CHECKING:
    import ssl

PORT_DEFAULT = 3306

LOGIN = frozenset({1045, 1130, 1251, 1698, 1820, 2059, 3118, 3955, 4151})
LOST = frozenset({0, 1047, 1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 2002, 2003, 2006, 2013,
                  2014, 2055, 3032, 3169, 4031})  # fmt: skip
"""The connection was lost, so that the outcome of the last statement is unknown; 0: it was closed already; 1047: a node
of a Galera cluster does not serve now."""
FULL = frozenset({1040, 1203, 1226})
"""There are too many connections, of all or of this user: some end."""
DENIED = frozenset({1044, 1142, 1143, 1227, 1370, 1401, 1410})


def address(url: str, user: str | None = None) -> dict[str, Any]:
    """PyMySQL's settings that name the server, the database and the user: this one, or the URL's."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname or "localhost",
        "port": parts.port or PORT_DEFAULT,
        "user": user or (unquote(parts.username) if parts.username else None),
        "database": unquote(parts.path.strip("/")),
    }


PARAMETERS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")
_FLAGS = ("ssl_verify_cert", "ssl_verify_identity")


@dataclass(frozen=True)
class Tls:
    """Built by `parse_tls`.

    Attributes:
        certificate, key: PEM files of the client, if the server asks for a certificate.
        ca: PEM file with trusted certificates; None: the system's trust store.
        verify_certificate, verify_name: of the server.
    """

    ca: str | None
    certificate: str | None
    key: str | None
    verify_certificate: bool
    verify_name: bool

    def context(self) -> ssl.SSLContext:
        """Raises UsageError: a file is missing here, or is no PEM file."""
        import ssl

        context = trust("ssl_ca", self.ca)
        # Servers generate certificates for themselves that lack extensions which Python 3.13 requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.check_hostname = self.verify_name
        context.verify_mode = ssl.CERT_REQUIRED if self.verify_certificate else ssl.CERT_NONE
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except OSError as error:
                raise UsageError("TLS_FILES.MYSQL", certificate=self.certificate, error=error) from None
        return context


def parse_tls(query: str) -> Tls | None:
    """The TLS parameters after the `?` of a URL; None: there are none, and TLS is used if the server offers it.

    With any of them TLS is required, and certificate and name of the server are verified unless the URL says no.

    Raises:
        Unfit: a parameter is unknown, a flag is neither true nor false, or the parameters contradict each other.
    """
    pairs = parse_qsl(query, keep_blank_values=True)
    parameters = dict(pairs)
    if not parameters:
        return None
    if len(parameters) < len(pairs):
        raise Unfit.build("OPTION_VALUE.PARAMETER_TWICE")
    if unknown := sorted(parameters.keys() - {*PARAMETERS}):
        raise Unfit.build("OPTION_VALUE.PARAMETER_UNKNOWN", parameter=unknown[0], known=", ".join(PARAMETERS))
    for name, value in parameters.items():
        if not value:
            raise Unfit.build("OPTION_VALUE.PARAMETER_EMPTY", name=name)
    flags = {name: _flag(name, parameters) for name in _FLAGS if name in parameters}
    certificate = flags.get("ssl_verify_cert", True)
    identity = flags.get("ssl_verify_identity", certificate)
    if not certificate and ("ssl_ca" in parameters or identity):
        other = "ssl_ca" if "ssl_ca" in parameters else "ssl_verify_identity=true"
        raise Unfit.build("OPTION_VALUE.SSL_VERIFY", other=other)
    if "ssl_key" in parameters and "ssl_cert" not in parameters:
        raise Unfit.build("OPTION_VALUE.SSL_KEY")
    return Tls(parameters.get("ssl_ca"), parameters.get("ssl_cert"), parameters.get("ssl_key"), certificate, identity)


def _flag(name: str, parameters: Mapping[str, str]) -> bool:
    try:
        return FLAG.read(parameters[name])
    except Unfit as why:
        raise Unfit.build("OPTION_VALUE.PARAMETER_VALUE", name=name, reason=why.reason) from None


def tls_of_url(url: str) -> Tls | None:
    """As `parse_tls`. Raises UsageError: as `parse_tls`."""
    try:
        return parse_tls(urlsplit(url).query)
    except Unfit as why:
        raise why.of("The URL of the MySQL server") from None
