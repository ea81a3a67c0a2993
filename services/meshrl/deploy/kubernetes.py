"""The manifests of a mesh on Kubernetes, from its recipe: workloads, their resources, and network policies.

    queue      StatefulSet and its volume                  trainer   Job (ends the run), a volume for checkpoints
    feeder     Job                                         reward, reference, rollout, stages   Deployments
    tinker     StatefulSet and its volume, alone

Everything that may differ between clusters is left to a kustomization over what is printed here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from meshrl.common.device_lease import DeviceShare
from meshrl.common.object_store import is_local
from meshrl.config.loading import recipe_yaml
from meshrl.config.placement import Placement
from meshrl.config.recipe import Recipe, names
from meshrl.config.stages import MeshService, mesh_services
from meshrl.contract.errors import UserError
from meshrl.deploy.engine_group import EngineGroup
from meshrl.rollout.containers.box import POD_LABELS
from meshrl.rpc import credentials
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.exit_codes import Exit

Manifest: TypeAlias = dict[str, Any]

PORT, METRICS_PORT = 7001, 9100
CALLED: Mapping[str, Sequence[str]] = {
    "queue": (),
    "trainer": ("rollout",),
    "reward": ("trainer",),
}
"""Callers by service; all services call the queue. `meshrl.rpc.identity` says what each may ask."""
KEEPERS = ("queue", "tinker")
"""Kinds of one process with a volume of its own, which is never evicted on purpose."""
PEER_CARRIERS = ("gloo", "nccl", "auto", "delta")
"""Carriers for which trainer and rollout pods open ports of their own choice between each other."""
URL = "an object store's URL in weights.directory, such as s3://bucket/prefix"
WORK, RECIPE_AT, CREDENTIALS_AT, TLS_AT = "/mesh/runs", "/recipe", "/credentials", "/tls"
GRACE_S = 15
"""Beyond a service's own drain, before the kubelet kills it."""
API_PORTS = (443, 6443)
"""Ports of the cluster's API: of its Service, and of its servers."""
UID = 1000
GROUPS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
NEEDS: Mapping[str, Mapping[str, str]] = {
    "torch": {"cpu": "2", "memory": "4Gi"},
    "other": {"cpu": "500m", "memory": "512Mi"},
}
"""Resources of a container, beside its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Settings of the cluster that no recipe has."""

    image: str = "meshrl"
    engine_image: str = ""
    """Image of rollout workers, e.g. with vLLM; empty: `image`."""
    storage: str = "20Gi"
    """Size of the volumes of the queue and of the checkpoints."""
    storage_class: str = ""
    """Storage class of these volumes; empty: the cluster's default."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Existing PersistentVolumeClaims with models and data, and where they are mounted, read-only."""
    gpu: str = "nvidia.com/gpu"
    """The resource that is a GPU."""
    most_workers: int = 0
    """Up to which number KEDA scales rollout workers, by the queue's hint; 0: as many as the recipe says."""
    prometheus: str = "http://prometheus:9090"
    """Address at which KEDA asks for the hint."""
    engine_nodes: int = 1
    """Nodes of each rollout worker's server; more than one: a LeaderWorkerSet."""
    engine_gpus: int = 0
    """GPUs of such a server, on each of its nodes."""
    issuer: str = ""
    """cert-manager's Issuer of the mesh's certificate; empty: the Secret with it exists."""
    monitor: bool = False
    """Let the Prometheus operator scrape every service, with the run's credential of the role `reader`."""


class _ManifestDumper(yaml.SafeDumper):
    """YAML without aliases, with texts of several lines as they are."""

    def ignore_aliases(self, data: object) -> bool:
        """Ignore all aliases."""
        return True


_ManifestDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def as_yaml(objects: Sequence[Manifest]) -> str:
    """The text that `kubectl apply -f -` reads."""
    text: str = yaml.dump_all(objects, Dumper=_ManifestDumper, sort_keys=False, width=120)
    return text


