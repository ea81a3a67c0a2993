"""Are the files in deploy/ true: do their own tools take them, and does the real command line take their commands?"""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from meshrl.cli.commands.serve import serve
from meshrl.cli.root import KNOWN, cli
from meshrl.config.stages import BUILT_IN
from meshrl.rpc.runtime import GrpcServer, ServerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MESH = {name: each for name, each in COMPOSE["services"].items() if name in BUILT_IN}
SERVICES = set(BUILT_IN) - {"tinker"}
"""Services of a mesh."""
BESIDE = {"prepare", "operator", "prometheus", "grafana"}
"""Containers beside the services: `prepare` runs before them, the others only if their profile is named."""
INTERPOLATION = re.compile(r"\$\{\w+:-([^}]*)\}")


def interpolated(text: str) -> str:
    """As compose reads it with no variable set."""
    return INTERPOLATION.sub(r"\1", text).replace("$$", "$")


def compose_command(service: dict[str, Any]) -> list[str]:
    """The words after `meshrl`, whether the entrypoint is the image's own or a shell."""
    command = service["command"]
    if isinstance(command, list):
        words = shlex.split(interpolated(command[0]))
        assert words[:2] == ["exec", "meshrl"], "a shell that stays would swallow SIGTERM"
        return words[2:]
    return shlex.split(interpolated(command))


def unit_command(unit: Path) -> list[str]:
    """The words after `/opt/meshrl/bin/meshrl`; `%i` is 01."""
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    program, *words = shlex.split(line.replace("%i", "01"))
    assert program == "/opt/meshrl/bin/meshrl"
    return words


def commands() -> Iterator[Any]:
    for name, service in MESH.items():
        yield pytest.param(name, compose_command(service), id=f"compose-{name}")
    for unit in UNITS:
        yield pytest.param(
            unit.stem.removeprefix("meshrl-").rstrip("@"), unit_command(unit), id=unit.name
        )


@pytest.mark.parametrize(("kind", "words"), list(commands()))
def test_the_command_line_takes_the_command_of_a_service(kind: str, words: list[str]) -> None:
    assert words[0] == "serve"
    context = serve.make_context("serve", words[1:], resilient_parsing=False)
    assert context.params["service"] == kind
    assert all("=" in override for override in context.params["overrides"])


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*/recipe.yaml")), ids=str)
def test_recipes_take_the_overrides_of_compose(recipe: Path) -> None:
    from meshrl.config import load_recipe

    for service in MESH.values():
        overrides = [
            word for word in compose_command(service) if re.match(r"[a-z]+\.[a-z_.]+=", word)
        ]
        assert overrides
        load_recipe(recipe, overrides, check=False)


def test_variables_of_the_environment_are_options_of_commands() -> None:
    known = {name for option in serve.params for name in _variables(option)}
    known |= {"MESHRL_RUN", "MESHRL_TLS_CA", "MESHRL_TLS_CERT", "MESHRL_TLS_KEY"}
    given = set(COMPOSE["x-service"]["environment"]) - {"HOME"}
    given |= set(re.findall(r"^#?(MESHRL_\w+)=", (DEPLOY / "systemd/mesh.env").read_text(), re.M))
    assert len(given) >= 6
    assert given <= known


def _variables(option: click.Parameter) -> list[str]:
    names = option.envvar or []
    return [names] if isinstance(names, str) else list(names)


def test_the_strict_sandbox_finds_what_it_needs_where_rewards_are_submitted() -> None:
    """The effect of each setting on bubblewrap was tried under Docker 20.10 and systemd 252."""
    assert "bubblewrap" in (DEPLOY / "Dockerfile").read_text()
    opened = {"seccomp:unconfined", "systempaths=unconfined"}
    assert opened <= set(COMPOSE["services"]["reward"]["security_opt"])
    assert all("no-new-privileges:true" in s["security_opt"] for s in COMPOSE["services"].values())
    assert not any(
        opened & set(service["security_opt"])
        for name, service in COMPOSE["services"].items()
        if name != "reward"
    )


def test_containers_hold_no_more_than_they_need() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"] and "mem_limit" in service, name
        assert service.get("read_only") or name in ("prepare", "grafana"), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    for name, service in MESH.items():
        volumes = [volume.split(":") for volume in service["volumes"]]
        # Its own role's credentials and nobody else's; what it writes is its own, but for the weights.
        assert [each[0] for each in volumes if "credentials" in each[0]] == [f"credentials-{name}"]
        written = {each[0] for each in volumes if "ro" not in each[-1].split(",")}
        own = {"queue": {"queue"}, "reward": {"rewards"}, "trainer": {"runs", "weights"}}
        assert written == own.get(name, set()), name
    assert COMPOSE["networks"]["mesh"] == {"internal": True}


