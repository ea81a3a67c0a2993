"""Engines over several nodes: a LeaderWorkerSet, each of whose groups is a rollout worker and one vLLM server.

    group   pod 0   rollout ──127.0.0.1──▶ vllm serve            the worker sends weights over NCCL (`update: native`)
            pod 1…                         vllm serve --headless

A group begins anew when one of its pods does. Rendered, and not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from meshrl.config.recipe import Recipe
from meshrl.contract.errors import UserError

Manifest: TypeAlias = dict[str, Any]
NEEDED = (
    "--weight-transfer-config",
    '{"backend": "nccl"}',
    "--logprobs-mode",
    "processed_logprobs",
    "--enable-scale-out",
    "--skip-tokenizer-init",
    "--generation-config",
    "vllm",
)
"""Options that the mesh needs of a server (docs/reference/engines.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """The server of each rollout worker."""

    nodes: int
    gpus: int
    """GPUs of each node: tensor parallel there, pipeline parallel between nodes."""
    gpu: str
    """The resource that is a GPU."""
    image: str

    def check(self, recipe: Recipe) -> None:
        """Raises UserError where the recipe drives no such server."""
        options = recipe.rollout.engine
        url = urlsplit(str(options.get("url") or ""))
        wanted = recipe.rollout.name == "vllm" and options.get("update") == "native"
        if not (wanted and url.hostname == "127.0.0.1" and url.port and self.gpus):
            raise UserError(
                "--engine-nodes: want rollout.name=vllm, rollout.engine.update=native,"
                " rollout.engine.url=http://127.0.0.1:8000 and --engine-gpus"
            )

    def spec(self, recipe: Recipe, template: Manifest, labels: Mapping[str, str]) -> Manifest:
        """The spec of the LeaderWorkerSet; `template` is a rollout worker's, `labels` are those of the other pods."""
        pod, (worker,) = template["spec"], template["spec"]["containers"]
        # Rank 0 of the communicator that carries the weights.
        worker["resources"]["limits"] = {self.gpu: 1}
        server = self._server(recipe, worker)
        leader = {**template, "spec": {**pod, "containers": [worker, server]}}
        headless = {**server, "args": [*server["args"], "--headless"]}
        used = {mount["name"] for mount in server["volumeMounts"]}
        volumes = [volume for volume in pod["volumes"] if volume["name"] in used]
        other = {**pod, "containers": [headless], "volumes": volumes}
        return {
            "replicas": recipe.rollout.workers,
            "leaderWorkerTemplate": {
                "size": self.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": {"metadata": {"labels": dict(labels)}, "spec": other},
            },
        }

    def _server(self, recipe: Recipe, worker: Manifest) -> Manifest:
        port = urlsplit(str(recipe.rollout.engine["url"])).port
        apart = ("recipe", "credentials", "work", "tls")
        return {
            "name": "engine",
            "image": self.image,
            "command": ["vllm", "serve"],
            "args": [
                str(recipe.model.path),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--tensor-parallel-size",
                str(self.gpus),
                "--pipeline-parallel-size",
                str(self.nodes),
                "--nnodes",
                str(self.nodes),
                "--node-rank",
                "$(LWS_WORKER_INDEX)",
                "--master-addr",
                "$(LWS_LEADER_ADDRESS)",
                *NEEDED,
            ],
            "env": [
                {"name": "VLLM_SERVER_DEV_MODE", "value": "1"},
                {"name": "HOME", "value": "/tmp"},
            ],
            "resources": {
                "requests": worker["resources"]["requests"],
                "limits": {self.gpu: self.gpus},
            },
            "securityContext": worker["securityContext"],
            "volumeMounts": [each for each in worker["volumeMounts"] if each["name"] not in apart],
        }
