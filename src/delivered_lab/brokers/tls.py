"""Certificates for a server's TLS listener, created with Java's keytool."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path

from delivered.model.errors import DeliveredError


def make_certificate(java_home: Path, folder: Path) -> tuple[Path, str]:
    """A self-signed certificate for 127.0.0.1 and localhost, valid for ten years; created once per folder.

    Clients trust the PEM file ca.pem in the folder.

    Returns:
        The server's key store (PKCS12), and its password.
    """
    store, trusted, password = folder / "server.p12", folder / "ca.pem", _password(folder / "keystore.password")
    if trusted.is_file():
        return store, password
    tool = str(java_home / "bin" / "keytool")
    same = ["-alias", "server", "-keystore", str(store), "-storetype", "PKCS12", "-storepass", password]
    names = ["-dname", "CN=localhost", "-ext", "SAN=dns:localhost,ip:127.0.0.1", "-ext", "BC:critical=ca:true"]
    _run([tool, "-genkeypair", *same, "-keyalg", "RSA", "-keysize", "2048", "-validity", "3650", *names])
    _run([tool, "-exportcert", *same, "-rfc", "-file", str(trusted)])
    return store, password


def _password(file: Path) -> str:
    if not file.is_file():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(16), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-300:]
        raise DeliveredError(
            "CERTIFICATE_FAILED",
            f"keytool could not create a certificate: {output}",
            next_step="delivered doctor, which checks Java",
        )
