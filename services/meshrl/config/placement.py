"""Which GPUs, which share of their memory and which ports each service of a recipe gets.

    recipe.placement + hosts with GPUs ──place──▶ Placement ──share──▶ CUDA_VISIBLE_DEVICES and the like, by service

A pure function of both: `up`, `serve` on each machine and `config check` find the same. The trainer's GPUs are the
first ones of the first host, or of the first `trainer.nnodes`; the reference has the one behind them on the first;
rollout workers have what is left there, and all of the other hosts. A machine without GPUs has no placement.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.common.device_lease import DeviceShare
from meshrl.config import memory
from meshrl.config.machine import GIB, NO_GPU, Gpu, HostGpus, ThisMachine
from meshrl.config.memory import ModelShape, Need
from meshrl.config.recipe import Recipe, names, needs_reference
from meshrl.contract.errors import CapacityError, ConfigError

USABLE = 0.95
"""Usable share of a GPU's memory: the rest is the driver's."""
ENGINE_SHARE = 0.9
"""Share of a GPU that an engine has for itself."""
UNKNOWN_SHARES = {"trainer": 0.45, "reference": 0.1, "rollout": 0.4}
"""Share of a shared GPU, where the memory or the model's size is not known; of all its engines together."""
UNKNOWN_CONTEXT = 0.1
"""Share of a GPU that is used in turns: what a process keeps between its turns, where the memory is not known."""
FIRST_PORT, PORTS_EACH = 10_000, 64
FIRST_WORKER = 2
"""Number of the port range of rollout-0, behind those of the trainer and the reference."""
SPLIT_FROM = 4
"""GPUs of the first host from which on a reference has one for itself."""
ENGINES = ("torch", "vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlace:
    """Host and GPUs of one service."""

    service: str
    host: HostGpus
    gpus: tuple[Gpu, ...]
    need: Need | None
    """On each of them, where it can be estimated."""
    share: DeviceShare


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all services that compute; none where there is no GPU."""

    recipe: Recipe
    """The recipe with the ranks and the workers that were decided."""
    places: Mapping[str, ServicePlace] = field(default_factory=dict)
    hosts: tuple[HostGpus, ...] = ()
    worker_gpus: int = 0
    no_gpu: str = NO_GPU
    """The reason why there are no hosts with GPUs."""

    def share(self, service: str) -> DeviceShare | None:
        """The share of a service; None for one that needs no GPU, or where there are none."""
        return self.places[service].share if service in self.places else None

    def another(self, worker: str, taken: Collection[str]) -> DeviceShare | None:
        """The share of one more rollout worker on the first host; None where workers have no GPU.

        Args:
            worker: Its name.
            taken: The devices of services that run there.

        Raises:
            CapacityError: too few GPUs are free.
        """
        if not self.worker_gpus:
            return None
        host = self.hosts[0]
        free = [gpu.id for gpu in host.gpus if gpu.id not in taken]
        if len(free) < self.worker_gpus:
            raise CapacityError(
                f"{worker} needs {_gpus(self.worker_gpus)}, and {len(free)} of the {len(host.gpus)} of"
                f" {host.name} are free"
            )
        return DeviceShare(
            devices=tuple(free[: self.worker_gpus]),
            memory=ENGINE_SHARE,
            ports=_ports(FIRST_WORKER + _number(worker)),
            bus_order=host.bus_order,
        )

    def problems(self) -> Iterator[str]:
        """GPUs whose services need more memory than there is, by estimate; what the places rule out."""
        yield from self._asked_in_vain()
        yield from self._carrier_problems()
        if self.recipe.takes_turns:
            yield from self._turn_problems()
        seen = set()
        for place in self.places.values():
            for gpu in place.gpus:
                beside = [p for p in self.places.values() if p.host == place.host and gpu in p.gpus]
                services = tuple(p.service for p in beside)
                needs = [p.need.total for p in beside if p.need is not None]
                known = gpu.memory and len(needs) == len(beside)
                kinds = tuple(name.partition("-")[0] for name in services)
                if known:
                    needs = self._at_once(place.service, services, needs)
                if kinds in seen or not known or sum(needs) <= USABLE * gpu.memory:
                    continue
                seen.add(kinds)
                parts = " + ".join(
                    f"{name} {need / GIB:.1f}" for name, need in zip(services, needs, strict=True)
                )
                yield (
                    f"placement: {parts} GiB on a GPU of {gpu.memory / GIB:.0f} GiB, by estimate: "
                    + _advice(self.recipe, services)
                )

    def _at_once(self, service: str, beside: Sequence[str], needs: Sequence[int]) -> list[int]:
        """Memory that services on one GPU take while `service` has its turn: those that sleep keep a context."""
        if not self.recipe.takes_turns:
            return list(needs)
        return [
            memory.OVERHEAD if name != service and sleeps(name) else need
            for name, need in zip(beside, needs, strict=True)
        ]

    def _asked_in_vain(self) -> Iterator[str]:
        """GPUs that the recipe gives to services, where there are none, or none is to be used."""
        asked = self.recipe.placement
        named = {"trainer": asked.trainer, "reference": asked.reference, "colocate": asked.colocate}
        if not self.hosts:
            named["rollout"] = asked.rollout
            why = f"this machine has {self.no_gpu}; want auto (`--assume` checks a recipe for another machine)"
        elif self.recipe.trainer.device == "cpu":
            why = "trainer.device is cpu; want auto for one of the two"
        elif asked.trainer == 0:
            del named["reference"]
            why = "placement.trainer is 0; want auto for one of the two"
        else:
            return
        for key, value in named.items():
            if value not in ("auto", 0, "time_sliced"):
                what = "true" if value is True else _gpus(int(value))
                yield f"placement.{key}: {what}, and {why}"

    def _turn_problems(self) -> Iterator[str]:
        at, recipe = "placement.colocate: time_sliced", self.recipe
        if recipe.rollout.name not in ENGINES:
            yield f"{at}, and rollout.name is {recipe.rollout.name}; want one of {', '.join(ENGINES)}"
        if recipe.trainer.ranks > 1:
            yield f"{at}, and the trainer has {recipe.trainer.ranks} ranks; want 1"
            return
        if recipe.weights.carrier in ("nccl", "cuda_ipc"):
            yield (
                f"{at}, and weights.carrier {recipe.weights.carrier} keeps memory of the GPU while engines"
                " have it; want shm or auto"
            )
        guesses = recipe.rollout.engine.get("speculative")
        if isinstance(guesses, Mapping) and guesses.get("draft") is not None:
            yield f"{at}, and no update brings back rollout.engine.speculative.draft; want n-grams"
        apart = [
            name
            for name, place in self.places.items()
            if name.startswith("rollout-")
            and place.share.devices != self.places["trainer"].share.devices
        ]
        if apart:
            yield f"{at}, and {apart[0]} is not on the trainer's GPU; want rollout.workers=1 on one GPU"

    def _carrier_problems(self) -> Iterator[str]:
        carrier = self.recipe.weights.carrier
        trainer = self.places.get("trainer")
        if trainer is None or not trainer.gpus:
            return
        workers = [place for name, place in self.places.items() if name.startswith("rollout-")]
        sharing = [
            p.service for p in workers if p.host == trainer.host and trainer.gpus[0] in p.gpus
        ]
        permitted = self.recipe.weights.nccl.env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if carrier == "nccl" and sharing and not permitted:
            yield (
                f"weights.carrier: nccl, and {sharing[0]} is on the GPU of the trainer's first rank,"
                " which NCCL refuses; want cuda_ipc, shm or auto"
            )
        if carrier == "cuda_ipc" and len(sharing) < len(workers):
            apart = next(p.service for p in workers if p.service not in sharing)
            yield (
                f"weights.carrier: cuda_ipc, and {apart} does not see the GPU of the trainer's first"
                " rank; want nccl, shm or auto, or placement.colocate=true"
            )

    def lines(self) -> Iterator[str]:
        """The table, and what `weights.carrier: auto` takes."""
        if self.recipe.weights.carrier == "auto":
            yield self.recipe.weights.auto_says
        if not self.places:
            if self.no_gpu != NO_GPU and self.recipe.trainer.device != "cpu":
                yield f"this machine has {self.no_gpu}: everything computes on the CPU"
            return
        rows = [("service", "host", "GPUs", "memory", "estimate", "ports")]
        for place in self.places.values():
            share, need = place.share, place.need
            rows.append(
                (
                    place.service,
                    place.host.name,
                    ",".join(share.devices) or "none",
                    f"{share.memory:.0%}" if share.devices else "",
                    f"{need.total / GIB:.1f} GiB" if need and share.devices else "",
                    f"{share.ports.start}-{share.ports.stop - 1}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield "  ".join(cells).rstrip()


def hosts_of(recipe: Recipe, machine: ThisMachine) -> tuple[HostGpus, ...]:
    """The hosts that the recipe names, else the machine, and as many like it as the trainer has machines.

    Those without GPUs are left out.
    """
    here = machine.devices
    if recipe.placement.machines:
        like = here[0] if here else Gpu(id="0")
        named = (
            HostGpus(
                name=name,
                gpus=tuple(Gpu(id=str(i), name=like.name, memory=like.memory) for i in range(n)),
            )
            for name, n in recipe.placement.machines.items()
        )
        return tuple(named)
    if not here:
        return ()
    name = socket.gethostname()
    more = (f"{name} + {node}" for node in range(1, recipe.trainer.nnodes))
    return tuple(HostGpus(name=n, gpus=here, bus_order=machine.bus_order) for n in (name, *more))


def place(recipe: Recipe, machine: ThisMachine) -> Placement:
    """Place every service.

    Raises:
        ConfigError: the GPUs do not suffice.
    """
    hosts = hosts_of(recipe, machine)
    if not hosts:
        return Placement(recipe=recipe, no_gpu=machine.no_gpu)
    config = machine.json(recipe.model.path / "config.json")
    reference_config = machine.json(recipe.reference_model.path / "config.json")
    models = (ModelShape.of(config), ModelShape.of(reference_config))
    return _Division(recipe, hosts, *models).placement()


class _Division:
    """The GPUs of `hosts`, dealt out step by step."""

    def __init__(
        self,
        recipe: Recipe,
        hosts: Sequence[HostGpus],
        model: ModelShape | None,
        reference_model: ModelShape | None,
    ) -> None:
        self.recipe = recipe
        self.hosts = tuple(hosts)
        self.model = model
        self.reference_model = reference_model
        self.asked = recipe.placement
        self.memory = min(gpu.memory for host in hosts for gpu in host.gpus)
        self.nodes = recipe.trainer.nnodes
        if self.nodes > len(self.hosts):
            raise ConfigError(
                f"trainer.nnodes: {self.nodes} machines, and placement.machines has {len(self.hosts)}"
            )
        self.first = min(len(host.gpus) for host in self.hosts[: self.nodes])
        """GPUs of each of the trainer's hosts."""
        self.total = sum(len(host.gpus) for host in self.hosts)
        self.on_cuda = recipe.trainer.device != "cpu"

    def placement(self) -> Placement:
        """The whole placement."""
        per_worker = self._worker_gpus()
        colocate = self._colocate(per_worker)
        beside = self._reference_gpus(colocate)
        ranks = self._trainer_gpus(per_worker, beside, colocate)
        blocks = list(self._blocks(per_worker, 0 if colocate else ranks, beside))
        workers = self._workers(per_worker, blocks, ranks, colocate)
        decided = _decided(self.recipe, ranks if self.on_cuda else 0, workers)
        chosen: dict[str, tuple[HostGpus, tuple[Gpu, ...]]] = {}
        first = self.hosts[0]
        if ranks or not self.on_cuda or self.asked.trainer == 0:
            chosen["trainer"] = (first, first.gpus[:ranks])
            for node, host in enumerate(self.hosts[1 : self.nodes], 1):
                chosen[f"trainer-{node}"] = (host, host.gpus[:ranks])
        if needs_reference(self.recipe):
            on = self.on_cuda and self.asked.reference != 0
            index = ranks if beside else max(0, ranks - 1)
            count = max(1, beside) if on else 0
            chosen["reference"] = (first, first.gpus[index : index + count])
        if per_worker:
            chosen |= {f"rollout-{i}": blocks[i % len(blocks)] for i in range(workers)}
        places = self._shared(decided, chosen, ranks, per_worker)
        return Placement(recipe=decided, places=places, hosts=self.hosts, worker_gpus=per_worker)

    def _worker_gpus(self) -> int:
        """GPUs of each rollout worker."""
        rollout = self.recipe.rollout
        options = rollout.engine
        elsewhere = bool(options.get("url")) or options.get("device") == "cpu"
        asked = self.asked.rollout
        if asked != "auto":
            if rollout.name == "torch" and asked > 1:
                raise ConfigError(
                    f"placement.rollout: {asked}, and the torch engine computes on one GPU; want 1, or"
                    " rollout.name=vllm",
                )
            return asked
        if elsewhere or rollout.name not in ENGINES:
            return 0
        if rollout.name == "torch" or self.model is None or not self.memory:
            return 1
        size = 1
        while memory.engine_need(
            self.recipe, self.model, size
        ).total > ENGINE_SHARE * self.memory and 2 * size <= max(
            len(host.gpus) for host in self.hosts
        ):
            size *= 2
        return size

    def _colocate(self, per_worker: int) -> bool:
        if not per_worker or not self.on_cuda or self.asked.trainer == 0:
            return False
        return self.total == 1 if self.asked.colocate == "auto" else bool(self.asked.colocate)

    def _reference_gpus(self, colocate: bool) -> int:
        """GPUs that the reference has for itself, one for each of its ranks."""
        if not needs_reference(self.recipe) or not self.on_cuda:
            return 0
        ranks, asked = self.recipe.reference.nproc, self.asked.reference
        own = asked == 1 or (asked != 0 and (ranks > 1 or self.first >= SPLIT_FROM))
        if ranks > 1 and (colocate or not own):
            raise ConfigError(f"reference.nproc: {ranks} ranks need a GPU each, unshared; want 1")
        return ranks if own and not colocate else 0

    def _trainer_gpus(self, per_worker: int, beside: int, colocate: bool) -> int:
        """GPUs of the trainer on each of its hosts, one rank on each."""
        named = self.recipe.trainer.nproc if names(self.recipe.trainer, "nproc") else None
        asked = None if self.asked.trainer == "auto" else self.asked.trainer
        if not self.on_cuda or asked == 0:
            return 0
        if asked is not None and named not in (None, asked):
            raise ConfigError(
                f"placement.trainer: {_gpus(asked)}, and trainer.nproc is {named}: a rank has one"
                " GPU; want the same, or one of the two",
            )
        wanted = asked or named
        room = self.first - beside
        if wanted is None:
            wanted = self._auto_trainer(per_worker, room, colocate)
        if wanted > room:
            raise ConfigError(
                f"{'placement.trainer' if asked else 'trainer.nproc'}: {_gpus(wanted)}, and"
                f" {self.hosts[0].name} has {self.first}"
                + (f" with {beside} of them for the reference" if beside else ""),
            )
        return wanted

    def _auto_trainer(self, per_worker: int, room: int, colocate: bool) -> int:
        shared = self.recipe.parallel.least
        elsewhere = (
            sum(len(host.gpus) // per_worker for host in self.hosts[self.nodes :])
            if per_worker
            else 0
        )
        if colocate or not per_worker:
            most = room
        elif names(self.recipe.rollout, "workers"):
            most = room - per_worker * max(0, self.recipe.rollout.workers - elsewhere)
        else:
            most = room if elsewhere else room - per_worker
        if per_worker and not colocate:
            # Half of all: sampling and learning take about as long for answers of some thousand tokens.
            most = min(most, max(self._least_trainer(), self.total // 2 // self.nodes))
        while most > 0 and most * self.nodes % shared:
            most -= 1
        if most <= 0:
            raise ConfigError(
                f"placement: {_gpus(self.total)} do not suffice for a trainer of at least {shared}"
                f" and {_workers_text(self.recipe, per_worker)} beside it; want fewer of them, or"
                " placement.colocate=true",
            )
        return most

    def _least_trainer(self) -> int:
        """The fewest GPUs over which the trainer's state fits; 1 where that cannot be told."""
        if self.model is None or not self.memory:
            return 1
        needs = (
            (
                gpus,
                memory.trainer_need(self.recipe, self.model, gpus * self.nodes, self.memory).total,
            )
            for gpus in range(1, self.first + 1)
        )
        return next((gpus for gpus, need in needs if need <= USABLE * self.memory), self.first)

    def _blocks(
        self, per_worker: int, taken: int, beside: int
    ) -> Iterator[tuple[HostGpus, tuple[Gpu, ...]]]:
        """Places for rollout workers: not on `taken` GPUs of the trainer's hosts, and `beside` more of the first."""
        if not per_worker:
            return
        for index, host in enumerate(self.hosts):
            start = taken if index < self.nodes else 0
            start += beside if index == 0 else 0
            for at in range(start, len(host.gpus) - per_worker + 1, per_worker):
                yield host, host.gpus[at : at + per_worker]

    def _workers(
        self,
        per_worker: int,
        blocks: Sequence[tuple[HostGpus, tuple[Gpu, ...]]],
        ranks: int,
        colocate: bool,
    ) -> int:
        """How many there are; on GPUs that are shared anyway, as many as the recipe says, if memory allows."""
        written = self.recipe.rollout.workers
        if not per_worker:
            return written
        wanted = written if names(self.recipe.rollout, "workers") else max(1, len(blocks))
        if wanted > len(blocks) and not (colocate and blocks and not self.recipe.takes_turns):
            raise ConfigError(
                f"rollout.workers: {wanted} with {_gpus(per_worker)} each, and {len(blocks)} find room"
                f" in {_gpus(self.total)} beside the trainer's {ranks}; want fewer,"
                " placement.colocate=true, or placement.machines for those that are elsewhere",
            )
        return wanted

    def _shared(
        self,
        recipe: Recipe,
        chosen: Mapping[str, tuple[HostGpus, tuple[Gpu, ...]]],
        ranks: int,
        per_worker: int,
    ) -> dict[str, ServicePlace]:
        """Memory and ports of every chosen place."""
        needs = {name: self._need(recipe, name, ranks, per_worker) for name in chosen}
        places: dict[str, ServicePlace] = {}
        order = {name: int(name == "reference" and "trainer" in chosen) for name in chosen}
        for name, (host, gpus) in chosen.items():
            beside = [
                other
                for other, (there, theirs) in chosen.items()
                if other != name and there is host and set(gpus) & set(theirs)
            ]
            number = FIRST_WORKER + _number(name) if name.startswith("rollout-") else order[name]
            places[name] = ServicePlace(
                service=name,
                host=host,
                gpus=gpus,
                need=needs[name] if gpus else None,
                share=DeviceShare(
                    devices=tuple(gpu.id for gpu in gpus),
                    memory=self._memory_share(name, beside, needs),
                    ports=_ports(number),
                    bus_order=host.bus_order,
                    in_turns=self._takes_turns(name) and bool(gpus),
                ),
            )
        return places

    def _takes_turns(self, name: str) -> bool:
        return self.recipe.takes_turns and sleeps(name)

    def _need(self, recipe: Recipe, name: str, ranks: int, per_worker: int) -> Need | None:
        kind = name.partition("-")[0]
        model = self.reference_model if kind == "reference" else self.model
        if model is None:
            return None
        if kind == "trainer":
            return memory.trainer_need(recipe, model, max(1, ranks * self.nodes), self.memory)
        if kind == "reference":
            return memory.reference_need(recipe, model, self.memory)
        return memory.engine_need(recipe, model, max(1, per_worker))

    def _turn_share(self, beside: Sequence[str], needs: Mapping[str, Need | None]) -> float:
        """The share of a device in a service's turn: all but what the others keep."""
        kept = 0.0
        for other in beside:
            if sleeps(other):
                kept += memory.OVERHEAD / self.memory if self.memory else UNKNOWN_CONTEXT
            else:
                kept += self._memory_share(other, ["trainer"], needs)
        return round(max(0.01, min(ENGINE_SHARE, USABLE - kept)), 2)

    def _memory_share(
        self, name: str, beside: Sequence[str], needs: Mapping[str, Need | None]
    ) -> float:
        """Trainer and reference get what they need; engines share the rest of the GPU."""
        kind = name.partition("-")[0]
        if not beside:
            return ENGINE_SHARE if kind == "rollout" else 1.0
        if self._takes_turns(name):
            return self._turn_share(beside, needs)
        need = needs[name]
        others = [each for each in beside if not each.startswith("rollout-")]
        engines = 1 + len(beside) - len(others) if kind == "rollout" else 1
        if not self.memory or need is None or any(needs[each] is None for each in beside):
            return round(UNKNOWN_SHARES[kind] / engines, 2)
        if kind != "rollout":
            return round(min(1.0, need.total / self.memory + 0.02), 2)
        rest = USABLE - sum(self._memory_share(o, [name], needs) for o in others)
        return round(max(0.01, min(ENGINE_SHARE, rest / engines)), 2)


def sleeps(service: str) -> bool:
    """Whether a service gives up the GPU when it is used in turns; the reference keeps its part."""
    return service != "reference"


def _decided(recipe: Recipe, ranks: int, workers: int) -> Recipe:
    trainer = recipe.trainer.model_copy(update={"nproc": ranks}) if ranks else recipe.trainer
    rollout = recipe.rollout.model_copy(update={"workers": workers})
    return recipe.model_copy(update={"trainer": trainer, "rollout": rollout})


def _ports(index: int) -> range:
    start = FIRST_PORT + PORTS_EACH * index
    return range(start, start + PORTS_EACH)


def _number(worker: str) -> int:
    return int(worker.rpartition("-")[2])


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("" if count == 1 else "s")


def _workers_text(recipe: Recipe, per_worker: int) -> str:
    workers = recipe.rollout.workers
    return f"{workers} rollout worker{'' if workers == 1 else 's'} with {_gpus(per_worker)} each"


def _advice(recipe: Recipe, services: Collection[str]) -> str:
    """Settings that would take less memory."""
    model, choices = recipe.model, []
    if "trainer" in services:
        if model.param_dtype == "float32":
            choices.append("model.param_dtype=bfloat16")
        if not model.enable_gradient_checkpointing:
            choices.append("model.enable_gradient_checkpointing=true")
        choices.append("a smaller actor.ppo_max_token_len_per_gpu")
        if not model.param_offload:
            choices.append("model.param_offload=true")
        if not model.lora_rank:
            choices.append("model.lora_rank=32")
    elif "reference" in services:
        choices.append("a smaller reference.max_tokens_per_batch")
    else:
        choices += ["more GPUs in placement.rollout", "a shorter data.max_response_length"]
    return "want " + ", or ".join(choices)