def test_the_strict_sandbox_finds_what_it_needs_under_systemd() -> None:
    unit = (DEPLOY / "systemd/meshrl-reward.service").read_text()
    for directive in ("RestrictNamespaces", "ProtectKernelTunables", "ProtectHostname"):
        assert f"\n{directive}=" not in unit
    filtered = [line for line in unit.splitlines() if line.startswith("SystemCallFilter=~")]
    assert filtered and "@mount" not in filtered[0].split()


def test_compose_and_systemd_have_the_services_that_the_command_line_knows() -> None:
    assert set(COMPOSE["services"]) == {*SERVICES, *BESIDE}
    assert {unit.stem.removeprefix("meshrl-").rstrip("@") for unit in UNITS} == SERVICES


def test_prometheus_expects_no_service_that_a_recipe_may_do_without() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    expected = {each.partition(":")[0] for each in job["static_configs"][0]["targets"]}
    looked_for = set(job["dns_sd_configs"][0]["names"])
    assert expected | looked_for == SERVICES
    assert "reference" not in expected  # it would be away for ever


def test_health_checks_ask_the_port_that_services_listen_on() -> None:
    words = COMPOSE["x-service"]["healthcheck"]["test"]
    assert words[0] == "CMD" and words[1] == "meshrl" and words[2] in KNOWN
    with click.Context(cli) as context:
        command = cli.get_command(context, words[2])
    assert command is not None
    parsed = command.make_context(words[2], list(words[3:])).params
    port = COMPOSE["x-service"]["environment"]["MESHRL_PORT"]
    assert parsed["address"] == f"127.0.0.1:{port}"


def test_the_image_gets_all_that_the_distribution_is_made_of() -> None:
    copies = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    sources = {source for line in copies for source in line.split()}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    scripts = {str(Path(script).parent) for script in wheel["shared-scripts"]}
    wanted = {
        *wheel["only-include"],
        *wheel["force-include"],
        project["project"]["readme"],
        *scripts,
    }
    assert wanted | {"pyproject.toml"} <= sources
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {source.partition("/")[0] for source in sources} == {
        line.removeprefix("!") for line in ignored if line.startswith("!")
    }


async def health_of(address: str) -> tuple[int, str]:
    """Exit code and output of `meshrl health`, as compose runs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "meshrl.cli",
        "health",
        address,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_health_tells_ready_from_starting_from_gone() -> None:
    async with GrpcServer(ServerSettings(metrics_port=None), []) as server:
        address = server.address
        assert await health_of(address) == (1, f"{address} is NOT SERVING\n")
        await server.ready()
        assert await health_of(address) == (0, f"{address} is SERVING\n")
    assert await health_of(address) == (1, f"{address} is NOT SERVING\n")


async def test_health_of_what_is_no_address_is_one_line() -> None:
    code, said = await health_of("queue")
    assert code == 2
    assert said == "error: 'queue' is not an address: want HOST:PORT, e.g. 127.0.0.1:7001\n"


def test_ports_of_units_are_all_different_and_the_environment_names_them() -> None:
    ports: list[str] = []
    for unit in UNITS:
        words = unit_command(unit)
        ports += [words[words.index(flag) + 1] for flag in ("--port", "--metrics-port")]
    assert len(ports) == len(set(ports)) == 2 * len(UNITS)
    environment = (DEPLOY / "systemd/mesh.env").read_text()
    for kind in ("queue", "trainer"):
        words = unit_command(DEPLOY / f"systemd/meshrl-{kind}.service")
        port = words[words.index("--port") + 1]
        assert f"MESHRL_{kind.upper()}=127.0.0.1:{port}\n" in environment


@pytest.mark.parametrize(
    "files",
    [
        ("compose.yaml",),
        ("compose.yaml", "compose.cuda.yaml"),
        ("compose.yaml", "compose.rewards.yaml"),
    ],
    ids=str,
)
def test_compose_takes_the_file(files: tuple[str, ...]) -> None:
    program = compose_program()
    chosen = [word for file in files for word in ("-f", str(DEPLOY / file))]
    done = subprocess.run(
        [*program, *chosen, "config"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert {*SERVICES, "prepare"} <= set(services) <= {*SERVICES, *BESIDE}


def compose_program() -> list[str]:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    pytest.skip("neither `docker-compose` nor `docker compose` is installed")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))
def test_systemd_scores_each_unit_3_at_most(unit: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("`systemd-analyze` is not installed")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=30", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("`systemd-analyze` is not installed")
    for unit in [*UNITS, DEPLOY / "systemd/meshrl.target"]:
        # systemd looks for the program, so it gets one that exists; a template becomes an instance.
        text = unit.read_text().replace("/opt/meshrl/bin/meshrl", sys.executable)
        (tmp_path / unit.name.replace("@.", "@01.")).write_text(text)
    units = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        check=False,
    )
    # Unknown settings do not change the exit code, and complaints about units of the machine are not ours.
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "meshrl" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr
