"""`meshrl slurm`, `meshrl kubernetes`: what other people's engines read to run a recipe's mesh."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from meshrl.cli.options import PATH, recipe_argument
from meshrl.common.plain_text import say
from meshrl.config import Recipe, load_recipe
from meshrl.config.loading import Written
from meshrl.config.machine import AssumedMachine, Assumptions
from meshrl.config.placement import Placement, place
from meshrl.deploy.slurm import SlurmJob, gpus_of

assume_option = click.option(
    "--assume",
    type=PATH,
    help="A YAML file that describes the nodes, as for `config check`. Anything else is assumed to be there: of this"
    " machine only the recipe, the files of its rewards, and models and data that are here too, are checked.",
)


def _sweep(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, list[str]]:
    sweep = {}
    for each in given:
        key, _, values = each.partition("=")
        if not key or not all(values.split(",")):
            raise click.BadParameter(f"{each!r}: want KEY=VALUE,VALUE, as in rollout.n=8,16")
        sweep[key] = values.split(",")
    return sweep


@click.command()
@recipe_argument
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--gpus-per-node", default="", metavar="[TYPE:]N", help="GPUs of each node, as sbatch takes it."
)
@click.option(
    "--time", metavar="LIMIT", help="Time limit: 12:00:00, 2-0. The job is queued again at its end."
)
@click.option("--partition", metavar="NAME")
@click.option("--account", metavar="NAME")
@click.option(
    "--sbatch",
    "more",
    multiple=True,
    metavar="OPTION",
    help="Another option of sbatch: --sbatch=--constraint=ib. May be given several times.",
)
@click.option("--share", is_flag=True, help="Let other jobs run on the same nodes.")
@click.option(
    "--stop-before",
    type=click.IntRange(10),
    default=300,
    show_default=True,
    help="Seconds before the time limit at which the run saves and is queued again.",
)
@click.option(
    "--sweep",
    multiple=True,
    callback=_sweep,
    metavar="KEY=V,V",
    help="An array of jobs, one for each combination of the values. May be given several times.",
)
@click.option("--container", default="", metavar="IMAGE", help="Run the services in this image.")
@click.option(
    "--runtime", type=click.Choice(["apptainer", "pyxis"]), default="apptainer", show_default=True
)
@assume_option
def slurm(
    recipe: Path,
    overrides: tuple[str, ...],
    time: str | None,
    partition: str | None,
    account: str | None,
    more: tuple[str, ...],
    stop_before: int,
    assume: Path | None,
    **job: Any,
) -> None:
    """Print a batch script of Slurm that trains RECIPE: meshrl slurm my.yaml --nodes 2 > my.sbatch."""
    named = {"--time": time, "--partition": partition, "--account": account}
    first = [f"{key}={values[0]}" for key, values in job["sweep"].items()]
    gpus = gpus_of(job["gpus_per_node"])
    loaded, placement = _placed(recipe, [*overrides, *first], assume, job["nodes"], gpus)
    beside = Path(sys.executable).with_name("meshrl")
    written = SlurmJob(
        recipe=str(recipe),
        overrides=overrides,
        name=loaded.run.name,
        directory=str(Path.cwd()),
        program=str(beside) if beside.exists() else "meshrl",
        options=[*(f"{option}={value}" for option, value in named.items() if value), *more],
        stop_before_s=stop_before,
        encrypted=loaded.encrypted,
        **job,
    )
    say(written.script(placement).removesuffix("\n"), lines=True)


def _claims(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    for each in given:
        claim, _, path = each.partition(":")
        if not claim or not path.startswith("/"):
            raise click.BadParameter(f"{each!r}: want CLAIM:/PATH, as in models:/models")
        found[claim] = path
    return found


@click.command()
@recipe_argument
@click.option("--image", default="meshrl", show_default=True, help="Image of all services.")
@click.option(
    "--engine-image", default="", metavar="IMAGE", help="Image of rollout workers, with engine."
)
@click.option(
    "--engine-nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Nodes of each rollout worker's vLLM server: a LeaderWorkerSet. Not run.",
)
@click.option(
    "--engine-gpus",
    type=click.IntRange(0),
    default=0,
    help="GPUs of such a server, on each of its nodes.",
)
@click.option(
    "--mount",
    "claims",
    multiple=True,
    callback=_claims,
    metavar="CLAIM:/PATH",
    help="Mount a PersistentVolumeClaim of models or data, read-only, everywhere. May be given several times.",
)
@click.option(
    "--storage",
    default="20Gi",
    show_default=True,
    help="Size of the queue's and the checkpoints' volumes.",
)
@click.option("--storage-class", default="", metavar="NAME")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="GPU nodes.")
@click.option("--gpus-per-node", default="", metavar="N")
@click.option("--gpu", default="nvidia.com/gpu", show_default=True, metavar="RESOURCE")
@click.option(
    "--keda",
    "most_workers",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Let KEDA scale rollout workers up to N, by the queue's hint.",
)
@click.option(
    "--prometheus",
    metavar="URL",
    default="http://prometheus:9090",
    help="Server that KEDA asks for the hint.",
)
@click.option(
    "--cert-manager",
    "issuer",
    default="",
    metavar="ISSUER",
    help="Let cert-manager's Issuer make the certificate of a recipe with `tls`.",
)
@click.option("--monitor", is_flag=True, help="Let the Prometheus operator scrape the services.")
@click.option(
    "--secrets",
    "secrets_too",
    is_flag=True,
    help="Print the Secrets with the run's credentials instead, made in its directory here where there are none.",
)
@assume_option
def kubernetes(
    recipe: Path,
    overrides: tuple[str, ...],
    nodes: int,
    gpus_per_node: str,
    secrets_too: bool,
    assume: Path | None,
    **given: Any,
) -> None:
    """Print the manifests of RECIPE's mesh: meshrl kubernetes my.yaml | kubectl apply -f -."""
    from meshrl.deploy import kubernetes as cluster

    loaded, placement = _placed(recipe, overrides, assume, nodes, gpus_of(gpus_per_node))
    if secrets_too:
        found = cluster.secrets(loaded, loaded.run.path)
    else:
        written = cluster.recipe_for_pods(placement.recipe)
        files = cluster.recipe_files(written)
        found = cluster.manifests(written, placement, files, cluster.Cluster(**given))
    say(cluster.as_yaml(found).removesuffix("\n"), lines=True)


