"""deploy/prometheus and deploy/grafana against Debian's Prometheus, and against the names that the mesh exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from meshrl.common.sockets import join_address
from meshrl.contract.types import TrainerPhase, TrainerStatus, Version
from meshrl.launcher.address_book import free_port
from meshrl.rpc.servicers import TrainerCollector

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "meshrl.json"
NAME = re.compile(r"\bmeshrl_[a-z_]+\b")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (Debian: apt install prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus here (Debian: apt install prometheus)"
)
STATUS = TrainerStatus(
    step=12,
    total_steps=40,
    version=Version(1, 12),
    phase=TrainerPhase.TRAINING,
    reward_mean=0.5,
    held_out_score=0.4,
    tokens_per_s=1.0,
    samples=1,
    metrics={
        "time/unix_s": 1.0,
        "time/step_s": 2.0,
        "actor/entropy": 0.5,
        "actor/skipped_updates": 0.0,
        "mismatch/version_7/kl": 0.1,
        "mismatch/replica_rollout-0/kl": 0.1,
        "not_finite": 0.0,
    },
)


def exported(status: TrainerStatus = STATUS) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(TrainerCollector("my", lambda: status))
    return registry


def promtool(*arguments: str | Path, stdin: bytes = b"") -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=stdin, capture_output=True, timeout=60
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@needs_promtool
def test_the_rules_are_right_and_fire_on_what_is_planted_alone() -> None:
    assert "7 rules found" in promtool("check", "rules", ALERTS)
    promtool("test", "rules", DEPLOY / "prometheus" / "alerts.test.yaml")


@needs_promtool
def test_what_the_trainer_exports_is_well_formed() -> None:
    promtool("check", "metrics", stdin=generate_latest(exported()))


def test_the_trainer_exports_its_newest_step_in_series_that_do_not_grow() -> None:
    text = generate_latest(exported()).decode()
    assert 'meshrl_trainer_step{run="my"} 12.0' in text
    assert 'meshrl_trainer_step_made_seconds{run="my"} 1.0' in text
    assert 'meshrl_trainer_phase{phase="training",run="my"} 1.0' in text
    assert 'meshrl_training{metric="actor/entropy",run="my"} 0.5' in text
    assert 'meshrl_training{metric="val/score/mean",run="my"} 0.4' in text
    assert "version_7" not in text and "replica_" not in text


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    pages = [ROOT / "docs" / "reference" / name for name in ("metrics.md", "prometheus.md")]
    page = "".join(page.read_text() for page in pages)
    known = set(NAME.findall(page))
    for path in (ALERTS, DASHBOARD):
        asked = set(NAME.findall(path.read_text()))
        assert asked and asked <= known, (path.name, asked - known)
    metrics = set(re.findall(r"`([a-z_/]+)`", page))
    families = tuple(re.findall(r"`([a-z_]+/)<name>`", page))
    for name in re.findall(
        r'metric=\\?"([a-z_/]+)\\?"', ALERTS.read_text() + DASHBOARD.read_text()
    ):
        assert name in metrics or name.startswith(families), name
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12


def test_an_alert_leads_to_a_paragraph_that_there_is() -> None:
    for page, _, anchor in re.findall(r"runbook: ([\w/.-]+)(#([\w-]+))?", ALERTS.read_text()):
        text = (ROOT / page).read_text()
        titles = {
            line[3:].lower().replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
        }
        assert not anchor or anchor in titles, (page, anchor)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes a trainer whose newest step was not finite, by the rules that are shipped."""
    bad = replace(STATUS, metrics={**STATUS.metrics, "not_finite": 2.0})
    server, thread = start_http_server(0, addr="127.0.0.1", registry=exported(bad))
    (tmp_path / "prometheus.yaml").write_text(
        f"""
        global: {{scrape_interval: 1s, evaluation_interval: 1s}}
        rule_files: [{ALERTS}]
        scrape_configs:
          - job_name: meshrl
            static_configs: [{{targets: ["127.0.0.1:{server.server_port}"]}}]
        """
    )
    address = join_address("127.0.0.1", free_port("127.0.0.1"))
    process = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}",
         f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()
        thread.join()


@needs_prometheus
def test_a_real_prometheus_fires_when_a_step_was_not_finite(prometheus: str) -> None:
    def alerts() -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{prometheus}/api/v1/alerts", timeout=5) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["alerts"]
        except OSError:
            return []
        return found

    for _ in range(600):
        firing = {one["labels"]["alertname"] for one in alerts() if one["state"] == "firing"}
        if "MeshrlNotFinite" in firing:
            return
        time.sleep(0.1)
    raise AssertionError("MeshrlNotFinite never fired")
