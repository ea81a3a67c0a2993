"""Weights under the names that checkpoints have, which are those that engines load.

transformers 5 holds the experts of a layer in two tensors; its checkpoints, vLLM and SGLang have three matrices an
expert (E experts, F their width, C hidden):

    mlp.experts.gate_up_proj [E, 2F, C]  ──▶  mlp.experts.0.gate_proj.weight [F, C], mlp.experts.0.up_proj.weight, …
    mlp.experts.down_proj    [E, C, F]   ──▶  mlp.experts.0.down_proj.weight [C, F], …

What becomes of what is transformers' own table, read backwards as its `save_pretrained` does. A checkpoint that has
the fused tensors keeps them: its engines have loaded those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from meshrl.trainer.model.lora import Weight

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # before transformers 5, which holds what its checkpoints hold
    revert_weight_conversion = None  # type: ignore[assignment]

Tensors: TypeAlias = dict[str, torch.Tensor]


class Published(Protocol):
    """A tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`. Every rank calls this, in the same order."""
        ...


@dataclass(slots=True, eq=False)
class Fused:
    """Parameters that become tensors of a checkpoint together, gathered when the first of these is asked for."""

    hf: Any
    weights: Mapping[str, Weight]
    names: frozenset[str] = frozenset()
    """Names of the checkpoint's tensors that they become."""
    left: set[str] = field(default_factory=set)
    """Names that were not requested since the last gather."""
    held: Tensors = field(default_factory=dict)
    """Tensors of `left`, on ranks that need them."""

    def shared(self, dtype: torch.dtype) -> Tensors:
        """The parameters as `dtype`, sharded as they are. Every rank calls this."""
        return {name: weight.shared(dtype) for name, weight in self.weights.items()}

    def fill(self, gathered: Tensors) -> None:
        """Take what has been gathered, of any shape; nothing on a rank that does not want it."""
        self.left = {*self.names}
        whole = {name: each.view(self.weights[name].shape) for name, each in gathered.items()}
        self.held = _reverted(self.hf, whole) if whole else {}


@dataclass(frozen=True, slots=True, eq=False)
class FusedPart:
    """One tensor that is made of fused ones."""

    source: Fused
    name: str
    shape: tuple[int, ...]

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as `dtype`. Every rank calls this, in the same order."""
        source = self.source
        if self.name not in source.left:
            source.fill({name: each.whole(dtype) for name, each in source.weights.items()})
        source.left.discard(self.name)
        return source.held.pop(self.name)


def in_checkpoint(
    hf: Any, weights: Iterable[tuple[str, Weight]], stored: Collection[str]
) -> Iterator[tuple[str, Published]]:
    """Names and tensors of a checkpoint of `hf`, in layer order.

    Args:
        hf: The model.
        weights: Its names and weights.
        stored: Names in the checkpoint that it was loaded from: what is stored as it is held stays so.
    """
    held = dict(weights)
    blanks = {name: torch.empty(weight.shape, device="meta") for name, weight in held.items()}
    whole = _reverted(hf, blanks)
    if whole.keys() == blanks.keys() and all(whole[name] is blanks[name] for name in blanks):
        yield from held.items()
        return
    kept: set[str] = set()
    groups: dict[tuple[str, ...], dict[str, Weight]] = {}
    for name, weight in held.items():
        made = _reverted(hf, {name: blanks[name]})
        if made.get(name) is blanks[name] or (name in stored and name not in made):
            kept.add(name)
            made = {name: blanks[name]}
        groups.setdefault(tuple(made), {})[name] = weight
    for members in groups.values():
        if kept.issuperset(members):
            yield from members.items()
            continue
        made = _reverted(hf, {name: blanks[name] for name in members})
        source = Fused(hf, members, frozenset(made))
        for name, blank in made.items():
            yield name, FusedPart(source, name, tuple(blank.shape))


def _reverted(hf: Any, tensors: Tensors) -> Tensors:
    """Tensors that `save_pretrained` would write."""
    made: Tensors = tensors
    if revert_weight_conversion is not None:
        made = revert_weight_conversion(hf, tensors)
    return made
