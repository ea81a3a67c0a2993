"""A batch script of Slurm for a recipe: `meshrl up` runs on the first node and starts every service by `srun`.

time limit is near ── USR1 ──▶ shell ── TERM ──▶ up: drains, the trainer saves ──▶ scontrol requeue
scancel, requeue, preemption ── TERM ──▶ shell, up and every service: up drains, services wait for it
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshrl.config.placement import Placement
from meshrl.contract.errors import UserError

LAUNCHER = (
    "srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --quit-on-interrupt --nodelist={machine}"
)
"""`--overlap`: the services of a node share its processors and GPUs as the recipe says, not step by step."""
TRAPS = """
# The time limit is near: save, and queue the job again; it continues from the checkpoint.
trap 'again=yes; kill -TERM "$!"' USR1
# scancel, scontrol requeue, preemption: save within Slurm's KillWait or GraceTime.
trap 'kill -TERM "$!" 2>/dev/null' TERM
"""
TAIL = """\
up=$!
wait "$up"; code=$?
while kill -0 "$up" 2>/dev/null; do wait "$up"; code=$?; done
if [ -n "$again" ] && [ "$code" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""

Runtime = Literal["apptainer", "pyxis"]


def gpus_of(gpus_per_node: str) -> int:
    """GPUs of a node: 8 of `8` and of `h100:8`, 0 of nothing. Raises UserError."""
    count = gpus_per_node.rpartition(":")[2]
    if gpus_per_node and not (count.isdecimal() and int(count)):
        raise UserError(f"--gpus-per-node: {gpus_per_node!r}: want N or TYPE:N, as h100:8")
    return int(count or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The settings of the batch script beside the recipe."""

    recipe: str
    overrides: Sequence[str] = ()
    name: str
    """Name of the run, and of the job."""
    directory: str
    """Folder in which the job starts: the recipe's relative paths begin there."""
    program: str
    """The command `meshrl` on the nodes."""
    nodes: int = 1
    gpus_per_node: str = ""
    """sbatch's value: `8`, `h100:8`; empty: none."""
    options: Sequence[str] = ()
    """More options of sbatch: `--time=1-0`."""
    share: bool = False
    """Other jobs may run on the same nodes."""
    stop_before_s: int = 300
    """How long before the time limit the run stops and saves."""
    encrypted: bool = False
    """Whether all traffic between nodes is encrypted: with certificates, and no weights over gloo."""
    container: str = ""
    """An image; empty: none."""
    runtime: Runtime = "apptainer"
    """The command."""
    sweep: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Key to values; every combination is a task of an array, and a run of its own."""

    def script(self, placement: Placement) -> str:
        """The text of the script. `placement` is of nodes of any names."""
        lines = ["#!/bin/bash", f"# Trains {self.recipe}: submit it with sbatch."]
        lines += [f"#SBATCH {option}" for option in self._options()]
        if placement.places:
            lines += ["", *(f"#   {line}" for line in placement.lines())]
        lines += [
            "",
            'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'machines=$(IFS=,; echo "${nodes[*]}")',
        ]
        if gpus := gpus_of(self.gpus_per_node):
            alike = f"$(printf '%s: {gpus}, ' \"${{nodes[@]}}\")"
            lines.append(f'placed="placement.machines={{{alike}}}"')
        if self.nodes > 1 and not self.encrypted:
            lines.append(
                "# For a network that you trust: `tls` in the recipe encrypts calls, weights.carrier=delta weights."
            )
            lines.append("export MESHRL_ALLOW_INSECURE_BIND=1")
        lines += [*self._points(), TRAPS, f"{self._up()} &", TAIL]
        return "\n".join(lines)

    def _options(self) -> Iterator[str]:
        yield f"--job-name={self.name}"
        yield f"--nodes={self.nodes}"
        yield "--ntasks-per-node=1"
        if not self.share:
            yield "--exclusive"
        if self.gpus_per_node:
            yield f"--gpus-per-node={self.gpus_per_node}"
        yield f"--chdir={self.directory}"
        yield f"--output=slurm-%x-{'%A_%a' if self.sweep else '%j'}.out"
        yield "--open-mode=append"
        yield "--requeue"
        yield f"--signal=B:USR1@{self.stop_before_s}"
        if self.sweep:
            yield f"--array=0-{len(self._combinations()) - 1}"
        yield from self.options

    def _combinations(self) -> list[tuple[str, ...]]:
        pairs = ([f"{key}={value}" for value in values] for key, values in self.sweep.items())
        return list(itertools.product(*pairs))

    def _points(self) -> Iterator[str]:
        """The overrides of each task of the array."""
        if not self.sweep:
            return
        yield 'case "$SLURM_ARRAY_TASK_ID" in'
        for number, point in enumerate(self._combinations()):
            words = shlex.join([f"run.name={self.name}-{number}", *point])
            yield f"  {number}) point=({words}) ;;"
        yield "esac"

    def _up(self) -> str:
        words = [shlex.join([*shlex.split(self.program), "up", self.recipe, *self.overrides])]
        words += ['"${point[@]}"'] if self.sweep else []
        words += ['"$placed"'] if self.gpus_per_node else []
        launcher, program = LAUNCHER, ""
        if self.container and self.runtime == "apptainer":
            gpu = " --nv" if self.gpus_per_node else ""
            program = f"apptainer exec{gpu} {shlex.quote(self.container)} meshrl"
        elif self.container:
            here = shlex.quote(f"{self.directory}:{self.directory}")
            launcher += (
                f" --container-image={shlex.quote(self.container)} --container-mounts={here}"
            )
            launcher += f" --container-workdir={shlex.quote(self.directory)}"
            program = "meshrl"
        words += ["--plain", '--machines "$machines"', f"--launcher {shlex.quote(launcher)}"]
        words += [f"--program {shlex.quote(program)}"] if program else []
        return " \\\n  ".join(words)
