"""`weights.carrier: auto`: the carrier of each worker, by what is known when it joins. No carrier itself.

    worker                                            carrier
    on the trainer's host                             shm
    elsewhere; both have a GPU and cupy               nccl
    elsewhere, else; the recipe has weights.directory disk
    elsewhere, else                                   gloo

One that cannot be opened is not offered any more by the process that could not, and the next line holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshrl.weights.carrier import CarrierFacts


def reaching(
    here: Mapping[str, CarrierFacts], there: Collection[str], *, same_host: bool
) -> list[str]:
    """The carriers by which a worker can be reached, the one to take first.

    Args:
        here: what the trainer offers, in the order of `WeightsConfig.choices`.
        there: what the worker offers.
        same_host: whether the two can share memory.
    """
    return [
        name for name, each in here.items() if name in there and (same_host or each.reach != "host")
    ]