@click.command()
@click.argument("folder", type=PATH)
@click.option(
    "--apart",
    is_flag=True,
    help="In FOLDER/ROLE what services of each role mount, and in FOLDER/operator all.",
)
def credentials(folder: Path, apart: bool) -> None:
    """Make a run's credentials in FOLDER/credentials, where there are none: before its services start elsewhere."""
    from meshrl.rpc.credentials import ensure_credentials, hand_out

    # The folder itself may hold what others read, as /etc/meshrl does.
    (hand_out if apart else ensure_credentials)(folder)
    say(f"credentials are in {folder if apart else folder / 'credentials'}")


def _placed(
    recipe: Path, overrides: Sequence[str], assume: Path | None, nodes: int, gpus: int
) -> tuple[Recipe, Placement]:
    """The recipe, checked for the nodes, and the placement of its services there. Raises ConfigError."""
    assumed = Assumptions() if assume is None else Written.read(assume, ()).as_config(Assumptions)
    if gpus:
        assumed = assumed.model_copy(update={"gpus": gpus})
        alike = ", ".join(f"node-{number}: {gpus}" for number in range(nodes))
        overrides = [*overrides, f"placement.machines={{{alike}}}"]
    machine = AssumedMachine(assumed, elsewhere=True)
    loaded = load_recipe(recipe, tuple(overrides), machine=machine, hub=False)
    return loaded, place(loaded, machine)
