"""A real API server of Kubernetes with etcd, and what a cluster has besides, small: `Cluster` binds pods, starts their
containers as processes, restarts and ends them, and deletes what a deleted pod owned.

A container is a process with its own view of the file system: volumes lie at their paths, the service account's token
where clients look for it, /etc/hosts knows the names of services. All pods share this machine's network. Not there:
images, cgroups (limits of memory), users, probes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tenacity
import yaml

from delivered.machine import cache_folder
from delivered_lab.brokers.servers import free_ports, telling_lines
from delivered_lab.supervisor import kill_tree

VERSION = "1.34.4"
_ADMIN = "of-the-test"
_PROGRAMS = {
    "kube-apiserver": """package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() { os.Exit(cli.Run(app.NewAPIServerCommand())) }
""",
    "etcd": """package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
""",
}
"""Debian's etcd 3.4 is too old: it tells no watcher how far it is."""
_BUILD_S = 3_000
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_GRACE_S = 20.0
_BACKOFF_S = (1.0, 2.0, 4.0)
"""Between restarts of a container. A kubelet waits for 10 s, twice as long each time, and for 5 minutes at most."""


def missing() -> str | None:
    """Why no cluster can run here."""
    if shutil.which("go") is None and not _programs().is_dir():
        return "no Go, which builds the API server"
    if os.geteuid() != 0:
        return "mounts need root"
    return None


def _programs() -> Path:
    return cache_folder() / "kubernetes" / VERSION


def programs() -> Path:
    """The folder of API server and etcd, built from the Go module k8s.io/kubernetes; once, 15 minutes on two busy
    cores."""
    ready = _programs()
    if ready.is_dir():
        return ready
    ready.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ready.parent) as folder:
        work = Path(folder)

        def go(*arguments: str) -> str:
            return subprocess.run(
                ["nice", "go", *arguments], cwd=work, check=True, capture_output=True, text=True, timeout=_BUILD_S
            ).stdout

        file = json.loads(go("mod", "download", "-json", f"k8s.io/kubernetes@v{VERSION}"))["GoMod"]
        own = json.loads(go("mod", "edit", "-json", file))
        # The module's own parts are modules too, with versions that it names only by their folders.
        parts = [r["Old"]["Path"] for r in own["Replace"] if r["New"]["Path"].startswith("./staging")]
        lines = "".join(f"\t{p} => {p} v0.{VERSION.partition('.')[2]}\n" for p in parts)
        (work / "go.mod").write_text(
            f"module servers\n\ngo {own['Go']}\n\nrequire k8s.io/kubernetes v{VERSION}\n\nreplace (\n{lines})\n"
        )
        for name, text in _PROGRAMS.items():
            (work / name).mkdir()
            (work / name / "main.go").write_text(text)
        go("mod", "tidy", "-e")
        (work / "built").mkdir()
        go("build", "-p", "2", "-trimpath", "-ldflags=-s -w", "-o", "built/", "./...")
        (work / "built").rename(ready)
    return ready


@dataclass
class Container:
    """A container of a pod, and its processes, one after the other."""

    pod: str
    name: str
    command: list[str]
    env: dict[str, str]
    process: psutil.Popen | None = None
    restarts: int = 0
    again_at: float = 0.0
    exit_code: int | None = None


@dataclass
class Pod:
    uid: str
    folder: Path
    containers: list[Container] = field(default_factory=list)
    ended: bool = False


