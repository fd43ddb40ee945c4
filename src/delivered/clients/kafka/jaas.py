"""`sasl.jaas.config`, in which the Java client's users write logins, as librdkafka's settings."""

from __future__ import annotations

import re

from delivered.model.errors import UsageError

OPTION = "sasl.jaas.config"
_LOGIN = re.compile(r"\s*([\w.$]+)\s+required\s+(.*);\s*", re.DOTALL)
_PAIR = re.compile(r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))\s*""")
_PASSWORD = {"username": "sasl.username", "password": "sasl.password"}
_MODULES = {
    "org.apache.kafka.common.security.plain.PlainLoginModule": ("PLAIN", _PASSWORD),
    "org.apache.kafka.common.security.scram.ScramLoginModule": ("SCRAM", _PASSWORD),
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule": (
        "OAUTHBEARER",
        {
            "clientId": "sasl.oauthbearer.client.id",
            "clientSecret": "sasl.oauthbearer.client.secret",
            "scope": "sasl.oauthbearer.scope",
        },
    ),
    "com.sun.security.auth.module.Krb5LoginModule": (
        "GSSAPI",
        {
            "keyTab": "sasl.kerberos.keytab",
            "principal": "sasl.kerberos.principal",
            "serviceName": "sasl.kerberos.service.name",
        },
    ),
}
_EXTENSION = "extension_"
_JAVA_ONLY = {
    *("useKeyTab", "storeKey", "useTicketCache", "doNotPrompt", "refreshKrb5Config", "renewTGT", "debug"),
    *("isInitiator", "serviceName"),
}


def settings_of(text: str, mechanism: str) -> dict[str, str]:
    """The settings in a login.

    Args:
        mechanism: "": not known.

    Raises:
        UsageError: it does not show the text, which holds a password.
    """
    login = _LOGIN.fullmatch(text)
    module, known = _MODULES.get(login[1], ("", {})) if login else ("", {})
    if login is None or not known or (mechanism and not mechanism.startswith(module)):
        raise _unclear(
            f'it must be the login module of {mechanism or "the mechanism"}, required, name="value" ...;', mechanism
        )
    pairs = {m[1]: re.sub(r"\\(.)", r"\1", m[2] or m[3] or m[4] or "") for m in _PAIR.finditer(login[2])}
    if _PAIR.sub("", login[2]).strip():
        raise _unclear('its options must be name="value"', mechanism)
    extensions = {n.removeprefix(_EXTENSION): v for n, v in pairs.items() if n.startswith(_EXTENSION)}
    if other := [n for n in pairs if n not in known and n not in _JAVA_ONLY and not n.startswith(_EXTENSION)]:
        raise _unclear(f"{other[0]} is not known; known: {', '.join(known)}", mechanism)
    if known is _PASSWORD and len(pairs) < len(known):
        raise _unclear("it needs username and password", mechanism)
    found = {known[name]: value for name, value in pairs.items() if name in known}
    if extensions:
        found["sasl.oauthbearer.extensions"] = ",".join(f"{n}={v}" for n, v in extensions.items())
    return found


def _unclear(why: str, mechanism: str) -> UsageError:
    instead = {"OAUTHBEARER": "kafka.sasl.oauthbearer.*", "GSSAPI": "kafka.sasl.kerberos.*"}
    return UsageError(
        "OPTION_VALUE",
        f"Option 'kafka.{OPTION}' is not understood: {why}.",
        next_step=f"write {instead.get(mechanism, 'kafka.sasl.username and kafka.sasl.password')} instead",
    )
