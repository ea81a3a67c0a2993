"""The manifests that `meshrl kubernetes` prints: are they Kubernetes, and are they this mesh?"""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshrl.cli.commands.serve import serve
from meshrl.cli.deploy import kubernetes
from meshrl.config import load_recipe
from meshrl.config.stages import mesh_services
from meshrl.contract.errors import ConfigError, UserError
from meshrl.deploy.kubernetes import CALLED
from meshrl.rollout.containers.box import POD_LABELS
from meshrl.rpc.credentials import MeshRole, read_verifiers, role_of, sha256
from meshrl.rpc.identity import METHODS

from .test_slurm import FILES, RECIPE

kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSIONS = [
    f"1.{n}" for n in range(29, int(kubernetes_validate.latest_version().split(".")[1]) + 1)
]
schema = cache(kubernetes_validate.utils.schema_contents)
"""The schema, cached: it would be read again for every object."""
PAGE = Path(__file__).parents[3] / "docs/how-to/kubernetes.md"
UNCHECKED = {"ScaledObject", "PodMonitor", "Certificate", "LeaderWorkerSet"}
"""Kinds of others, which Kubernetes' schemas do not know."""
SERVICES = {"queue": "Queue", "trainer": "Weights", "reward": "Reward"}
"""The gRPC service that others call, by kind of service."""
PYTHON = "rollout.program_options={tools: [{python: {}}]}"
STRICT = ("reward.registry.tokens=tokens.yaml", "actor.use_kl_loss=true")
TLS = ["tls.cert=/tls/tls.crt", "tls.key=/tls/tls.key", "tls.ca=/tls/ca.crt"]
OPENED = {("submitted-rewards", "reward"), ("mutual-tls", "reward"), ("python-tool", "rollout")}
"""Variants and services with strict sandboxes; callers with a certificate of their own may submit rewards, too."""
VARIANTS = {
    "cpu": ["actor.use_kl_loss=true"],
    "8-gpus": ["--gpus-per-node", "8", "--mount", "models:/models"],
    "many-nodes": ["--gpus-per-node", "8", "--nodes", "4", "--keda", "32", "--monitor"],
    "storage-class": ["--storage-class", "fast"],
    "submitted-rewards": [*STRICT],
    "python-tool": ["rollout.program=tools", PYTHON],
    "engines-of-two-nodes": [
        "--engine-nodes",
        "2",
        "--engine-gpus",
        "4",
        "--engine-image",
        "vllm",
        "--keda",
        "4",
        "--mount",
        "models:/models",
        "rollout.name=vllm",
        "rollout.workers=3",
        "rollout.engine={url: 'http://127.0.0.1:8000', update: native}",
    ],
    "tls": TLS,
    "tinker": ["tinker={http_port: 8900}", *TLS, "--cert-manager", "mesh"],
    "boxes": ["rollout.containers={backend: kubernetes}"],
    "mutual-tls": [*TLS, "tls.client_ca=/tls/ca.crt", "--cert-manager", "mesh"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My_run.yaml").write_text(RECIPE)
    (tmp_path / "reward.py").write_text(FILES["files"]["reward.py"])  # type: ignore[index]
    (tmp_path / "tokens.yaml").write_text("[]\n")
    (tmp_path / "there.yaml").write_text(yaml.safe_dump(FILES))
    return tmp_path


def printed(*arguments: str) -> str:
    words = ["My_run.yaml", *arguments, "--assume", "there.yaml"]
    done = CliRunner().invoke(kubernetes, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_nothing_that_the_cluster_has_is_asked_of_this_machine() -> None:
    words = ["rollout.name=vllm", "weights.carrier=nccl", "trainer.logger=[console, trackio]"]
    asked = ["My_run.yaml", "--gpus-per-node", "8", *words, "reward.recipe_sandbox=strict"]
    done = CliRunner().invoke(kubernetes, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def objects(*arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The printed objects by kind and name."""
    found = yaml.safe_load_all(printed(*arguments))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pods(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The spec of each kind of service's pods."""
    templates = []
    for spec in (each.get("spec", {}) for each in found.values()):
        templates += [spec["template"]] if "template" in spec else []
        group = spec.get("leaderWorkerTemplate", {})
        templates += [group[name] for name in ("leaderTemplate", "workerTemplate") if group]
    return {each["spec"]["containers"][0]["name"]: each["spec"] for each in templates}


def values(pod: dict[str, Any]) -> dict[str, str]:
    """The environment of its container."""
    return {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_knows_every_field(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", schema)
    unknown = pytest.raises(kubernetes_validate.SchemaNotFoundError)
    for (kind, _), each in objects(*VARIANTS[variant]).items():
        for version in VERSIONS:
            with unknown if kind in UNCHECKED else nullcontext():
                kubernetes_validate.validate(each, version, strict=True)
    for name, spec in pods(objects(*VARIANTS[variant])).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="`kubectl` is not installed")
def test_the_kustomization_of_the_page_takes_what_is_printed(here: Path) -> None:
    (here / "mesh.yaml").write_text(printed(*VARIANTS["8-gpus"]))
    (text,) = re.findall("```yaml\n(# kustomization.yaml.*?)```", PAGE.read_text(), re.DOTALL)
    (here / "kustomization.yaml").write_text(text.replace("my-rollout", "my-run-rollout"))
    done = subprocess.run(
        ["kubectl", "kustomize", "."], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["namespace"] for each in found} == {"rl"}
    (rollout,) = [each for each in found if each["metadata"]["name"] == "my-run-rollout"]
    assert rollout["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h100"}


def test_every_service_of_the_mesh_runs_by_the_command_of_serve() -> None:
    found = objects("actor.use_kl_loss=true", "rollout.workers=3")
    recipe = load_recipe(Path("My_run.yaml"), ("actor.use_kl_loss=true",), check=False)
    specs = pods(found)
    assert set(specs) == {service.kind for service in mesh_services(recipe)}
    options = {name for option in serve.params for name in [option.envvar] if name}
    for kind, pod in specs.items():
        container = pod["containers"][0]
        context = serve.make_context("serve", container["args"][1:])
        assert (container["args"][0], context.params["service"]) == ("serve", kind)
        assert {name for name in values(pod) if name != "HOME"} <= options
    assert found["Deployment", "my-run-rollout"]["spec"]["replicas"] == 3
    assert values(specs["rollout"])["MESHRL_QUEUE"] == "my-run-queue-0.my-run-queue:7001"


def test_the_recipe_of_the_pods_is_one_that_serve_reads(here: Path) -> None:
    data = objects("rollout.n=5")["ConfigMap", "my-run-recipe"]["data"]
    (here / "pod").mkdir()
    for name, text in data.items():
        (here / "pod" / name).write_text(text)
    recipe = load_recipe(here / "pod/recipe.yaml", (), check=False)
    assert (recipe.run.name, recipe.rollout.n) == ("My_run", 5)
    assert recipe.weights.host == "my-run-trainer-0.my-run-trainer"
    assert recipe.reward.custom_reward_function.path == Path("/recipe/reward.py")
    assert set(data) == {"recipe.yaml", "reward.py"}


def test_every_service_presents_the_secret_of_its_role_and_no_other(here: Path) -> None:
    secrets = objects("--secrets")
    for kind, pod in pods(objects()).items():
        (volume,) = [each for each in pod["volumes"] if "secret" in each]
        # Readable for the pod's group only: fsGroup.
        assert volume["secret"]["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"]
        data = secrets["Secret", volume["secret"]["secretName"]]["stringData"]
        (here / "verifiers.json").touch(0o600)
        (here / "verifiers.json").write_text(data["verifiers.json"])
        roles = read_verifiers(here / "verifiers.json")
        if kind == "queue":
            assert set(data) == {"verifiers.json"}
        else:
            assert roles[sha256(data["credential"])] == role_of(kind)
    again = objects("--secrets")
    assert again == secrets
    assert not any(MeshRole.OPERATOR in name for _, name in secrets)


def test_pods_may_call_whom_the_table_of_methods_lets_them_and_nobody_else() -> None:
    found = objects("actor.use_kl_loss=true")
    everybody = set(pods(found))
    for called in CALLED:
        policy = found["NetworkPolicy", f"my-run-to-{called}"]["spec"]
        (rule,) = policy["ingress"]
        (source,) = rule["from"]
        (among,) = source["podSelector"]["matchExpressions"]
        callers = set(among["values"])
        permitted = set().union(
            *(roles for name, roles in METHODS.items() if f".{SERVICES[called]}/" in name)
        )
        assert callers <= everybody - {called}
        assert {role_of(kind) for kind in callers} <= permitted
        if called == "queue":
            assert callers == everybody - {"queue"}
        # What may come in there may go out here.
        out = found["NetworkPolicy", f"my-run-call-{called}"]["spec"]
        assert out["podSelector"] == source["podSelector"]
        assert out["egress"][0]["to"][0]["podSelector"] == policy["podSelector"]
    deny = found["NetworkPolicy", "my-run-default-deny"]["spec"]
    assert deny["ingress"] == [] and [set(rule) for rule in deny["egress"]] == [{"ports"}]
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"}


def test_a_server_of_models_that_callers_train_is_reached_and_keeps_them() -> None:
    found = objects(*VARIANTS["tinker"])
    names = {name.removeprefix("my-run-") for _, name in found}
    assert names == {"recipe", "tinker", "default-deny", "http-of-tinker", "mesh"}
    ports = found["Service", "my-run-tinker"]["spec"]["ports"]
    assert {"name": "http", "port": 8900} in ports
    (rule,) = found["NetworkPolicy", "my-run-http-of-tinker"]["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {}}], "ports": [{"port": 8900, "protocol": "TCP"}]}
    spec = found["StatefulSet", "my-run-tinker"]["spec"]
    assert spec["volumeClaimTemplates"][0]["metadata"]["name"] == "work"
    assert found["Certificate", "my-run-mesh"]["spec"]["dnsNames"] == ["my-run-tinker"]
    pod = spec["template"]["spec"]
    assert {"name": "http", "containerPort": 8900} in pod["containers"][0]["ports"]
    secrets = objects("--secrets", *VARIANTS["tinker"])
    mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    assert mounted - {"my-run-tls"} <= {name for _, name in secrets}


def test_workers_with_pods_for_rows_may_do_what_they_ask_and_these_pods_reach_nobody() -> None:
    found = objects(*VARIANTS["boxes"])
    rules = {
        each["resources"][0]: each["verbs"] for each in found["Role", "my-run-rollout"]["rules"]
    }
    assert set(rules) == {"pods", "pods/exec", "networkpolicies"}
    assert "watch" not in rules["pods"] and "update" not in rules["pods"]
    (subject,) = found["RoleBinding", "my-run-rollout"]["subjects"]
    account = pods(found)["rollout"]["serviceAccountName"]
    assert ("ServiceAccount", account) in found and subject["name"] == account
    closed = found["NetworkPolicy", "my-run-boxes"]["spec"]
    assert closed["podSelector"] == {"matchLabels": POD_LABELS}
    assert closed["ingress"] == closed["egress"] == []
    # No policy of the mesh, which lets its pods ask for names, chooses them.
    assert not POD_LABELS.items() <= found["Deployment", account]["metadata"]["labels"].items()


def test_submitted_rewards_are_reached_at_the_port_that_the_recipe_chooses() -> None:
    found = objects("reward.registry={http_port: 8800, tokens: tokens.yaml}")
    assert {"name": "http", "port": 8800} in found["Service", "my-run-reward"]["spec"]["ports"]
    (rule,) = found["NetworkPolicy", "my-run-http-of-reward"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": 8800, "protocol": "TCP"}]


def test_gpus_are_those_of_the_placement_numbered_as_the_container_sees_them() -> None:
    specs = pods(objects("--gpus-per-node", "8", "--nodes", "2", "placement.rollout=2"))
    limits = {kind: pod["containers"][0]["resources"].get("limits") for kind, pod in specs.items()}
    assert limits["trainer"] == {"nvidia.com/gpu": 8}
    assert limits["rollout"] == {"nvidia.com/gpu": 2}
    assert limits["queue"] is None
    assert values(specs["rollout"])["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_an_engine_of_two_nodes_has_a_worker_on_the_first_one_and_its_ranks_on_both() -> None:
    found = objects(*VARIANTS["engines-of-two-nodes"])
    spec = found["LeaderWorkerSet", "my-run-rollout"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    specs = pods(found)
    worker, leader = specs["rollout"]["containers"]
    (follower,) = specs["engine"]["containers"]
    assert follower["args"] == [*leader["args"], "--headless"]
    assert (worker["image"], leader["image"]) == ("meshrl", "vllm")
    limits = [each["resources"]["limits"] for each in (worker, leader, follower)]
    assert limits == [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 4}, {"nvidia.com/gpu": 4}]
    # A server reads models, and neither credentials nor the recipe.
    assert {each["name"] for each in follower["volumeMounts"]} == {"tmp", "shm", "files-0"}
    (rule,) = found["NetworkPolicy", "my-run-engines"]["spec"]["ingress"]
    among = rule["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    template = spec["leaderWorkerTemplate"]["workerTemplate"]
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] in among
    target = found["ScaledObject", "my-run-rollout"]["spec"]["scaleTargetRef"]
    assert target["kind"] == "LeaderWorkerSet"


def test_a_trainer_of_two_machines_has_two_pods_that_share_a_volume_and_reach_each_other() -> None:
    found = objects("trainer.nnodes=2", "weights.carrier=disk", "weights.directory=s3://b/p")
    job = found["Job", "my-run-trainer"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    volume = found["PersistentVolumeClaim", "my-run-trainer"]["spec"]
    assert volume["accessModes"] == ["ReadWriteMany"]
    pod = found["Deployment", "my-run-rollout"]["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert environment["MESHRL_TRAINER"] == "my-run-trainer-0.my-run-trainer:7001"
    (rule,) = found["NetworkPolicy", "my-run-ranks"]["spec"]["ingress"]
    (peers,) = rule["from"]
    assert peers["podSelector"]["matchExpressions"][0]["values"] == ["trainer"]
    assert "ports" not in rule


def test_the_trainer_ends_the_run_and_a_wrong_recipe_is_not_tried_again() -> None:
    job = objects()["Job", "my-run-trainer"]["spec"]
    first = job["podFailurePolicy"]["rules"][0]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [2])
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 315


@pytest.mark.parametrize(
    ("variant", "shown"), [("tls", {"CA"}), ("mutual-tls", {"CA", "CERT", "KEY"})]
)
def test_probes_trust_the_certificate_and_show_one_where_it_is_asked_for(
    variant: str, shown: set[str]
) -> None:
    for pod in pods(objects(*VARIANTS[variant])).values():
        (tls,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
        given = {name: value for name, value in values(pod).items() if "MESHRL_TLS_" in name}
        assert set(given) == {f"MESHRL_TLS_{name}" for name in shown}
        assert {str(Path(path).parent) for path in given.values()} == {tls["mountPath"]}


def test_the_certificate_has_every_name_by_which_a_pod_is_called() -> None:
    found = objects(*VARIANTS["mutual-tls"])
    spec = found["Certificate", "my-run-mesh"]["spec"]
    for pod in pods(found).values():
        environment = values(pod)
        for called in CALLED:
            address = environment[f"MESHRL_{called.upper()}"]
            assert address.removesuffix(":7001") in spec["dnsNames"]
        command = pod["containers"][0]["readinessProbe"]["exec"]["command"]
        assert command[-1].removesuffix(":7001") in spec["ipAddresses"]
        assert {
            "secret": {"secretName": spec["secretName"], "defaultMode": 0o440},
            "name": "tls",
        } in (pod["volumes"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_hold_nothing_that_they_do_not_need(variant: str) -> None:
    for kind, pod in pods(objects(*VARIANTS[variant])).items():
        held = pod["containers"][0]["securityContext"]
        assert held["readOnlyRootFilesystem"] and held["capabilities"] == {"drop": ["ALL"]}
        assert not held["allowPrivilegeEscalation"] and pod["securityContext"]["runAsNonRoot"]
        makes_pods = (variant, kind) == ("boxes", "rollout")
        assert pod["automountServiceAccountToken"] == ("serviceAccountName" in pod) == makes_pods
        # bubblewrap needs namespaces; who makes sandboxes has them, in a user namespace of its own, and nobody else.
        opened = (variant, kind) in OPENED
        assert ("procMount" in held) == opened == (pod.get("hostUsers") is False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["weights.carrier=disk"],
            "weights.directory: a folder of the run: pods share no folder; want an",
        ),
        (
            ["weights.carrier=disk", "weights.directory=/mnt/w"],
            "weights.directory: /mnt/w: pods share",
        ),
        (
            ["weights.carrier=disk", "weights.directory=file:///w"],
            "weights.directory: file:///w: pods",
        ),
        (
            ["weights.carrier=auto", "weights.directory=/mnt/w"],
            "weights.directory: /mnt/w: pods share",
        ),
        (
            ["weights.carrier=shm"],
            "weights.carrier: shm needs a machine that trainer and workers share",
        ),
        (["--gpus-per-node", "1"], "share a GPU, which pods cannot"),
        (
            ["tls.cert=/etc/a.pem", "tls.key=/etc/a.key"],
            "tls.cert: /etc/a.pem: want a file in /tls",
        ),
        (["tinker={}"], "tinker.http_port: 0: want a port"),
        (["--engine-nodes", "2"], "--engine-nodes: want rollout.name=vllm"),
        (["--cert-manager", "mesh"], "--cert-manager: the recipe has no certificate"),
        (["rollout.nn=4"], "no such key 'rollout.nn'"),
    ],
)
def test_what_cannot_run_there_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, UserError), match=re.escape(said)):
        printed(*words)
