"""Plays the pods that `meshrl kubernetes` prints on this machine: a stand-in for kubelet and network, for tests.

Each pod is a process with a network namespace, an address and a root of its own (read-only, by bubblewrap), the
environment, the command and the volumes of its manifest, and the names of its Services in /etc/hosts. NetworkPolicies
are not enforced: `may_call` reads them, and `connections` lists the open connections.

Run it as root in namespaces of its own: `unshare --net --mount`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OWN = ("proc", "dev", "tmp", "sys", "mesh", "recipe", "credentials", "assets")
"""Folders of the root that are a pod's own, or none of its."""
Manifest = Mapping[str, Any]


@dataclass(eq=False)
class Pod:
    """One pod; `process` is its container's."""

    name: str
    host: str
    """Its name under its Service, if it has one; `name` otherwise."""
    template: Manifest = field(repr=False)
    claims: Mapping[str, str]
    """Claim by volume, of a StatefulSet."""
    address: str
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def kind(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Cluster:
    """The pods of some manifests, in `folder`; `claims` are folders of PersistentVolumeClaims that exist."""

    def __init__(
        self, objects: Sequence[Manifest], folder: Path, claims: Mapping[str, Path]
    ) -> None:
        self.objects, self.folder = objects, folder
        self.volumes = dict(claims)
        self.pods: list[Pod] = []
        # The names of network namespaces are files there, which would stay behind.
        Path("/run/netns").mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "pods", "/run/netns")
        _run("ip", "link", "add", "pods", "type", "bridge")
        _run("ip", "addr", "add", "10.77.0.1/16", "dev", "pods")
        _run("ip", "link", "set", "pods", "up")
        for each in objects:
            spec = each.get("spec", {})
            for number in range(spec.get("replicas", spec.get("completions", 1))):
                if "template" in spec:
                    self.add(each, number)

    def add(self, owner: Manifest, number: int) -> Pod:
        """One more pod of a workload."""
        name, address = f"{owner['metadata']['name']}-{number}", f"10.77.0.{2 + len(self.pods)}"
        spec = owner["spec"]
        claims = {c["metadata"]["name"]: name for c in spec.get("volumeClaimTemplates", [])}
        subdomain = spec.get("serviceName") or spec["template"]["spec"].get("subdomain")
        host = f"{name}.{subdomain}" if subdomain else name
        pod = Pod(name, host, spec["template"], claims, address)
        inside, outside = f"in{len(self.pods)}", f"out{len(self.pods)}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        _run("ip", "link", "set", outside, "master", "pods", "up")
        for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/16", "dev", inside]):
            _run("ip", "-n", name, *words)
        _run("ip", "-n", name, "link", "set", inside, "up")
        self.pods.append(pod)
        return pod

    def workload(self, name: str) -> Manifest:
        """The manifest that makes the pods of that name."""
        named = (each for each in self.objects if each["metadata"]["name"] == name)
        return next(each for each in named if "template" in each.get("spec", {}))

    def of(self, kind: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.kind == kind]

    def start(self, pod: Pod) -> None:
        """Start its container, with new empty folders and the claims as they are."""
        (container,) = pod.template["spec"]["containers"]
        hosts = self.folder / f"{pod.name}.hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(self._names()))
        words = ["ip", "netns", "exec", pod.name, "bwrap", "--die-with-parent", "--clearenv"]
        words += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--unshare-pid"]
        for entry in sorted(Path("/").iterdir()):
            if entry.is_symlink():
                words += ["--symlink", str(entry.readlink()), str(entry)]
            elif entry.name not in OWN and entry.is_dir():
                words += ["--ro-bind", str(entry), str(entry)]
        words += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", str(hosts), "/etc/hosts"]
        for mount in container["volumeMounts"]:
            source = self._source(pod, mount["name"])
            bind = "--ro-bind" if mount.get("readOnly") else "--bind"
            words += [bind, str(source), mount["mountPath"]]
        words += ["--ro-bind", str(ROOT), str(ROOT), "--chdir", "/mesh", "--remount-ro", "/"]
        words += ["--setenv", "PATH", os.environ["PATH"], "--setenv", "OMP_NUM_THREADS", "1"]
        for variable in container["env"]:
            value = variable.get("value", pod.name)
            words += ["--setenv", variable["name"], value]
        program = [sys.executable, "-P", "-m", "meshrl.cli", *container["args"]]
        with (self.folder / f"{pod.name}.log").open("ab") as log:
            pod.process = subprocess.Popen(
                [*words, *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _names(self) -> Iterator[str]:
        for pod in self.pods:
            yield f"{pod.address} {pod.host}\n"
        for each in self.objects:
            if each["kind"] == "Service":
                chosen = (pod for pod in self.pods if _matches(each["spec"]["selector"], pod))
                yield from (f"{pod.address} {each['metadata']['name']}\n" for pod in chosen)

    def _source(self, pod: Pod, volume: str) -> Path:
        if volume in pod.claims:
            return self._claim(pod.claims[volume])
        (found,) = [each for each in pod.template["spec"]["volumes"] if each["name"] == volume]
        if "persistentVolumeClaim" in found:
            return self._claim(found["persistentVolumeClaim"]["claimName"])
        folder = self.folder / f"{pod.name}.{volume}"
        folder.mkdir(exist_ok=True)
        for kind, key in (("ConfigMap", "name"), ("Secret", "secretName")):
            if (named := found.get(kind[0].lower() + kind[1:])) is None:
                continue
            (held,) = [
                each
                for each in self.objects
                if (each["kind"], each["metadata"]["name"]) == (kind, named[key])
            ]
            for name, text in (held.get("data") or held["stringData"]).items():
                (folder / name).write_text(text)
                (folder / name).chmod(named.get("defaultMode", 0o644))
        return folder

    def _claim(self, name: str) -> Path:
        folder = self.volumes.setdefault(name, self.folder / f"claim-{name}")
        folder.mkdir(exist_ok=True)
        return folder

    def connections(self) -> set[tuple[Pod, Pod, int]]:
        """The open connections: both pods and the port."""
        at = {pod.address: pod for pod in self.pods}
        found = set()
        for pod in self.pods:
            sockets = _sockets(pod)
            listening = {own for state, own, _ in sockets if state == "LISTEN"}
            found |= {
                (at[there], pod, own)
                for state, own, there in sockets
                if state == "ESTAB" and own in listening and there in at and at[there] is not pod
            }
        return found

    def may_call(self, caller: Pod, called: Pod, port: int) -> bool:
        """Whether the NetworkPolicies let a pod out to another one, and in there."""
        out = self._allows("egress", "to", caller, called, port)
        return out and self._allows("ingress", "from", called, caller, port)

    def _allows(self, way: str, peers: str, pod: Pod, other: Pod, port: int) -> bool:
        policies = [each["spec"] for each in self.objects if each["kind"] == "NetworkPolicy"]
        rules = (
            rule
            for spec in policies
            if way.title() in spec["policyTypes"] and _selects(spec["podSelector"], pod)
            for rule in spec[way]
        )
        return any(
            any(_selects(peer["podSelector"], other) for peer in rule.get(peers, []))
            and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
            for rule in rules
        )

    def close(self) -> None:
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.kill()


def _sockets(pod: Pod) -> list[tuple[str, int, str]]:
    """State, own port and the other end's address of its TCP sockets."""
    words = ["ip", "netns", "exec", pod.name, "ss", "-Htan"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for line in lines:
        state, _, _, own, there, *_ = line.split()
        address = there.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        found.append((state, int(own.rpartition(":")[2]), address))
    return found


def _matches(labels: Mapping[str, str], pod: Pod) -> bool:
    return labels.items() <= pod.labels.items()


def _selects(selector: Manifest, pod: Pod) -> bool:
    return _matches(selector.get("matchLabels", {}), pod) and all(
        pod.labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
