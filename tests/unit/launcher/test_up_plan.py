"""The services that start, their addresses, and how the others find them."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.common.device_lease import DEVICES
from meshrl.common.python_process import PYTHON
from meshrl.config import Recipe, load_recipe
from meshrl.config.machine import AssumedMachine, Assumptions
from meshrl.config.placement import place
from meshrl.config.stages import BUILT_IN, service_kind
from meshrl.contract.errors import CapacityError, ConfigError, NotFoundError, UserError
from meshrl.deploy.machines import Machines
from meshrl.launcher.address_book import (
    AddressBook,
    ServiceAddress,
    free_port,
    is_up,
    newest_run_dir,
    run_lock,
)
from meshrl.launcher.plan import LaunchPlan
from meshrl.launcher.service import Probe, Service, always_ready


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: model}\n")
    return load_recipe(path, overrides, check=False)


def no_probe(entry: Callable[[], ServiceAddress]) -> Probe:
    return always_ready


def plan(tmp_path: Path, *overrides: str, **fixed: int) -> tuple[LaunchPlan, dict[str, Service]]:
    launch_plan = LaunchPlan(
        recipe(tmp_path, *overrides), tmp_path / "r.yaml", tmp_path / "mesh.json", fixed
    )
    return launch_plan, {service.name: service for service in launch_plan.services(no_probe)}


def test_a_mesh_has_as_many_rollout_workers_as_it_says(tmp_path: Path) -> None:
    _, services = plan(tmp_path, "rollout.workers=2")
    assert list(services) == ["queue", "reward", "trainer", "rollout-0", "rollout-1", "feeder"]


def test_a_recipe_with_a_tinker_section_is_that_server_alone(tmp_path: Path) -> None:
    _, services = plan(tmp_path, "tinker={http_port: 8900}", "actor.use_kl_loss=true")
    assert [(name, each.leads, each.preload) for name, each in services.items()] == [
        ("tinker", False, "torch")
    ]


def test_every_service_can_be_forked_and_those_with_torch_come_from_the_preloader_that_has_it(
    tmp_path: Path,
) -> None:
    _, services = plan(tmp_path, "actor.use_kl_loss=true")
    assert {service.argv[: len(PYTHON)] for service in services.values()} == {PYTHON}
    with_torch = [name for name, service in services.items() if service.preload == "torch"]
    assert with_torch == ["reference", "trainer", "rollout-0"]


@pytest.mark.parametrize(
    ("carrier", "preloader"), [("gloo", "torch"), ("shm", "light"), ("auto", "torch")]
)
def test_a_worker_whose_carrier_needs_torch_comes_from_the_preloader_that_has_it(
    tmp_path: Path, carrier: str, preloader: str
) -> None:
    changes = ("rollout.name=echo", f"weights.carrier={carrier}")
    _, services = plan(tmp_path, *changes)
    assert services["rollout-0"].preload == preloader


def test_the_reference_is_started_when_the_algorithm_asks_for_it(tmp_path: Path) -> None:
    assert "reference" not in plan(tmp_path)[1]
    for asks in ("actor.use_kl_loss=true", "actor.policy_loss.loss_mode=dpo"):
        assert "reference" in plan(tmp_path, asks)[1]


def test_trainer_and_reference_may_have_ranks_and_all_kinds_are_of_the_table(
    tmp_path: Path,
) -> None:
    several = recipe(tmp_path, "trainer.nproc=2", "trainer.nnodes=2", "reference.nproc=3")
    ranks = {kind: service_kind(several, kind).ranks(several) for kind in BUILT_IN}
    assert ranks == dict.fromkeys(BUILT_IN, 1) | {"trainer": 4, "reference": 3}


def test_the_queue_comes_first_and_goes_last_and_the_trainer_drains_first(tmp_path: Path) -> None:
    _, services = plan(tmp_path)
    rest = [service for name, service in services.items() if name != "queue"]
    assert all(services["queue"].start_order < service.start_order for service in rest)
    assert all(services["queue"].drain_order > service.drain_order for service in rest)
    others = [service for service in rest if service.name != "trainer"]
    assert all(services["trainer"].drain_order < service.drain_order for service in others)
    assert [name for name, service in services.items() if service.leads] == ["trainer"]


def test_the_address_book_is_what_the_services_read(tmp_path: Path) -> None:
    launch_plan, services = plan(tmp_path)
    assert AddressBook.load(tmp_path / "mesh.json") == launch_plan.address_book
    argv = services["reward"].argv
    assert argv[argv.index("--address-book") + 1] == str(tmp_path / "mesh.json")
    assert argv[argv.index("--name") + 1] == "reward"
    ports = [e.port for e in launch_plan.address_book.services.values()]
    ports += [e.metrics_port for e in launch_plan.address_book.services.values()]
    assert len(set(ports)) == len(ports)


def test_a_port_that_was_taken_is_replaced_in_the_address_book(tmp_path: Path) -> None:
    launch_plan, services = plan(tmp_path)
    before = launch_plan.address_book.services["queue"].port
    replace = services["queue"].on_port_taken
    assert replace is not None
    replace()
    after = AddressBook.load(tmp_path / "mesh.json").services["queue"].port
    assert after != before


def test_a_fixed_port_is_kept_and_never_replaced(tmp_path: Path) -> None:
    launch_plan, services = plan(tmp_path, queue=7001)
    assert launch_plan.address_book.services["queue"].port == 7001
    assert services["queue"].on_port_taken is None


def test_a_port_for_a_service_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no service named 'reference' in this mesh; it has queue"):
        plan(tmp_path, reference=7001)


def test_a_queue_in_memory_is_not_started_again(tmp_path: Path) -> None:
    assert plan(tmp_path)[1]["queue"].cannot_restart == ""
    assert "data.mdb is damaged: restore" in plan(tmp_path)[1]["queue"].crash_at_start
    assert plan(tmp_path, "queue.store=memory")[1]["queue"].crash_at_start == ""
    assert "disk" in plan(tmp_path, "queue.store=memory")[1]["queue"].cannot_restart


def test_a_free_port_is_one_nobody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        port = free_port("127.0.0.1", {taken})
    assert port != taken
    with socket.create_server(("127.0.0.1", port)):
        assert port < 32768


def test_a_second_up_on_one_run_is_refused_by_name(tmp_path: Path) -> None:
    assert not is_up(tmp_path)
    with run_lock(tmp_path):
        assert is_up(tmp_path)
        refused = pytest.raises(UserError, match=r"another `meshrl up` \(pid \d+\) runs there")
        with refused, run_lock(tmp_path):
            pytest.fail("two held one run")
    assert not is_up(tmp_path)


def test_the_newest_mesh_is_the_one_started_last(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no mesh was ever started here"):
        newest_run_dir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mesh.json").write_text(json.dumps({}))
    assert newest_run_dir(tmp_path) == tmp_path / "b"


def test_each_service_gets_its_own_gpus_and_a_worker_that_is_added_gets_free_ones(
    tmp_path: Path,
) -> None:
    there = AssumedMachine(Assumptions(gpus=4, gpu_memory_gib=80))
    placement = place(recipe(tmp_path, "rollout.workers=1"), there)
    launch_plan = LaunchPlan(
        placement.recipe, tmp_path / "r.yaml", tmp_path / "mesh.json", {}, placement=placement
    )
    services = {service.name: service for service in launch_plan.services(no_probe)}
    given = {name: service.env.get(DEVICES) for name, service in services.items()}
    assert given == {
        "queue": None,
        "reward": None,
        "feeder": None,
        "trainer": "0,1",
        "rollout-0": "2",
    }
    assert launch_plan.add_rollout(no_probe).env[DEVICES] == "3"
    with pytest.raises(CapacityError, match="0 of the 4 of"):
        launch_plan.add_rollout(no_probe)
    launch_plan.remove("rollout-0")
    assert launch_plan.add_rollout(no_probe).env[DEVICES] == "2"


LAUNCHER = ("srun", "--nodelist={machine}")


def elsewhere(
    tmp_path: Path, machines: Machines, *overrides: str, gpus: int = 0
) -> tuple[LaunchPlan, dict[str, Service]]:
    """The plan and the services of a mesh on `machines`, each with so many GPUs."""
    there = AssumedMachine(Assumptions(gpus=gpus))
    placement = place(machines.prepared(recipe(tmp_path, *overrides)), there)
    files = (tmp_path / "r.yaml", tmp_path / "mesh.json")
    launch_plan = LaunchPlan(placement.recipe, *files, {}, placement=placement, machines=machines)
    return launch_plan, {service.name: service for service in launch_plan.services(no_probe)}


def test_a_trainer_of_two_machines_is_started_on_the_first_two_and_found_at_the_first(
    tmp_path: Path,
) -> None:
    machines = Machines(names=("n1", "n2"), launcher=LAUNCHER, program=("meshrl",))
    launch_plan, services = elsewhere(tmp_path, machines, "trainer.nnodes=2")
    book = launch_plan.address_book
    assert [book.services[name].host for name in ("trainer", "trainer-1")] == ["n1", "n2"]
    assert book.peers()["trainer"] == book.services["trainer"].address
    assert services["trainer"].argv[-2:] == ("--node-rank", "0")
    assert services["trainer-1"].argv[-2:] == ("--node-rank", "1")
    ports = {
        word
        for name in ("trainer", "trainer-1")
        for word in services[name].argv
        if word.startswith("MASTER_PORT=")
    }
    assert len(ports) == 1
    assert [name for name, service in services.items() if service.leads] == ["trainer"]
    with pytest.raises(ConfigError, match=r"trainer.nnodes: 3, and there are 2 machines: n1, n2"):
        elsewhere(tmp_path, machines, "trainer.nnodes=3")


def test_workers_without_gpus_are_shared_out_over_the_machines_behind_the_first(
    tmp_path: Path,
) -> None:
    machines = Machines(names=("n1", "n2", "n3"), launcher=LAUNCHER, program=("meshrl",))
    launch_plan, services = elsewhere(tmp_path, machines, "rollout.workers=3")
    where = {name: entry.host for name, entry in launch_plan.address_book.services.items()}
    first = dict.fromkeys(("queue", "reward", "trainer", "feeder"), "n1")
    assert where == {**first, "rollout-0": "n2", "rollout-1": "n3", "rollout-2": "n2"}
    assert launch_plan.add_rollout(no_probe).argv[1] == "--nodelist=n3"
    worker = services["rollout-1"]
    assert worker.elsewhere
    words = list(worker.argv)
    assert words[:4] == ["srun", "--nodelist=n3", "env", "-u"]
    assert words[words.index("meshrl") :][:3] == ["meshrl", "serve", "rollout"]
    # A launcher need not pass variables on, and those of this process's own start must not arrive.
    assert {"MESHRL_PARENT_PID", "MESHRL_DRAIN_AT_EOF=1"} <= set(words)
    assert any(word.startswith("MESHRL_CREDENTIAL_FILE=/") for word in words)


def test_each_worker_gets_the_gpus_of_its_machine(tmp_path: Path) -> None:
    machines = Machines(names=("n1", "n2"), launcher=LAUNCHER)
    placed = ("placement.machines={n1: 2, n2: 2}", "placement.trainer=2")
    _, services = elsewhere(tmp_path, machines, *placed, gpus=2)
    starts = {name: service.argv for name, service in services.items()}
    at = [starts[name][1][-2:] for name in ("trainer", "rollout-0", "rollout-1")]
    assert at == ["n1", "n2", "n2"]
    assert f"{DEVICES}=0,1" in starts["trainer"]
    assert f"{DEVICES}=1" in starts["rollout-1"]


def test_workers_on_other_machines_find_the_trainer_unless_the_recipe_says_where(
    tmp_path: Path,
) -> None:
    machines = Machines(names=("n1", "n2"), launcher=LAUNCHER)
    assert machines.prepared(recipe(tmp_path)).weights.host == "n1"
    named = recipe(tmp_path, "weights.host=n1.infiniband")
    assert machines.prepared(named).weights.host == "n1.infiniband"


def test_one_machine_alone_stays_on_loopback(tmp_path: Path) -> None:
    machines = Machines(names=("n1",), launcher=LAUNCHER)
    launch_plan, _ = elsewhere(tmp_path, machines)
    assert {entry.host for entry in launch_plan.address_book.services.values()} == {"127.0.0.1"}
    assert machines.prepared(recipe(tmp_path)).weights.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("names", "launcher", "said"),
    [
        (("n1", "n1"), LAUNCHER, "--machines: 'n1,n1': want different names: n1,n2"),
        (("n1",), ("srun",), "--launcher: 'srun' does not say where {machine} goes"),
        (("n1", "n3"), LAUNCHER, "placement.machines: n1, n2; want those of --machines"),
    ],
)
def test_machines_that_cannot_be_meant_are_refused(
    tmp_path: Path, names: tuple[str, ...], launcher: tuple[str, ...], said: str
) -> None:
    placed = recipe(tmp_path, "placement.machines={n1: 2, n2: 2}")
    with pytest.raises(UserError, match=re.escape(said)):
        Machines(names=names, launcher=launcher).prepared(placed)


def test_what_loads_a_model_may_take_as_long_as_an_engine_needs(tmp_path: Path) -> None:
    _, services = plan(tmp_path)
    assert {name: service.ready_s for name, service in services.items()} == {
        "queue": 300,
        "reward": 300,
        "feeder": 300,
        "trainer": 900,
        "rollout-0": 960,
    }
    changes = ("rollout.name=vllm", "rollout.engine.start_s=1800")
    assert plan(tmp_path, *changes)[1]["rollout-0"].ready_s == 1860
