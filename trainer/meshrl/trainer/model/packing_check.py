"""Whether a model computes in a pack what transformers computes of each row alone: tried on a small random copy.

    configuration ──▶ smallest sizes ──▶ random weights ─┬▶ rows in one pack, while it trains ─┐
                                                         └▶ transformers' own, row by row ─────┴▶ equal, or refused

Neither the name of a model nor a key of its configuration says what its code does: whether it takes positions as they
are given, keeps a state from one token to the next, or draws while it trains. A forward pass does, in a fraction of a
second, also for code that came with the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from meshrl.contract.errors import MeshError
from meshrl.contract.types import Int32
from meshrl.trainer.model.packing import Pack, pack
from meshrl.trainer.model.small_copy import VOCABULARY, smallest

HfModel: TypeAlias = Any
"""A transformers `PreTrainedModel`: the library has no types."""
Build: TypeAlias = Callable[[Any, bool], HfModel]
"""A model of a configuration: as meshrl trains it, or as transformers computes it."""
Packed: TypeAlias = Callable[[HfModel, Pack], torch.Tensor]
"""[N, …] of the response tokens of a pack."""
Alone: TypeAlias = Callable[[HfModel, torch.Tensor], torch.Tensor]
"""[T - 1, …] of a row int64[1, T], in the same places."""
TOLERANCE = 1e-4
"""Float32's rounding is a hundredth of it; the smallest fault that was seen is ten times as much."""
_MOST_MILLIONS = 250
_PREFIX, _LENGTHS = 5, (7, 21, 21)


@torch.no_grad()
def fault(config: Any, build: Build, packed: Packed, alone: Alone) -> str:
    """Why a model of `config` cannot be trained in packs; empty where it can.

    The caller's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small = smallest(config)
            if (millions := _parameters(build, small) // 10**6) > _MOST_MILLIONS:
                return f"a small copy of it, to see what it computes in packs, has {millions} million parameters"
            theirs = build(small, False).eval()
            _draw(theirs)
            wanted = torch.cat([alone(theirs, _tensor(row)) for row in _rows()])
        except Exception as error:  # code of others: whatever it raises, it cannot be tried
            return (
                f"a small copy of it, to see what it computes in packs, ends in {first_line(error)}"
            )
        try:
            ours = build(small, True).train()
            ours.load_state_dict(theirs.state_dict())
            run = functools.partial(_run, ours, packed)
            before = torch.get_rng_state()
            found = run(_rows())
            if not torch.equal(torch.get_rng_state(), before):
                return (
                    "it draws random numbers while it trains: log-probs would not be the sampler's"
                )
            apart = float((found - wanted).abs().max())
            return "" if apart < TOLERANCE else _why(run, wanted, apart)
        except MeshError as error:
            return error.message
        except Exception as error:
            return f"it cannot compute packs: {first_line(error)}"


def _parameters(build: Build, config: Any) -> int:
    """Parameters of a model; 0 where it cannot be made without memory for them."""
    with suppress(Exception), torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config, False).parameters())
    return 0


def _why(run: Callable[..., torch.Tensor], wanted: torch.Tensor, apart: float) -> str:
    first, *others = _rows()
    if (run([first]) - wanted[: len(first) - 1]).abs().max() > TOLERANCE:
        return f"what it computes of a row is {apart:.0e} off of transformers' own, also by itself"
    one, other = (
        run([row, *others], share_prefixes=False)[len(first) - 1 :]
        for row in (first, first[::-1].copy())
    )
    if (one - other).abs().max() > TOLERANCE:
        return "rows of a pack would see each other: a state goes from one token to the next"
    return f"what it computes of a row in a pack is {apart:.0e} off: it may count positions over the whole pack"


def _run(
    ours: HfModel, packed: Packed, rows: Sequence[Int32], *, share_prefixes: bool = True
) -> torch.Tensor:
    return packed(ours, pack(rows, [1] * len(rows), share_prefixes=share_prefixes))


def _rows() -> list[Int32]:
    """One row, and two that begin alike, longer than a small copy's windows."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, VOCABULARY - 8, n).astype(np.int32) for n in _LENGTHS]
    rows[2][:_PREFIX] = rows[1][:_PREFIX]
    return rows


def _tensor(row: Int32) -> torch.Tensor:
    return torch.from_numpy(row)[None].long()


def _draw(hf: HfModel) -> None:
    """Weights that let every part say something, biases and sinks included."""
    for parameter in hf.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def first_line(error: Exception) -> str:
    """The error in a line; with its kind, unless its words stand for themselves."""
    said = (str(error).strip().splitlines() or [""])[0]
    known = isinstance(error, OSError | ValueError)
    return said if said and known else f"{type(error).__name__}: {said}".removesuffix(": ")