def object_name(run: str) -> str:
    """A run's name as a prefix of objects' names: lower case letters, digits and `-`, at most 40."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:40].strip("-")


def manifests(
    recipe: Recipe, placement: Placement, files: Mapping[str, str], cluster: Cluster
) -> list[Manifest]:
    """Everything but the Secrets, in the order in which it can be applied.

    Args:
        recipe: As the services read it.
        placement: Who gets how many GPUs.
        files: Name to text of what lies beside the recipe, such as a reward.
        cluster: The rest.

    Raises:
        UserError: services would share a GPU, which pods cannot; a certificate is wanted that the recipe lacks.
    """
    return list(_MeshManifests(recipe, placement, files, cluster).objects())


def secrets(recipe: Recipe, run_dir: Path) -> list[Manifest]:
    """The run's identity: for each role the Secret that its pods mount. Makes the credentials where there are none.

    Raises:
        UserError: the directory cannot be written.
    """
    credentials.open_run_directory(run_dir)
    name = object_name(recipe.run.name)
    verifiers = credentials.verifiers_file(run_dir).read_text()
    found = []
    roles = {credentials.role_of(service.kind) for service in mesh_services(recipe)}
    for role in [*sorted({role for role in roles if role}), MeshRole.READER]:
        token = credentials.file_of_role(run_dir, role).read_text().strip()
        data = {"credential": token, "verifiers.json": verifiers}
        found.append(_object("v1", "Secret", f"{name}-{role}", name, stringData=data))
    for kind in {service.kind for service in mesh_services(recipe)} & set(KEEPERS):
        data = {"verifiers.json": verifiers}
        found.append(_object("v1", "Secret", f"{name}-{kind}", name, stringData=data))
    return found


def _object(
    version: str, kind: str, name: str, run: str, *, component: str = "", **fields: Any
) -> Manifest:
    metadata = {"name": name, "labels": _labels(run, component)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _labels(run: str, component: str = "") -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "meshrl", "app.kubernetes.io/instance": run}
    return labels | ({"app.kubernetes.io/component": component} if component else {})


class _MeshManifests:
    """The objects of one run."""

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        files: Mapping[str, str],
        cluster: Cluster,
    ) -> None:
        self.recipe, self.placement, self.files, self.cluster = recipe, placement, files, cluster
        self.run = object_name(recipe.run.name)
        self.services: dict[str, list[MeshService]] = {}
        for service in mesh_services(recipe):
            self.services.setdefault(service.kind, []).append(service)
        self.http = {"reward": recipe.reward.registry.http_port or 0}
        """Ports of HTTP APIs that the recipe chooses; callers need a key."""
        if recipe.tinker is not None:
            self.http["tinker"] = recipe.tinker.http_port
            if not recipe.tinker.http_port:
                raise UserError("tinker.http_port: 0: want a port, by which others call the pod")
        self.called = {kind: CALLED[kind] for kind in self.services if kind in CALLED}
        self.group: EngineGroup | None = None
        if cluster.engine_nodes > 1:
            self.group = EngineGroup(
                nodes=cluster.engine_nodes,
                gpus=cluster.engine_gpus,
                gpu=cluster.gpu,
                image=cluster.engine_image or cluster.image,
            )
            self.group.check(recipe)
        if cluster.issuer and recipe.tls.cert is None:
            raise UserError(
                f"--cert-manager: the recipe has no certificate; want tls.cert={TLS_AT}/tls.crt,"
                f" tls.key={TLS_AT}/tls.key and tls.ca={TLS_AT}/ca.crt"
            )
        for first, second in _sharing(placement):
            raise UserError(
                f"placement: {first} and {second} share a GPU, which pods cannot; want placement.colocate=false,"
                " and more GPUs"
            )

    def objects(self) -> Iterator[Manifest]:
        yield self._object("v1", "ConfigMap", "recipe", data=dict(self.files))
        if "trainer" in self.services:
            claim = self._claim(shared=self.recipe.trainer.nnodes > 1)
            yield self._object("v1", "PersistentVolumeClaim", "trainer", spec=claim)
        for kind, services in self.services.items():
            if kind in self.called or self.http.get(kind):
                yield self._service(kind)
            yield self._workload(kind, services)
            if kind in KEEPERS:
                kept = {"maxUnavailable": 0, "selector": self._selector(kind)}
                yield self._object("policy/v1", "PodDisruptionBudget", kind, spec=kept)
        yield from self._policies()
        if self._makes_pods("rollout"):
            yield from self._rights()
        if self.cluster.issuer:
            yield self._certificate()
        if self.cluster.most_workers:
            yield self._scaled()
        if self.cluster.monitor:
            yield self._monitor()

    def _object(self, version: str, kind: str, name: str, **fields: Any) -> Manifest:
        return _object(version, kind, f"{self.run}-{name}", self.run, **fields)

    def _selector(self, component: str = "") -> Manifest:
        return {"matchLabels": _labels(self.run, component)}

    def _service(self, kind: str) -> Manifest:
        """Headless: names of pods. Callers try again by themselves, so pods are named before they are ready."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(self.run, kind),
            "ports": [{"name": name, "port": port} for name, port in self._ports(kind).items()],
        }
        return self._object("v1", "Service", kind, component=kind, spec=spec)

    def _ports(self, kind: str) -> dict[str, int]:
        http = self.http.get(kind)
        return {"grpc": PORT, "metrics": METRICS_PORT, **({"http": http} if http else {})}

    def _workload(self, kind: str, services: Sequence[MeshService]) -> Manifest:
        rules, name = services[0].rules, f"{self.run}-{kind}"
        template = {
            "metadata": {"labels": _labels(self.run, kind)},
            "spec": self._pod(kind, services[0]),
        }
        if rules.finite:
            return self._job(kind, template)
        if kind == "rollout" and self.group is not None:
            groups = self.group.spec(self.recipe, template, _labels(self.run, "engine"))
            return self._object(*GROUPS, kind, component=kind, spec=groups)
        spec: Manifest = {"selector": self._selector(kind), "template": template}
        if kind != "rollout" or not self.cluster.most_workers:
            spec["replicas"] = len(services)
        if kind not in KEEPERS:
            return self._object("apps/v1", "Deployment", kind, component=kind, spec=spec)
        spec |= {
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "volumeClaimTemplates": [{"metadata": {"name": "work"}, "spec": self._claim()}],
        }
        return self._object("apps/v1", "StatefulSet", kind, component=kind, spec=spec)

    def _job(self, kind: str, template: Manifest) -> Manifest:
        # The pod's name, from the Job's and its index, is the trainer's address: it stays when the pod is replaced.
        template["spec"]["restartPolicy"] = "Never"
        if kind in CALLED:
            template["spec"]["subdomain"] = f"{self.run}-{kind}"
        wrong = {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": kind,
                "operator": "In",
                "values": [int(Exit.USER_ERROR)],
            },
        }
        evicted = {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
        pods = len(self.services[kind])  # a trainer's ranks end together, and each pod counts
        spec = {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 10 * pods,
            "podFailurePolicy": {"rules": [wrong, evicted]},
            "template": template,
        }
        return self._object("batch/v1", "Job", kind, component=kind, spec=spec)

    def _claim(self, shared: bool = False) -> Manifest:
        spec: Manifest = {
            "accessModes": ["ReadWriteMany" if shared else "ReadWriteOnce"],
            "resources": {"requests": {"storage": self.cluster.storage}},
        }
        if self.cluster.storage_class:
            spec["storageClassName"] = self.cluster.storage_class
        return spec

    def _pod(self, kind: str, service: MeshService) -> Manifest:
        volumes = self._volumes(kind)
        mounts = [
            {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
            for name, path, read_only, _ in volumes
        ]
        context: Manifest = {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        pod = {
            "automountServiceAccountToken": self._makes_pods(kind),
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": int(service.rules.drain_s) + GRACE_S,
            "securityContext": context,
            "containers": [{**self._container(kind, service), "volumeMounts": mounts}],
            "volumes": [
                {"name": name, **source} for name, _, _, source in volumes if source is not None
            ],
        }
        if self._makes_pods(kind):
            pod["serviceAccountName"] = f"{self.run}-{kind}"
        if self._sandboxes(kind):
            pod["hostUsers"] = False
        return pod

    def _container(self, kind: str, service: MeshService) -> Manifest:
        rules, image = service.rules, self.cluster.image
        if kind == "rollout" and self.cluster.engine_image and not self._serves(kind):
            image = self.cluster.engine_image
        share = self.placement.share(service.name)
        gpus = len(share.devices) if share is not None else 0
        needs = dict(NEEDS["torch" if self._needs_torch(kind) else "other"])
        resources: Manifest = {"requests": needs}
        if gpus:
            resources["limits"] = {self.cluster.gpu: gpus}
        probe = self._probe()
        return {
            "name": kind,
            "image": image,
            "args": ["serve", kind, f"{RECIPE_AT}/recipe.yaml"],
            "env": list(self._environment(kind, share)),
            "ports": [
                {"name": name, "containerPort": port} for name, port in self._ports(kind).items()
            ],
            "resources": resources,
            "startupProbe": {
                **probe,
                "periodSeconds": 5,
                "failureThreshold": int(rules.ready_s(self.recipe) / 5),
            },
            "readinessProbe": {**probe, "periodSeconds": 10},
            "securityContext": self._confinement(kind),
        }

    def _serves(self, kind: str) -> bool:
        """Whether its pods have a server of `group` beside it."""
        return kind == "rollout" and self.group is not None

    def _needs_torch(self, kind: str) -> bool:
        return self.services[kind][0].rules.needs_torch(self.recipe) or self._serves(kind)

    def _confinement(self, kind: str) -> Manifest:
        held: Manifest = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if self._sandboxes(kind):
            # bubblewrap makes namespaces of its own, in the user namespace that `hostUsers: false` gives the pod.
            held |= {"seccompProfile": {"type": "Unconfined"}, "procMount": "Unmasked"}
        return held

    def _sandboxes(self, kind: str) -> bool:
        """Whether a kind of service makes strict sandboxes: of submitted rewards, or of the tool `python`."""
        if kind != "reward":
            tools = self.recipe.rollout.program_options.get("tools")
            given = tools if isinstance(tools, list) else []
            named = (tool for tool in given if isinstance(tool, Mapping))
            return kind == "rollout" and any("python" in tool for tool in named)
        reward = self.recipe.reward
        asks = reward.registry.tokens is not None or self.recipe.tls.client_ca is not None
        return (asks and reward.sandbox == "strict") or reward.recipe_sandbox == "strict"

    def _makes_pods(self, kind: str) -> bool:
        """Whether a kind of service has a pod for each row."""
        pods = self.recipe.rollout.containers.backend == "kubernetes"
        return pods and kind == "rollout" and kind in self.services

    def _rights(self) -> Iterator[Manifest]:
        """The rights of rollout workers over pods of rows, their way to the API, and no network for those pods."""
        verbs = {
            ("", "pods"): ["create", "get", "list", "delete"],
            ("", "pods/exec"): ["create", "get"],
            ("networking.k8s.io", "networkpolicies"): ["list"],
        }
        rules = [
            {"apiGroups": [group], "resources": [kind], "verbs": may}
            for (group, kind), may in verbs.items()
        ]
        group, name = "rbac.authorization.k8s.io", f"{self.run}-rollout"
        yield self._object("v1", "ServiceAccount", "rollout")
        yield self._object(f"{group}/v1", "Role", "rollout", rules=rules)
        yield self._object(
            f"{group}/v1",
            "RoleBinding",
            "rollout",
            roleRef={"apiGroup": group, "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name}],
        )
        ports = [{"port": port, "protocol": "TCP"} for port in API_PORTS]
        yield self._policy("call-api", self._selector("rollout"), egress=[{"ports": ports}])
        yield self._policy("boxes", {"matchLabels": dict(POD_LABELS)}, ingress=[], egress=[])

    def _probe(self) -> Manifest:
        """The kubelet's own probe speaks no TLS."""
        if self.recipe.tls.cert is None:
            return {"grpc": {"port": PORT}}
        asks = ["meshrl", "health", f"127.0.0.1:{PORT}"]
        return {"exec": {"command": asks}, "timeoutSeconds": 10}

    def _environment(self, kind: str, share: DeviceShare | None) -> Iterator[Manifest]:
        values = {f"MESHRL_{called.upper()}": self._address(called) for called in self.called}
        values |= {
            "MESHRL_HOST": "0.0.0.0",
            "MESHRL_PORT": str(PORT),
            "MESHRL_METRICS_PORT": str(METRICS_PORT),
            credentials.VERIFIERS_VARIABLE: f"{CREDENTIALS_AT}/{credentials.VERIFIERS_NAME}",
            "HOME": "/tmp",
        }
        if credentials.role_of(kind) is not None:
            values[credentials.FILE_VARIABLE] = f"{CREDENTIALS_AT}/credential"
        if not self.recipe.encrypted:  # the NetworkPolicies keep others out
            values["MESHRL_ALLOW_INSECURE_BIND"] = "1"
        # The probe, which is a command in the container, shows and trusts what the services do.
        for name in ("ca", "cert", "key"):
            path = getattr(self.recipe.tls, name)
            if path is not None and (name == "ca" or self.recipe.tls.client_ca is not None):
                values[f"MESHRL_TLS_{name.upper()}"] = str(path)
        if share is not None and share.devices:
            # The pod's own GPUs, which its container numbers from 0.
            own = tuple(str(number) for number in range(len(share.devices)))
            values |= DeviceShare(devices=own, memory=share.memory).environment
        yield from ({"name": name, "value": value} for name, value in values.items())
        # A worker is known by its name.
        yield {"name": "MESHRL_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}

    def _address(self, kind: str) -> str:
        name = f"{self.run}-{kind}"
        if kind in self.http:
            return f"{name}:{PORT}"
        # Of a trainer's pods the first one answers.
        return f"{name}-0.{name}:{PORT}"

    def _volumes(self, kind: str) -> list[tuple[str, str, bool, Manifest | None]]:
        """Name, path, whether it is read-only, and the source; None where a claim template has it."""
        role = credentials.role_of(kind) or kind
        secret = {"secretName": f"{self.run}-{role}", "defaultMode": 0o440}
        empty: Manifest = {"emptyDir": {}}
        work: Manifest | None = empty
        if kind in KEEPERS:
            work = None
        elif kind == "trainer":
            work = {"persistentVolumeClaim": {"claimName": f"{self.run}-trainer"}}
        found: list[tuple[str, str, bool, Manifest | None]] = [
            ("recipe", RECIPE_AT, True, {"configMap": {"name": f"{self.run}-recipe"}}),
            ("credentials", CREDENTIALS_AT, True, {"secret": secret}),
            ("work", WORK, False, work),
            ("tmp", "/tmp", False, empty),
        ]
        if self._needs_torch(kind):
            found.append(("shm", "/dev/shm", False, {"emptyDir": {"medium": "Memory"}}))
        if self.recipe.tls.cert is not None:
            secret = {"secretName": f"{self.run}-tls", "defaultMode": 0o440}
            found.append(("tls", TLS_AT, True, {"secret": secret}))
        for number, (claim, path) in enumerate(self.cluster.claims.items()):
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            found.append((f"files-{number}", path, True, source))
        return found

    def _policies(self) -> Iterator[Manifest]:
        """Network policies: only the connections of the design, and DNS for all pods."""
        dns = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
        yield self._policy("default-deny", self._selector(), ingress=[], egress=[{"ports": dns}])
        for called, callers in self.called.items():
            pods = self._pods(callers or [kind for kind in self.services if kind != "queue"])
            grpc = [{"port": PORT, "protocol": "TCP"}]
            to = self._selector(called)
            yield self._policy(
                f"to-{called}", to, ingress=[{"from": [{"podSelector": pods}], "ports": grpc}]
            )
            yield self._policy(
                f"call-{called}", pods, egress=[{"to": [{"podSelector": to}], "ports": grpc}]
            )
        for kind, port in self.http.items():
            if port and kind in self.services:
                near = {"from": [{"podSelector": {}}], "ports": [{"port": port, "protocol": "TCP"}]}
                yield self._policy(f"http-of-{kind}", self._selector(kind), ingress=[near])
        if "trainer" in self.services and self.recipe.weights.carrier in PEER_CARRIERS:
            yield self._among("weights", ["trainer", "rollout"])
        if self.recipe.trainer.nnodes > 1:
            yield self._among("ranks", ["trainer"])
        if self.group is not None:
            yield self._among("engines", ["rollout", "engine"])
        if self.cluster.monitor or self.cluster.most_workers:
            scraped = [{"port": METRICS_PORT, "protocol": "TCP"}]
            anywhere: list[Manifest] = [{"namespaceSelector": {}}]
            yield self._policy(
                "metrics", self._selector(), ingress=[{"from": anywhere, "ports": scraped}]
            )

    def _among(self, name: str, kinds: Sequence[str]) -> Manifest:
        """Any port between pods of these kinds."""
        pods = self._pods(kinds)
        among = [{"podSelector": pods}]
        return self._policy(name, pods, ingress=[{"from": among}], egress=[{"to": among}])

    def _pods(self, kinds: Sequence[str]) -> Manifest:
        among = {"key": "app.kubernetes.io/component", "operator": "In", "values": list(kinds)}
        return {**self._selector(), "matchExpressions": [among]}

    def _policy(self, name: str, pods: Manifest, **rules: list[Manifest]) -> Manifest:
        spec = {"podSelector": pods, "policyTypes": [kind.title() for kind in rules], **rules}
        return self._object("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)

    def _certificate(self) -> Manifest:
        """For the names by which pods are called, and for probes and port-forwards, which call 127.0.0.1."""
        spec = {
            "secretName": f"{self.run}-tls",
            "dnsNames": [
                self._address(kind).rpartition(":")[0]
                for kind in self.services
                if kind in self.called or self.http.get(kind)
            ],
            "ipAddresses": ["127.0.0.1"],
            "usages": ["digital signature", "key encipherment", "server auth", "client auth"],
            "issuerRef": {"name": self.cluster.issuer, "kind": "Issuer"},
        }
        return self._object("cert-manager.io/v1", "Certificate", "mesh", spec=spec)

    def _scaled(self) -> Manifest:
        """Up at once, down slowly: a worker that joins costs its start, one that leaves a prefill per response."""
        down = {
            "stabilizationWindowSeconds": 300,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
        }
        hint = f'meshrl_rollout_wanted_workers{{run="{self.recipe.run.name}"}}'
        trigger = {
            "type": "prometheus",
            # The hint is a number of workers: one worker for each one that is wanted.
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": self.cluster.prometheus,
                "query": f"max(max_over_time({hint}[1m]))",
                "threshold": "1",
            },
        }
        spec = {
            "scaleTargetRef": {
                "name": f"{self.run}-rollout",
                **(dict(zip(("apiVersion", "kind"), GROUPS, strict=True)) if self.group else {}),
            },
            "minReplicaCount": 1,
            "maxReplicaCount": self.cluster.most_workers,
            "pollingInterval": 15,
            "cooldownPeriod": 300,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": down}}},
            "triggers": [trigger],
        }
        return self._object("keda.sh/v1alpha1", "ScaledObject", "rollout", spec=spec)

    def _monitor(self) -> Manifest:
        credential = {"name": f"{self.run}-{MeshRole.READER}", "key": "credential"}
        endpoint = {"port": "metrics", "authorization": {"credentials": credential}}
        spec = {"selector": self._selector(), "podMetricsEndpoints": [endpoint]}
        return self._object("monitoring.coreos.com/v1", "PodMonitor", "mesh", spec=spec)


def recipe_for_pods(recipe: Recipe) -> Recipe:
    """The recipe as pods read it: work in the mounted volume, weights from the trainer's pod.

    Raises:
        UserError: it needs what pods do not share.
    """
    weights = recipe.weights
    if weights.carrier in ("shm", "cuda_ipc"):
        raise UserError(
            f"weights.carrier: {weights.carrier} needs a machine that trainer and workers share, and pods share none;"
            f" want gloo, delta, nccl, or disk with {URL}"
        )
    if "disk" in weights.choices and is_local(weights.directory):
        raise UserError(
            f"weights.directory: {weights.directory or 'a folder of the run'}: pods share no folder; want {URL}"
        )
    for key in ("cert", "key", "ca", "client_ca"):
        path = getattr(recipe.tls, key)
        if path is not None and path.parent != Path(TLS_AT):
            raise UserError(
                f"tls.{key}: {path}: want a file in {TLS_AT}, where pods find the Secret"
            )
    run = recipe.run.model_copy(update={"dir": None, "name": recipe.run.name})
    name = f"{object_name(recipe.run.name)}-trainer"
    if not names(weights, "host"):
        weights = weights.model_copy(update={"host": f"{name}-0.{name}"})
    placement = recipe.placement.model_copy(update={"machines": {}})
    return recipe.model_copy(update={"run": run, "weights": weights, "placement": placement})


def recipe_files(recipe: Recipe) -> dict[str, str]:
    """Name to text of what the ConfigMap holds: the recipe, and the reward functions that it names by path.

    Raises:
        UserError: a file cannot be read; two have one name.
    """
    fields = recipe.model_dump(mode="json", exclude_unset=True)
    found: dict[str, str] = {}
    reward = fields.get("reward", {})
    functions = [reward.get("custom_reward_function", {}), *reward.get("functions", [])]
    for function in functions:
        if (path := function.get("path")) is None:
            continue
        name, text = Path(path).name, _text(Path(path))
        if found.setdefault(name, text) != text:
            raise UserError(f"reward: two different files are called {name}")
        function["path"] = f"{RECIPE_AT}/{name}"
    return {"recipe.yaml": recipe_yaml(fields), **found}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _sharing(placement: Placement) -> Iterator[tuple[str, str]]:
    """Pairs of services on one GPU."""
    for first, second in itertools.combinations(placement.places.values(), 2):
        if first.host == second.host and set(first.gpus) & set(second.gpus):
            yield first.service, second.service
