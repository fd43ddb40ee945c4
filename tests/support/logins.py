"""One broker with every way to log in, and what it takes: certificates, a token server, a Kerberos realm."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.certificates import Authority, Issued
from tests.support.kerberos import REALM, Realm
from tests.support.servers import Kafka
from tests.support.token_server import CLIENT, SECRET, TokenServer

USER, PASSWORD = "alice", 'pass"word,=\\1'
ODD_USER = "a,b=c"
STORE = "store-password"
_JAAS = "org.apache.kafka.common.security"
_LISTENER = "listener.name.sasl_plaintext"
SESSION_S = 2.0
"""After it, the broker closes a connection that did not authenticate again."""


class Logins:
    """
    Attributes:
        realm: None: no Kerberos server can be had here.
        reason: why.
        authority, server, client: of the listener SSL, which requires client certificates.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority, self.tokens = Authority(), TokenServer()
        self.server, self.client = self.authority.issue("broker"), self.authority.issue("client")
        self.realm: Realm | None = None
        self.reason = ""
        try:
            self.realm = Realm(folder / "realm")
        except pytest.skip.Exception as skipped:
            self.reason = str(skipped)
        (folder / "ca.pem").write_text(self.authority.pem)
        (folder / "server.p12").write_bytes(self.server.store(STORE))
        (folder / "client.p12").write_bytes(self.client.store(STORE))
        (folder / "trust.p12").write_bytes(self.authority.trust_store(STORE))
        self.client.files(folder, "client")
        self.client.files(folder, "locked", STORE)
        self.kafka = self._start()
        self._add_scram()

    def _start(self) -> Kafka:
        java = [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.tokens.url}/keys"]
        if self.realm is not None:
            java.append(f"-Djava.security.krb5.conf={self.realm.config}")
            os.environ["KRB5_CONFIG"] = str(self.realm.config)
        before = os.environ.get("JDK_JAVA_OPTIONS", "")
        os.environ["JDK_JAVA_OPTIONS"] = " ".join([before, *java])
        try:
            properties = self._properties()
            return Kafka.start(self.folder / "kafka", properties, tls=True, scram={USER: "x"})
        finally:
            os.environ["JDK_JAVA_OPTIONS"] = before

    def _properties(self) -> dict[str, str]:
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"').replace("\\", "\\\\")  # for JAAS, then for Java
        plain = f'{_JAAS}.plain.PlainLoginModule required user_{USER}="{quoted}";'
        found = {
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "super.users": f"User:ANONYMOUS;User:{USER};User:{ODD_USER};User:CN=client",
            "ssl.keystore.location": str(self.folder / "server.p12"),
            "ssl.keystore.password": STORE,
            "ssl.key.password": STORE,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.folder / "ca.pem"),
            "listener.name.ssl.ssl.client.auth": "required",
            f"{_LISTENER}.connections.max.reauth.ms": str(int(SESSION_S * 1000)),
            "sasl.oauthbearer.jwks.endpoint.url": f"{self.tokens.url}/keys",
            "sasl.oauthbearer.expected.audience": "kafka",
            "sasl.oauthbearer.expected.issuer": self.tokens.url,
        }
        for listener in (_LISTENER, "listener.name.sasl_ssl"):
            found |= {
                f"{listener}.plain.sasl.jaas.config": plain,
                f"{listener}.scram-sha-256.sasl.jaas.config": f"{_JAAS}.scram.ScramLoginModule required;",
                f"{listener}.oauthbearer.sasl.jaas.config": f"{_JAAS}.oauthbearer.OAuthBearerLoginModule required;",
                f"{listener}.oauthbearer.sasl.server.callback.handler.class": (
                    f"{_JAAS}.oauthbearer.OAuthBearerValidatorCallbackHandler"
                ),
            }
            if self.realm is not None:
                found["sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER,GSSAPI"
                found |= {
                    f"{listener}.sasl.kerberos.service.name": "kafka",
                    f"{listener}.gssapi.sasl.jaas.config": (
                        "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true "
                        f'keyTab="{self.realm.service}" principal="kafka/127.0.0.1@{REALM}";'
                    ),
                }
        return found

    def _add_scram(self) -> None:
        from confluent_kafka.admin import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

        changes = [
            UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
            for user in (USER, ODD_USER)
            for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
        ]
        for change in changes:
            for future in self.kafka.admin().alter_user_scram_credentials([change]).values():
                future.result(60)

    def at(self, listener: str) -> dict[str, str]:
        """Address and protocol."""
        return {
            "kafka.bootstrap.servers": self.kafka.broker.listeners[listener],
            "kafka.security.protocol": listener,
        }

    def password(self, mechanism: str, listener: str = "SASL_PLAINTEXT", user: str = USER) -> dict[str, str]:
        given = {"kafka.sasl.mechanism": mechanism, "kafka.sasl.username": user, "kafka.sasl.password": PASSWORD}
        return {**self.at(listener), **given, **(self.trusted if listener == "SASL_SSL" else {})}

    @property
    def trusted(self) -> dict[str, str]:
        return {"kafka.ssl.ca.location": str(self.folder / "ca.pem")}

    def mutual(self, **more: str) -> dict[str, str]:
        """The listener that requires a certificate of the client's."""
        return {**self.at("SSL"), **{f"kafka.{name.replace('__', '.')}": value for name, value in more.items()}}

    @property
    def files(self) -> dict[str, str]:
        return self.mutual(
            ssl__ca__location=str(self.folder / "ca.pem"),
            ssl__certificate__location=str(self.folder / "client.pem"),
            ssl__key__location=str(self.folder / "client.key"),
        )

    @property
    def by_token_server(self) -> dict[str, str]:
        return {
            **self.at("SASL_PLAINTEXT"),
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "kafka.sasl.oauthbearer.token.endpoint.url": f"{self.tokens.url}/token",
            "kafka.sasl.oauthbearer.client.id": CLIENT,
            "kafka.sasl.oauthbearer.client.secret": SECRET,
            "kafka.sasl.oauthbearer.scope": "kafka",
        }

    @property
    def kerberos(self) -> dict[str, str]:
        if self.realm is None:
            pytest.skip(self.reason)
        return {
            **self.at("SASL_PLAINTEXT"),
            "kafka.sasl.mechanism": "GSSAPI",
            "kafka.sasl.kerberos.service.name": "kafka",
            "kafka.sasl.kerberos.principal": "alice",
            "kafka.sasl.kerberos.keytab": str(self.realm.client),
        }

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def jaas(self, mechanism: str, module: str, listener: str = "SASL_PLAINTEXT", **options: str) -> dict[str, str]:
        """As the Java client's users write a login."""
        quoted = {n: v.replace("\\", "\\\\").replace('"', '\\"') for n, v in options.items()}
        name = module if module.startswith("com.") else f"{_JAAS}.{module}"
        text = f"{name} required " + " ".join(f'{n}="{v}"' for n, v in quoted.items()) + ";"
        return {**self.at(listener), "kafka.sasl.mechanism": mechanism, "kafka.sasl.jaas.config": text}

    @property
    def by_token_server_in_jaas(self) -> dict[str, str]:
        module = "oauthbearer.OAuthBearerLoginModule"
        given = self.jaas(
            "OAUTHBEARER", module, clientId=CLIENT, clientSecret=SECRET, scope="kafka", extension_team="x"
        )
        return {**given, "kafka.sasl.oauthbearer.token.endpoint.url": f"{self.tokens.url}/token"}

    @property
    def by_function(self) -> dict[str, str]:
        given = {"token.provider": "tests.support.token_server.fetched", "config": self.tokens.url}
        oauth = {f"kafka.sasl.oauthbearer.{name}": value for name, value in given.items()}
        return {**self.at("SASL_PLAINTEXT"), "kafka.sasl.mechanism": "OAUTHBEARER", **oauth}

    @property
    def kerberos_in_jaas(self) -> dict[str, str]:
        if self.realm is None:
            pytest.skip(self.reason)
        module = "com.sun.security.auth.module.Krb5LoginModule"
        keytab = str(self.realm.client)
        return self.jaas("GSSAPI", module, useKeyTab="true", keyTab=keytab, principal="alice", serviceName="kafka")

    @property
    def foreign_certificate(self) -> dict[str, str]:
        certificate, key = Authority("another").issue("client").files(self.folder, "foreign")
        return {"kafka.ssl.certificate.location": str(certificate), "kafka.ssl.key.location": str(key)}

    @property
    def foreign_revocations(self) -> dict[str, str]:
        (self.folder / "foreign-crl.pem").write_text(Authority("another").revoked())
        return {"kafka.ssl.crl.location": self.path("foreign-crl.pem")}

    def close(self) -> None:
        self.kafka.end()
        self.tokens.close()
        if self.realm is not None:
            self.realm.stop()
        with suppress(KeyError):
            del os.environ["KRB5_CONFIG"]


def revocations(logins: Logins, *revoked: Issued, name: str = "crl.pem") -> dict[str, str]:
    path = logins.folder / name
    path.write_text(logins.authority.revoked(*revoked))
    return {"kafka.ssl.crl.location": str(path)}
