"""What a carrier says of itself, read from its file without importing it: what it needs and how far it reaches.

A carrier's module may assign these literals; what it leaves out is as below.

    REACH = "host" | "network" | "directory"     who can be reached: this host, anybody, whoever shares run.dir
    NEEDS = ("torch", "cuda")                    modules that both ends must be able to import; cuda: a GPU driver
    RATE = 1e9                                   bytes a second to one replica, before anything is measured
    SPARSE = False                               whether it sends what changed, so that its time follows the density
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from meshrl.config.weights import CARRIERS, WeightsConfig
from meshrl.contract import plugins
from meshrl.weights.shared_memory import FOLDER, boot_id

_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Of one carrier."""

    reach: str
    needs: tuple[str, ...]
    rate: float
    sparse: bool

    @property
    def met(self) -> bool:
        """Whether this process has what the carrier needs."""
        return all(
            _DRIVER.exists() if need == "cuda" else importlib.util.find_spec(need) is not None
            for need in self.needs
        )


def traits(name: str) -> Traits:
    """Of a module of `carriers`, or a dotted path."""

    def said(what: str, default: object) -> object:
        return plugins.constant(CARRIERS, name, what, default)

    needs = said("NEEDS", ())
    assert isinstance(needs, tuple)
    return Traits(
        reach=str(said("REACH", "network")),
        needs=needs,
        rate=float(str(said("RATE", 1e9))),
        sparse=bool(said("SPARSE", False)),
    )


def offered(config: WeightsConfig) -> tuple[str, ...]:
    """The carriers that this process can be reached by: the configured one, or those of `auto` that it can run."""
    if config.carrier != "auto":
        return (config.carrier,)
    known = plugins.known(CARRIERS)
    return tuple(
        name for name in config.among if ("." in name or name in known) and traits(name).met
    )


def host_id() -> str:
    """The kernel and its shared memory: equal for two processes that can meet there. Empty when unknown."""
    boot = boot_id()
    try:
        return f"{boot}/{FOLDER.stat().st_dev}" if boot else ""
    except OSError:
        return ""
