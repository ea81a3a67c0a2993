"""Boxes of Kubernetes: a pod for each row, through the API of the cluster (the published client speaks it).

    worker ──API──▶ pod: a first container brings bash and a few tools, which process 1 and every command begin with
      └────exec (a websocket)──▶ command: what to run comes on stdin, its end and exit code follow what it prints

A pod belongs to the worker's own pod, with which the cluster removes it; it ends at its time at the latest. A worker
that is started again removes what it left before, by labels. The tools by which commands run come from another image,
in a folder that the policy cannot write. A pod has no network by the NetworkPolicy that `meshrl kubernetes` prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import yaml
from typing_extensions import override

from meshrl.contract.errors import ConfigError, UnavailableError, UserError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import POD_LABELS, BoxLimits, Image, ImageError, is_gone, owner
from meshrl.rollout.containers.commands import (
    ANSWER_S,
    BASH,
    HOLD,
    OWNER,
    PROGRAMS,
    ROW,
    TOOLS,
    CommandBox,
)
from meshrl.rollout.containers.enter import CAPABILITIES

try:
    from kubernetes import client, config, stream
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError
    from websocket import ABNF
except ImportError as error:
    raise ConfigError("kubernetes needs: pip install 'meshrl[kubernetes]'") from error

T = TypeVar("T")
WHERE = "rollout.containers"
RUN_LABEL = "app.kubernetes.io/instance"
HOME = "meshrl.home"
"""Label: the pod, or the machine, of whose worker a box is."""
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
START_S = 600.0
"""Most seconds until a pod runs: it is scheduled, and its image pulled."""
LOOK_S = 0.25
BROKEN = re.compile("ErrImage.*|ImagePullBackOff|InvalidImageName|(Create|Run)Container.*Error")
"""Reasons for which nothing runs of an image."""
PIECE = 64 << 10
STDOUT, STATUS = b"\1", b"\3"
"""Channels of an exec."""
POD = yaml.safe_load("""
automountServiceAccountToken: false
dnsConfig: {nameservers: [127.0.0.1]}
dnsPolicy: "None"
enableServiceLinks: false
hostname: box
hostUsers: false
restartPolicy: Never
terminationGracePeriodSeconds: 1
volumes: [{name: tools, emptyDir: {}}]
""")
CONFINED = yaml.safe_load("""
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
runAsUser: 0
runAsGroup: 0
seccompProfile: {type: RuntimeDefault}
""")
CONFINED["capabilities"]["add"] = [name.removeprefix("CAP_") for name in CAPABILITIES]
COPY = f"""
set -e
for name in {" ".join(PROGRAMS)}; do
    path=$(command -v $name)
    cp -L "$path" "$0/$name"
    for library in $(ldd "$path" | grep -o '/[^ ]* (0x' | cut -d ' ' -f 1); do
        known=${{library##*/}}
        case $known in ld-*) known=ld.so ;; esac
        cp -L "$library" "$0/$known"
    done
done
"""
"""Fills the folder of tools."""


def build(config_: ContainersConfig) -> Kubernetes:
    """The backend for a recipe. Raises ConfigError: no cluster that answers, or one that cannot hold boxes."""
    if config_.lent or config_.limits.hosts:
        key = "lent" if config_.lent else "limits.hosts"
        raise ConfigError(f"{WHERE}.{key}: kubernetes shares neither files nor a network with pods")
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = config_.boxes + 2 * config_.starts
    try:
        if inside := NAMESPACE.exists():
            config.load_incluster_config(client_configuration=configuration)
            namespace = NAMESPACE.read_text()
        else:
            config.load_kube_config(client_configuration=configuration)
            context = config.list_kube_config_contexts()[1]["context"]
            namespace = context.get("namespace", "default")
    except config.ConfigException as error:
        raise ConfigError(f"{WHERE}.backend: no service account, no kubeconfig: {error}") from error
    made = Kubernetes(configuration, namespace, config_)
    try:
        made.find_home(inside)
    except (ApiException, HTTPError) as error:
        told = f"{WHERE}.backend: {configuration.host}: {_reason(error)}"
        raise ConfigError(f"{told}; `meshrl kubernetes` prints the Role that is needed") from error
    return made


class Kubernetes:
    """The backend."""

    def __init__(
        self, configuration: client.Configuration, namespace: str, config_: ContainersConfig
    ) -> None:
        """Ask for nothing yet."""
        self.namespace = namespace
        self.api = client.CoreV1Api(client.ApiClient(configuration))
        self.boxes: set[PodBox] = set()
        self._configuration = configuration
        self._config = config_
        calls = configuration.connection_pool_maxsize
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="pods")
        self._metadata: dict[str, Any] = {}
        self._inside = False

    def find_home(self, inside: bool) -> None:
        """Learn whose pods they will be. Raises ApiException, HTTPError, ConfigError: pods would have a network."""
        name = os.environ.get("MESHRL_NAME") if inside else None
        name = name or socket.gethostname()
        labels = {**POD_LABELS, OWNER: owner(), HOME: _label(name)}
        self._metadata, self._inside = {"labels": labels}, inside
        if inside:
            pod = self.api.read_namespaced_pod(name, self.namespace, _request_timeout=ANSWER_S)
            mine = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod.metadata.uid}
            self._metadata["ownerReferences"] = [mine]
            if run := (pod.metadata.labels or {}).get(RUN_LABEL):
                labels[RUN_LABEL] = run
        networking = client.NetworkingV1Api(self.api.api_client)
        policies = networking.list_namespaced_network_policy(
            self.namespace, _request_timeout=ANSWER_S
        )
        for each in (policy.spec for policy in policies.items):
            closes = set(each.policy_types or ()) == {"Ingress", "Egress"}
            closes = closes and not each.ingress and not each.egress
            if closes and each.pod_selector.match_labels == POD_LABELS:
                return
        raise ConfigError(
            f"{WHERE}.backend: no NetworkPolicy in {self.namespace} closes the network of pods with the label"
            " app.kubernetes.io/name=meshrl-box; apply the one that `meshrl kubernetes` prints"
        )

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """A call of the client in a thread. Raises ApiException, UnavailableError: no answer, or overload."""
        work = functools.partial(function, *arguments, _request_timeout=ANSWER_S)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (ApiException, HTTPError) as error:
            if isinstance(error, ApiException) and error.status in (400, 404, 409, 422):
                raise
            problem = f"the cluster at {self._configuration.host}: {_reason(error)}"
            raise UnavailableError(problem) from error

    def connect(self, name: str, script: str) -> Any:
        """The websocket of a command; called in threads. Raises ApiException."""
        # One for each, as `stream` exchanges a method of it while it connects.
        api = client.CoreV1Api(client.ApiClient(self._configuration))
        return stream.stream(
            api.connect_get_namespaced_pod_exec,
            name,
            self.namespace,
            command=[*BASH, script, "meshrl"],
            container="box",
            stdin=True,
            stdout=True,
            stderr=False,
            tty=False,
            binary=True,
            _preload_content=False,
        )

    async def prepare(self, image: Image) -> None:
        """Run a box of it once, which pulls it. Raises ImageError, UnavailableError."""
        if image.build is not None:
            raise ImageError(
                f"{image.build}: a cluster builds no Dockerfile; push its image and name that, or name another one in"
                " rollout.program_options.root, in which each row does what the Dockerfile says"
            )
        await (await self.start(image, self._config.limits, row="image")).close()

    async def start(self, image: Image, limits: BoxLimits, *, row: str) -> PodBox:
        """A pod that runs. Raises ImageError, UnavailableError."""
        box = PodBox(self, f"meshrl-box-{uuid.uuid4().hex}", image, limits)
        self.boxes.add(box)
        creating = self.call(
            self.api.create_namespaced_pod, self.namespace, self._pod(box.name, image, limits, row)
        )
        try:
            await box.open(creating, box.begin)
        except ApiException as error:
            raise ImageError(f"no pod starts from {image.name}: {_reason(error)}") from error
        return box

    def _pod(self, name: str, image: Image, limits: BoxLimits, row: str) -> dict[str, Any]:
        end_s = int(limits.time_s) + 1
        most = {
            "cpu": f"{max(1, int(limits.cpus * 1000))}m",
            "memory": str(limits.memory_bytes),
            "ephemeral-storage": str(limits.disk_bytes),
        }
        both = {"resources": {"limits": most, "requests": most}, "securityContext": CONFINED}
        mount = {"name": "tools", "mountPath": TOOLS}
        bring = {
            "name": "tools",
            "image": self._config.tools,
            "command": ["bash", "-c", COPY, TOOLS],
            "volumeMounts": [mount],
        }
        held = {
            "name": "box",
            "image": image.name,
            "command": [*BASH, HOLD, str(end_s)],
            "workingDir": "/",
            "volumeMounts": [{**mount, "readOnly": True}],
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **self._metadata,
                "name": name,
                "labels": {**self._metadata["labels"], ROW: _label(row)},
                "annotations": {ROW: row},
            },
            "spec": {
                **POD,
                "activeDeadlineSeconds": end_s + int(START_S),
                "containers": [{**held, **both}],
                "initContainers": [{**bring, **both}],
            },
        }

    async def sweep(self) -> int:
        """Remove the pods of this worker's pod, or machine, whose owner is no more. Raises UnavailableError."""
        removed = 0
        where = f"{HOME}={self._metadata['labels'][HOME]}"
        listed = functools.partial(self.api.list_namespaced_pod, label_selector=where)
        for each in (await self.call(listed, self.namespace)).items:
            whose = each.metadata.labels[OWNER]
            if whose != owner() and (self._inside or is_gone(whose)):
                await self.delete(each.metadata.name)
                removed += 1
        return removed

    async def delete(self, name: str) -> None:
        """Delete a pod; none of that name is fine. Raises UnavailableError."""
        try:
            await self.call(self.api.delete_namespaced_pod, name, self.namespace)
        except ApiException as error:
            if error.status != 404:
                raise UnavailableError(f"the pod {name}: {_reason(error)}") from error

    async def close(self) -> None:
        """Delete what is left, and close the connections; idempotent. Raises UnavailableError."""
        await asyncio.gather(*(box.close() for box in list(self.boxes)))
        self._threads.shutdown(wait=False)
        self.api.api_client.close()


class PodBox(CommandBox):
    """A running pod."""

    def __init__(self, cluster: Kubernetes, name: str, image: Image, limits: BoxLimits) -> None:
        super().__init__(name, limits)
        self._cluster = cluster
        self._image = image.name
        self._waits_for = ""

    async def begin(self, made: Any) -> None:
        """Wait until it runs. Raises ImageError, UnavailableError, ApiException."""
        if made.spec.host_users is not False:
            raise UnavailableError("the cluster has no user namespaces (Kubernetes 1.33)")
        try:
            async with asyncio.timeout(START_S):
                while not self._started((await self._read()).status):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            problem = f"a pod of {self._image} does not start within {START_S:g} s"
            raise UnavailableError(f"{problem}: {self._waits_for}") from error

    def _started(self, status: Any) -> bool:
        """Whether it runs. Raises ImageError, UnavailableError."""
        if status.phase in ("Failed", "Succeeded"):
            why = f"{status.reason or status.phase}: {status.message or 'its containers ended'}"
            raise UnavailableError(f"a pod of {self._image} ended while it started: {why}")
        waits = [each.message for each in status.conditions or () if each.status == "False"]
        self._waits_for = "; ".join(filter(None, waits)) or "nothing is said why"
        own = status.container_statuses or []
        for each in (*(status.init_container_statuses or ()), *own):
            waiting = each.state.waiting if each.state else None
            if waiting is not None and BROKEN.fullmatch(waiting.reason or ""):
                told = f"{each.image}: {waiting.reason}: {waiting.message or ''}"
                if each in own:
                    raise ImageError(f"no pod starts from {told}")
                raise UnavailableError(f"{WHERE}.tools: no pod starts: {told}")
        return any(each.state is not None and each.state.running is not None for each in own)

    @override
    def talk(self, script: str, given: bytes) -> Iterator[bytes | int]:
        status = b""
        opened = self._cluster.connect(self.name, script)
        try:
            for start in range(0, len(given), PIECE):
                opened.write_stdin(given[start : start + PIECE])
            # Not its own `update`: that one reads on as long as there is anything, and keeps all of it.
            while (received := opened.sock.recv_data_frame(True))[0] != ABNF.OPCODE_CLOSE:
                channel, data = received[1].data[:1], received[1].data[1:]
                if channel == STDOUT:
                    yield data
                elif channel == STATUS:
                    status += data
        finally:
            opened.sock.shutdown()
        with contextlib.suppress(LookupError):  # it was no exit code that ended it
            yield int(yaml.safe_load(status)["details"]["causes"][0]["message"])

    async def listen(self) -> socket.socket:
        """Always raises UserError."""
        raise UserError(f"{self.name}: a worker cannot listen on the loopback of a pod")

    @override
    async def remove(self) -> None:
        await self._cluster.delete(self.name)
        self._cluster.boxes.discard(self)

    @override
    async def runs(self) -> bool:
        if self.closed:
            return False
        try:
            pod = await self._read()
        except ApiException:
            return False
        return bool(pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None)

    async def _read(self) -> Any:
        cluster = self._cluster
        return await cluster.call(cluster.api.read_namespaced_pod, self.name, cluster.namespace)


def _label(text: str) -> str:
    """A text as a value of a label."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")


def _reason(error: Exception) -> str:
    """The reason of a refusal in one line."""
    with contextlib.suppress(ValueError, TypeError, LookupError, yaml.YAMLError):
        return str(yaml.safe_load(getattr(error, "body", None) or "")["message"])
    return str(getattr(error, "reason", None) or error)
