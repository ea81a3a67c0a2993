"""An API server with one node: checks pods by Kubernetes' schemas, and runs each one in namespaces of this machine.

An exec speaks the websocket of the real one: channels, the status at its end, and no end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_validate
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from meshrl.rollout.containers.enter import CAPABILITIES

POLICY = {
    "metadata": {"name": "boxes"},
    "spec": {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "meshrl-box"}},
        "policyTypes": ["Ingress", "Egress"],
    },
}
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
NAMESPACES = ["-U", "-m", "-p", "-n", "-u", "-i", "--preserve-credentials"]
PODS = "/api/v1/namespaces/{namespace}/pods"


@dataclass(eq=False)
class Pod:
    manifest: dict[str, Any]
    folder: Path
    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Pending"})
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def object(self) -> dict[str, Any]:
        return {**self.manifest, "status": self.status}


class KubernetesApi:
    """Serves until `close`; `root` is the file system of every image but `missing`."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.pods: dict[str, Pod] = {}
        self.policies = [POLICY]
        self.made: list[dict[str, Any]] = []
        self.lacks_user_namespaces = False
        routes = [
            Route(PODS, self.create, methods=["POST"]),
            Route(PODS, self.listed),
            Route(PODS + "/{name}", self.read),
            Route(PODS + "/{name}", self.delete, methods=["DELETE"]),
            Route("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", self.closed),
            WebSocketRoute(PODS + "/{name}/exec", self.execute),
        ]
        settings = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", ws="wsproto")
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            pass
        port = self.server.servers[0].sockets[0].getsockname()[1]
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "rl"}}
        users = [{"name": "c", "user": {}}]
        kubeconfig = {"clusters": [cluster], "contexts": [context], "users": users}
        (folder / "kubeconfig").write_text(yaml.safe_dump({**kubeconfig, "current-context": "c"}))

    def close(self) -> None:
        for pod in list(self.pods.values()):
            _kill(pod)
        self.server.should_exit = True
        self.thread.join()

    async def create(self, request: Request) -> JSONResponse:
        manifest = await request.json()
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
        name = manifest["metadata"]["name"]
        if self.lacks_user_namespaces:
            del manifest["spec"]["hostUsers"]
        if name in self.pods:
            return _refusal(409, f'pods "{name}" already exists')
        self.made.append(manifest)
        pod = self.pods[name] = Pod(manifest, self.folder / name)
        asyncio.get_running_loop().run_in_executor(None, self.run, pod)
        return JSONResponse(pod.object, status_code=201)

    def run(self, pod: Pod) -> None:
        """The kubelet's part: the first container to its end, then the other one to its end or its time."""
        spec = pod.manifest["spec"]
        (first,), (container,) = spec["initContainers"], spec["containers"]
        if container["image"] == "missing":
            waiting = {"reason": "ErrImagePull", "message": "no such image"}
            about = {"name": "box", "image": "missing", "imageID": "", "ready": False}
            pod.status["containerStatuses"] = [
                {**about, "restartCount": 0, "state": {"waiting": waiting}}
            ]
            return
        (pod.folder / "tools").mkdir(parents=True)
        shutil.copytree(self.root, pod.folder / "root", symlinks=True)
        host = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
        host += [
            each for name in ("lib", "lib64") for each in ("--symlink", f"usr/{name}", f"/{name}")
        ]
        tools = [str(pod.folder / "tools"), first["volumeMounts"][0]["mountPath"]]
        words = ["bwrap", "--unshare-all", *host, "--bind", *tools, *first["command"]]
        if subprocess.run(words, env=ENVIRONMENT).returncode:
            pod.status["phase"] = "Failed"
            return
        read, write = os.pipe()
        words = ["bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", "--uid", "0"]
        words += ["--gid", "0", "--hostname", spec["hostname"], "--info-fd", str(write)]
        words += [each for name in CAPABILITIES for each in ("--cap-add", name)]
        words += ["--bind", str(pod.folder / "root"), "/", "--dev", "/dev", "--proc", "/proc"]
        words += ["--ro-bind", *tools, *container["command"]]
        pod.process = subprocess.Popen(words, pass_fds=[write], env=ENVIRONMENT)
        os.close(write)
        with os.fdopen(read) as told:
            pod.pid = json.load(told)["child-pid"]
        now = {"name": "box", "image": container["image"], "imageID": "", "ready": True}
        running = {"running": {"startedAt": "2026-11-28T00:00:00Z"}}
        pod.status["containerStatuses"] = [{**now, "restartCount": 0, "state": running}]
        pod.status["phase"] = "Running"
        with suppress(subprocess.TimeoutExpired):
            if not self.pods.get(pod.manifest["metadata"]["name"]):  # deleted meanwhile
                _kill(pod)
            pod.process.wait(spec["activeDeadlineSeconds"])
        _kill(pod)
        pod.status["phase"] = "Failed" if pod.process.returncode else "Succeeded"

    async def listed(self, request: Request) -> JSONResponse:
        key, _, value = request.query_params.get("labelSelector", "").partition("=")
        found = [
            pod.object
            for pod in self.pods.values()
            if not key or pod.manifest["metadata"]["labels"].get(key) == value
        ]
        return JSONResponse({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found})

    async def closed(self, request: Request) -> JSONResponse:
        return JSONResponse({"kind": "NetworkPolicyList", "metadata": {}, "items": self.policies})

    async def read(self, request: Request) -> JSONResponse:
        pod = self.pods.get(name := request.path_params["name"])
        return JSONResponse(pod.object) if pod else _refusal(404, f'pods "{name}" not found')

    async def delete(self, request: Request) -> JSONResponse:
        pod = self.pods.pop(name := request.path_params["name"], None)
        if pod is None:
            return _refusal(404, f'pods "{name}" not found')
        _kill(pod)
        shutil.rmtree(pod.folder, ignore_errors=True)
        return JSONResponse(pod.object)

    async def execute(self, socket: WebSocket) -> None:
        pod = self.pods.get(socket.path_params["name"])
        if pod is None or pod.status["phase"] != "Running":
            await socket.send_denial_response(_refusal(404, "no such pod, or it does not run"))
            return
        await socket.accept(subprotocol=socket.scope["subprotocols"][0])
        words = ["nsenter", "-t", str(pod.pid), *NAMESPACES]
        process = await asyncio.create_subprocess_exec(
            *words,
            "/bin/setsid",
            *socket.query_params.getlist("command"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        assert process.stdin is not None and process.stdout is not None
        given = asyncio.create_task(_give(socket, process.stdin))
        with suppress(WebSocketDisconnect, RuntimeError):
            await socket.send_bytes(b"\1")
            while data := await process.stdout.read(1 << 16):
                await socket.send_bytes(b"\1" + data)
            code = await process.wait()
            code = 128 - code if code < 0 else code
            causes = [{"reason": "ExitCode", "message": str(code)}]
            failed = {
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "details": {"causes": causes},
            }
            status = failed if code else {"status": "Success"}
            await socket.send_bytes(b"\3" + json.dumps({"metadata": {}, **status}).encode())
            await socket.close()
        given.cancel()


async def _give(socket: WebSocket, stdin: asyncio.StreamWriter) -> None:
    with suppress(WebSocketDisconnect, OSError):
        while True:
            data = await socket.receive_bytes()
            assert data[0] == 0
            stdin.write(data[1:])
            await stdin.drain()


def _kill(pod: Pod) -> None:
    if pod.process is not None:
        pod.process.kill()


def _refusal(code: int, message: str) -> JSONResponse:
    status = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return JSONResponse(status, status_code=code)
