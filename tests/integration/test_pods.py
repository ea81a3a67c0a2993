"""Boxes of Kubernetes: what a cluster may answer, and what is left of rows and workers that are no more."""

from __future__ import annotations

import asyncio
import unittest.mock
from collections.abc import AsyncIterator
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError, UnavailableError
from meshrl.rollout.config import ContainersConfig
from meshrl.rollout.containers.box import OUTPUT_BYTES, POD_LABELS, Image, ImageError, owner
from meshrl.rollout.containers.pool import build_backend

from ..waiting import until
from .test_boxes import ENGINE_IMAGE, LIMITS, backend_of, cluster, shell, skip_without

OPTIONS = {"backend": "kubernetes"}


@pytest.fixture
async def backend() -> AsyncIterator[Any]:
    await skip_without("kubernetes")
    made = await backend_of("kubernetes")
    yield made
    await made.close()
    assert not cluster().pods


async def test_a_pod_holds_no_right_that_it_does_not_need_and_ends_without_its_worker(
    backend: Any,
) -> None:
    box = await backend.start(ENGINE_IMAGE, LIMITS, row="run/t0/0")
    made = cluster().made[-1]
    labels, spec = made["metadata"]["labels"], made["spec"]
    assert POD_LABELS.items() <= labels.items()
    assert (labels["meshrl.row"], made["metadata"]["annotations"]["meshrl.row"]) == (
        "run-t0-0",
        "run/t0/0",
    )
    assert spec["automountServiceAccountToken"] is spec["hostUsers"] is False
    assert spec["activeDeadlineSeconds"] == LIMITS.time_s + 601
    (held,) = spec["containers"]
    assert held["resources"]["limits"] == {
        "cpu": "1000m",
        "memory": str(LIMITS.memory_bytes),
        "ephemeral-storage": str(LIMITS.disk_bytes),
    }
    assert not held["securityContext"]["allowPrivilegeEscalation"]
    assert held["volumeMounts"] == [{"name": "tools", "mountPath": "/.meshrl", "readOnly": True}]
    await box.close()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1])
async def test_a_row_that_leaves_while_its_pod_starts_leaves_no_pod(
    backend: Any, after_s: float
) -> None:
    made = len(cluster().made)
    starting = asyncio.create_task(backend.start(ENGINE_IMAGE, LIMITS, row="x"))
    await asyncio.sleep(after_s)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not backend.boxes and not cluster().pods and len(cluster().made) <= made + 1


async def test_nothing_survives_a_stop_and_files_do(backend: Any) -> None:
    box = await backend.start(ENGINE_IMAGE, LIMITS, row="x")
    bomb = "setsid sh -c 'trap \"\" TERM HUP INT; while :; do (date > /tmp/last) & done' &"
    script = f"echo kept > /root/kept; setsid sleep 1000 & {bomb} kill -9 $PPID"
    assert (await box.run(["sh", "-c", script], timeout_s=1.0)).timed_out
    await box.stop_processes()
    names = (await shell(box, "cat /proc/[0-9]*/comm; cat /root/kept"))[1].split()
    assert "sleep" not in names and names.count("sh") == 1 and names[-1] == "kept"
    assert "Read-only" in (await shell(box, "rm /.meshrl/bash"))[1]
    assert await shell(box, "ulimit -u; ulimit -f") == (0, "40\n16384\n")
    flood = await box.run(["yes"], timeout_s=0.5)
    assert flood.timed_out and len(flood.output) < OUTPUT_BYTES + 100


async def test_an_image_that_cannot_be_pulled_is_told(backend: Any) -> None:
    with pytest.raises(ImageError, match="missing: ErrImagePull: no such image"):
        await backend.prepare(Image(name="missing"))


async def test_a_pod_that_is_deleted_by_others_takes_its_commands_with_it(backend: Any) -> None:
    box = await backend.start(ENGINE_IMAGE, LIMITS, row="x")
    running = asyncio.create_task(box.run(["sleep", "1000"], timeout_s=1000))
    await asyncio.sleep(0.1)
    await backend.delete(box.name)
    with pytest.raises(UnavailableError, match="has ended"):
        await running


async def test_a_worker_that_starts_removes_what_a_dead_one_of_its_home_left(backend: Any) -> None:
    box = await backend.start(ENGINE_IMAGE, LIMITS, row="x")
    dead = owner() + "1"  # this pid, started at another time
    with unittest.mock.patch.dict(backend._metadata["labels"], {"meshrl.owner": dead}):
        left = await backend.start(ENGINE_IMAGE, LIMITS, row="x")
    with unittest.mock.patch.dict(
        backend._metadata["labels"], {"meshrl.owner": dead, "meshrl.home": "b"}
    ):
        other = await backend.start(ENGINE_IMAGE, LIMITS, row="x")
    assert await backend.sweep() == 1
    assert set(cluster().pods) == {box.name, other.name} and left.name not in cluster().pods


async def test_a_cluster_that_does_not_hold_what_it_is_asked_for_is_refused(backend: Any) -> None:
    api = cluster()
    config = ContainersConfig.model_validate(OPTIONS)
    no_policy = pytest.raises(ConfigError, match="no NetworkPolicy in rl closes the network")
    with unittest.mock.patch.object(api, "policies", []), no_policy:
        await asyncio.to_thread(build_backend, config)
    too_old = pytest.raises(UnavailableError, match="no user namespaces")
    with unittest.mock.patch.object(api, "lacks_user_namespaces", True), too_old:
        await backend.start(ENGINE_IMAGE, LIMITS, row="x")
    hosts = {**OPTIONS, "limits": {"hosts": ["pypi.org"]}}
    with pytest.raises(ConfigError, match=r"limits\.hosts: kubernetes"):
        build_backend(ContainersConfig.model_validate(hosts))
    await until(lambda: not api.pods)