class Cluster:
    """Context manager.

    Args:
        folder: of data and logs: `<pod>.<container>.log`.
        image: the image of every container: entry point as a command, and its environment.
        hosts: more names of 127.0.0.1.
        leave_out: containers that do not run; their pods are as ready without them.
    """

    def __init__(
        self,
        folder: Path,
        entry_point: list[str],
        env: Mapping[str, str],
        hosts: tuple[str, ...] = (),
        leave_out: frozenset[str] = frozenset(),
    ) -> None:
        self.folder = folder
        self.port, self._etcd_port, self._peer_port = free_ports(3)
        self._entry_point, self._env, self._leave_out = entry_point, dict(env), leave_out
        self._hosts = ("kubernetes.default.svc", *hosts)
        self._servers: list[psutil.Popen] = []
        self._pods: dict[str, Pod] = {}
        self._stop = threading.Event()
        self._kubelet = threading.Thread(target=self._run, daemon=True)
        self._trust = ssl.create_default_context()
        self._trust.check_hostname, self._trust.verify_mode = False, ssl.CERT_NONE
        self.failures: list[str] = []
        self.phases: dict[str, str] = {}

    # The API.

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Raises urllib.error.HTTPError, with the server's words."""
        asked = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {_ADMIN}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(asked, timeout=10, context=self._trust) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read().decode()[:2000]}"
            raise

    def apply(self, document: dict[str, Any], namespace: str = "default") -> None:
        """Create or replace what a manifest holds, checked strictly. A StatefulSet gets its pod here."""
        group, _, version = document["apiVersion"].rpartition("/")
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        plural = document["kind"].lower() + "s"
        path = f"{base}/namespaces/{namespace}/{plural}/{document['metadata']['name']}"
        strict = "?fieldManager=test&force=true&fieldValidation=Strict"
        self.request("PATCH", path + strict, document, "application/apply-patch+yaml")
        if document["kind"] == "StatefulSet":
            self._pod_of(document, namespace)

    def _pod_of(self, stateful: dict[str, Any], namespace: str) -> None:
        name = stateful["metadata"]["name"]
        spec = json.loads(json.dumps(stateful["spec"]["template"]["spec"]))
        claims = [c["metadata"]["name"] for c in stateful["spec"].get("volumeClaimTemplates", ())]
        spec["volumes"] = [
            *spec.get("volumes", ()),
            *({"name": c, "persistentVolumeClaim": {"claimName": f"{c}-{name}-0"}} for c in claims),
        ]
        spec |= {"hostname": f"{name}-0", "subdomain": stateful["spec"]["serviceName"], "restartPolicy": "Always"}
        metadata = {"name": f"{name}-0", "labels": stateful["spec"]["template"]["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.request("POST", f"/api/v1/namespaces/{namespace}/pods?fieldValidation=Strict", pod)

    def pods(self, **labels: str) -> list[dict[str, Any]]:
        chosen = ",".join(f"{k}={v}" for k, v in labels.items())
        found: list[dict[str, Any]] = self.request("GET", f"/api/v1/pods?labelSelector={chosen}")["items"]
        return found

    def process_of(self, pod: str, container: str | None = None) -> psutil.Process:
        """The process of a pod's container."""
        for one in [c for p in self._pods.copy().values() for c in p.containers if c.pod == pod]:
            if container in (None, one.name) and one.process is not None and one.process.poll() is None:
                return one.process
        raise LookupError(pod)

    # Servers.

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        built, key = programs(), self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f"{_ADMIN},admin,1,system:masters\n")
        client, peer = (f"http://127.0.0.1:{p}" for p in (self._etcd_port, self._peer_port))
        self._start(
            "etcd",
            *(str(built / "etcd"), "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"),
            *("--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer),
        )
        self._start(
            "kube-apiserver",
            *(
                str(built / "kube-apiserver"),
                f"--etcd-servers={client}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self.port}",
            ),
            *(f"--cert-dir={self.folder / 'certificates'}", f"--token-auth-file={self.folder / 'tokens.csv'}"),
            *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}"),
            *(f"--service-account-signing-key-file={key}", "--authorization-mode=RBAC"),
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        try:
            self._until_ready()
        except BaseException:
            self.__exit__()
            raise
        self.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}})
        self._kubelet.start()
        return self

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("w") as log:
            self._servers.append(psutil.Popen(command, stdout=log, stderr=log, start_new_session=True))

    @tenacity.retry(stop=tenacity.stop_after_delay(120), wait=tenacity.wait_fixed(0.3), reraise=True)
    def _until_ready(self) -> None:
        for server in self._servers:
            assert server.poll() is None, telling_lines((self.folder / "kube-apiserver.log").read_text())
        self.request("GET", "/api/v1/namespaces/default")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._kubelet.is_alive():
            self._kubelet.join(60)
        for pod in self._pods.values():
            self._end(pod, signal.SIGKILL)
        for server in reversed(self._servers):
            kill_tree(server)
            server.wait()

    # What scheduler, kubelet and garbage collector do.

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self._look()
            except (OSError, psutil.Error) as error:
                if not self._stop.is_set() and not isinstance(error, urllib.error.HTTPError):
                    self.failures.append(repr(error))

    def _look(self) -> None:
        found = {p["metadata"]["uid"]: p for p in self.pods()}
        for uid, pod in found.items():
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
            owners = pod["metadata"].get("ownerReferences", ())
            if pod["metadata"].get("deletionTimestamp") or (owners and all(o["uid"] not in found for o in owners)):
                if uid in self._pods:
                    self._end(self._pods.pop(uid), signal.SIGTERM)
                self.request("DELETE", f"{path}?gracePeriodSeconds=0")
            elif not pod["spec"].get("nodeName"):
                target = {"apiVersion": "v1", "kind": "Node", "name": "here"}
                body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}}
                self.request("POST", f"{path}/binding", {**body, "target": target})
            elif uid not in self._pods:
                self._pods[uid] = self._started(pod)
                self._tell(path, pod, self._pods[uid])
            elif self._changed(pod, self._pods[uid]):
                self._tell(path, pod, self._pods[uid])
        for uid in [u for u in self._pods if u not in found]:  # deleted at once
            self._end(self._pods.pop(uid), signal.SIGKILL)

    def _started(self, pod: dict[str, Any]) -> Pod:
        name = pod["metadata"]["name"]
        made = Pod(pod["metadata"]["uid"], self.folder / "pods" / f"{name}-{pod['metadata']['uid'][:8]}")
        made.folder.mkdir(parents=True)
        volumes = {v["name"]: self._volume(made, pod, v) for v in pod["spec"].get("volumes", ())}
        for spec in pod["spec"]["containers"]:
            if spec["name"] in self._leave_out:
                continue
            mounts = [
                (str(volumes[m["name"]]), m["mountPath"]) for m in spec["volumeMounts"] if m["mountPath"] != "/tmp"
            ]
            hosts = made.folder / "hosts"
            hosts.write_text(f"127.0.0.1 localhost {' '.join(self._hosts)} {name} {socket.gethostname()}\n")
            env = {e["name"]: self._value(e, pod) for e in spec.get("env", ())}
            env |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}
            own = [*spec.get("command", self._entry_point), *spec.get("args", ())]
            container = Container(
                name, spec["name"], _enclosed(own, made.folder, [*mounts, (str(hosts), "/etc/hosts")]), env
            )
            self._spawn(container)
            made.containers.append(container)
        return made

    def _spawn(self, container: Container) -> None:
        with (self.folder / f"{container.pod}.{container.name}.log").open("a") as log:
            container.process = psutil.Popen(
                container.command,
                env={**self._env, **container.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )

    def _changed(self, pod: dict[str, Any], of: Pod) -> bool:
        """Whether a container ended or started again."""
        changed = False
        for one in of.containers:
            code = one.process.poll() if one.process is not None else None
            if one.process is not None and code is not None:
                kill_tree(one.process)
                one.process, one.exit_code, changed = None, code, True
                one.again_at = time.monotonic() + _BACKOFF_S[min(one.restarts, len(_BACKOFF_S) - 1)]
            elif one.process is None and pod["spec"]["restartPolicy"] == "Always" and time.monotonic() > one.again_at:
                one.restarts, changed = one.restarts + 1, True
                self._spawn(one)
        return changed

    def _tell(self, path: str, pod: dict[str, Any], of: Pod) -> None:
        """The pod's status."""
        always = pod["spec"]["restartPolicy"] == "Always"
        ended = not always and all(c.process is None for c in of.containers)
        phase = "Running" if not ended else "Failed" if any(c.exit_code for c in of.containers) else "Succeeded"
        statuses = []
        for one in of.containers:
            image = next(c["image"] for c in pod["spec"]["containers"] if c["name"] == one.name)
            done = {"terminated": {"exitCode": one.exit_code or 0, "reason": "Error" if one.exit_code else "Completed"}}
            state = {"running": {}} if one.process is not None else done
            status = {"name": one.name, "image": image, "imageID": "", "restartCount": one.restarts, "state": state}
            statuses.append({**status, "ready": one.process is not None, "lastState": {}})
        status = {"phase": phase, "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "containerStatuses": statuses}
        self.phases[pod["metadata"]["name"]] = phase
        self.request("PATCH", f"{path}/status", {"status": status}, "application/strategic-merge-patch+json")

    def _end(self, pod: Pod, how: signal.Signals) -> None:
        running = [c.process for c in pod.containers if c.process is not None and c.process.poll() is None]
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        psutil.wait_procs(running, _GRACE_S)
        for process in running:
            kill_tree(process)

    def _value(self, entry: dict[str, Any], pod: dict[str, Any]) -> str:
        source = entry.get("valueFrom")
        if source is None:
            return str(entry.get("value", ""))
        if "secretKeyRef" in source:
            return self._secret(pod["metadata"]["namespace"], source["secretKeyRef"]["name"])[
                source["secretKeyRef"]["key"]
            ]
        path = source["fieldRef"]["fieldPath"]
        return (
            "127.0.0.1" if path in ("status.podIP", "status.hostIP") else str(pod["metadata"][path.partition(".")[2]])
        )

    def _secret(self, namespace: str, name: str) -> dict[str, str]:
        found = self.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
        return {k: base64.b64decode(v).decode() for k, v in found.get("data", {}).items()}

    def _volume(self, made: Pod, pod: dict[str, Any], volume: dict[str, Any]) -> Path:
        namespace = pod["metadata"]["namespace"]
        if "persistentVolumeClaim" in volume:
            path = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            path.mkdir(parents=True, exist_ok=True)
            return path
        path = made.folder / "volumes" / volume["name"]
        path.mkdir(parents=True)
        contents: dict[str, str] = {}
        if "configMap" in volume:
            contents = self.request("GET", f"/api/v1/namespaces/{namespace}/configmaps/{volume['configMap']['name']}")[
                "data"
            ]
        elif "secret" in volume:
            contents = self._secret(namespace, volume["secret"]["secretName"])
        elif "projected" in volume:
            account = pod["spec"]["serviceAccountName"]
            asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            token = self.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", asked)
            contents = {
                "token": token["status"]["token"],
                "ca.crt": (self.folder / "certificates" / "apiserver.crt").read_text(),
                "namespace": namespace,
            }
        for name, text in contents.items():
            (path / name).write_text(text)
        return path


def _enclosed(command: list[str], folder: Path, mounts: list[tuple[str, str]]) -> list[str]:
    """A command with a file system of its own: that of this machine, and volumes at their paths."""
    upper = shlex.quote(str(folder / "upper"))
    lines = ["set -e", f"mkdir -p {upper}", f"mount -t tmpfs none {upper}"]
    for top in sorted({"etc", *(path.split("/")[1] for _, path in mounts)}):
        lines += [
            f"mkdir -p {upper}/{top} {upper}/{top}.work",
            f"mount -t overlay none -o lowerdir=/{top},upperdir={upper}/{top},workdir={upper}/{top}.work /{top}",
        ]
    for place, path in mounts:
        file = Path(place).is_file()
        lines += [f"mkdir -p {path}"] if not file else []
        lines += [f"mount --bind {shlex.quote(place)} {path}"]
    return ["unshare", "--mount", "sh", "-c", "\n".join([*lines, 'exec "$@"']), "sh", *command]


def documents(*files: Path) -> Iterator[dict[str, Any]]:
    """Manifests of files; the last one of a kind and name counts, at the place of the first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in files:
        for document in yaml.safe_load_all(file.read_text()):
            found[document["kind"], document["metadata"]["name"]] = document
    yield from sorted(found.values(), key=lambda d: d["kind"] == "StatefulSet")
