"""A Kerberos realm: MIT's key distribution centre from Debian's packages, unpacked into the cache, no root needed."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from delivered.clients.kafka.sasl import LIBRARY
from delivered.machine import cache_folder
from delivered.model.errors import DeliveredError
from delivered_lab.brokers.servers import end, fetch_packages, free_ports, launch

PACKAGES = (
    *("krb5-kdc", "krb5-admin-server", "libkadm5srv-mit12", "libkdb5-10", "libgssrpc4", "libverto1", "libverto-libev1"),
    *("libev4", "libss2", "libgssapi-krb5-2", "libkrb5-3", "libk5crypto3", "libkrb5support0", "libcom-err2"),
    "libkeyutils1",
)
REALM = "DELIVERED.TEST"
_ORDER = ("libkrb5support.so.0", "libcom_err.so.2", "libkeyutils.so.1", "libk5crypto.so.3", "libkrb5.so.3", LIBRARY)


class Realm:
    """
    Attributes:
        config: the path for KRB5_CONFIG and java.security.krb5.conf.
        service, client: keytabs of kafka/127.0.0.1 and of alice.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        try:
            root = fetch_packages("Kerberos", cache_folder() / "kerberos" / "root", PACKAGES, "1.6 MB", lambda _: None)
        except DeliveredError as error:
            pytest.skip(f"no Kerberos server here: {error}")
        [libraries] = [p.parent for p in root.glob("usr/lib/*/libkdb5.so.10")]
        self._root, self._folder = root, folder
        [port] = free_ports(1)
        self.config, kdc = folder / "krb5.conf", folder / "kdc.conf"
        self.config.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n dns_lookup_realm = false\n"
            " rdns = false\n dns_canonicalize_hostname = false\n udp_preference_limit = 1\n"
            f" plugin_base_dir = {libraries / 'krb5/plugins'}\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n[domain_realm]\n 127.0.0.1 = {REALM}\n"
            f"[dbmodules]\n db_module_dir = {libraries / 'krb5/plugins/kdb'}\n"
        )
        kdc.write_text(
            f"[kdcdefaults]\n kdc_listen = 127.0.0.1:{port}\n kdc_tcp_listen = 127.0.0.1:{port}\n"
            f"[realms]\n {REALM} = {{\n  database_name = {folder / 'principal'}\n"
            f"  key_stash_file = {folder / 'stash'}\n  acl_file = {folder / 'acl'}\n }}\n"
        )
        self._environment = {
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(kdc),
            "LD_LIBRARY_PATH": f"{libraries}:{root / libraries.relative_to(root / 'usr')}",
        }
        self._run("kdb5_util", "create", "-s", "-P", "master", "-r", REALM)
        self.service, self.client = folder / "service.keytab", folder / "alice.keytab"
        for principal, keytab in (("kafka/127.0.0.1", self.service), ("alice", self.client)):
            self._run("kadmin.local", "-q", f"addprinc -randkey {principal}")
            self._run("kadmin.local", "-q", f"ktadd -k {keytab} {principal}")
        command = ["env", *(f"{k}={v}" for k, v in self._environment.items())]
        command += [str(root / "usr/sbin/krb5kdc"), "-n", "-r", REALM]
        self._process = launch(command, folder / "kdc.log", True)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert self._process.find() is not None, (folder / "kdc.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        _preload(libraries, root)

    def _run(self, tool: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._root / "usr/sbin" / tool), *arguments],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def stop(self) -> None:
        end(self._process, kill=True)


def _preload(*folders: Path) -> None:
    """The client's library, where this machine has none: by its name, the one that is loaded is found."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        for name in _ORDER:
            [path, *_] = [p for folder in folders for p in folder.rglob(name)]
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
