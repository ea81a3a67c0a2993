"""Block-diagonal causal attention over a pack, registered with transformers as `meshrl_packed`.

No mask over the pack is built. On CUDA in half precision kernels take rows as they lie (`attention_kernels.py` says
which). Elsewhere sequences of similar length become one rectangular causal call: padding at the end cannot be seen by
a real query under a causal mask, so the result is exact. A row of which more than half is laid with another one has
queries for its own tokens alone, and a mask. No kernel of torch computes softcaps and sinks: there all scores are in
memory.

Layers that keep a state from one token to the next (linear attention, convolutions, Mamba) run over the same
rectangles, whole (`split_rows`): such a layer is causal, too, and each row begins with no state. Kernels of
flash-linear-attention, causal-conv1d and mamba-ssm, which transformers uses where they are installed, get the
starts of rows instead, and take them end to end.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from meshrl.common.device_lease import ROWS_PER_LAID, STATEFUL_ROWS_PER_LAID
from meshrl.contract.errors import UserError
from meshrl.trainer.model.attention_kernels import (
    attend_row,
    attend_varlen,
    name_of_starts,
    row_starts,
    takes_long_rows,
)
from meshrl.trainer.model.packing import LONG_ROW, PackLayout, RowRectangle, RowRun
from meshrl.trainer.model.parallel import repeats

NAME = "meshrl_packed"
_CARRIED = "_meshrl_packed_layout"
_STATEFUL = re.compile(r"(GatedDeltaNet|DeltaAttention|Mixer|MambaLayer|ShortConv)$")
"""Ends of the names of transformers' classes: each has [B, T, H] in and out, and no state where none is given."""
_calls = threading.local()


def calls() -> int:
    """How often this thread has computed in rows of a pack here: code of a model may have layers of its own."""
    count: int = getattr(_calls, "count", 0)
    return count


def carrying(position_ids: torch.Tensor, layout: PackLayout) -> torch.Tensor:
    """`position_ids`, by which `packed_attention` finds the layout where a model hands on nothing else.

    The tensor is what a layer was called with also when its activations are computed again, later and elsewhere.
    """
    setattr(position_ids, _CARRIED, layout)
    return position_ids


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackLayout | None = None,
    position_ids: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention inside each sequence of the pack.

    Args:
        module: The layer; only its class is read.
        query: [1, Hq, P, D].
        key: [1, Hkv, P, D], Hq a multiple of Hkv.
        value: [1, Hkv, P, Dv]; Dv is D but for multi-head latent attention (DeepSeek-V3).
        attention_mask: Must be None: `packed_layout` says it all.
        packed_layout: Bounds of the sequences. Some layers do not hand it on, but `position_ids`:
        position_ids: Result of `carrying`, where there is no `packed_layout`.
        scaling: Factor on the scores; None is D^-0.5.
        dropout: Attention dropout; must be 0, the trainer's log-probs would not be the sampler's otherwise.
        sliding_window: Tokens a query sees, itself included.
        softcap: c of Gemma 2: scores become c tanh(score / c).
        s_aux: [Hq], of GPT-OSS: the score of a place that every query sees and that holds nothing.

    Returns:
        [1, P, Hq, Dv] and no attention weights.

    Raises:
        UserError: the model asks for something this attention cannot do.
    """
    _calls.count = calls() + 1
    if dropout != 0.0 or attention_mask is not None:
        raise UserError(
            f"{type(module).__name__} asks for dropout={dropout} or a mask of its own: "
            "packed training supports neither; use a model without them"
        )
    packed_layout = packed_layout or getattr(position_ids, _CARRIED, None)
    if packed_layout is None:
        raise UserError(
            f"{type(module).__name__} gets no row boundaries: packed training does not support it"
        )
    scores = Scores(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    share = packed_layout.share
    if share is None:
        return _attend(query, key, value, packed_layout, scores), None
    if s_aux is not None:
        scores = replace(scores, sinks=s_aux.chunk(share.among.size)[share.among.rank])
    times = repeats(query.shape[1], key.shape[1], share.among.size)
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    q, k, v = (share.heads(x) for x in (query, key, value))
    return share.shares(_attend(q, k, v, packed_layout, scores)), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How a layer computes its scores: arguments of `packed_attention`."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def plain(self) -> bool:
        """Torch's kernels compute them."""
        return self.softcap is None and self.sinks is None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_layout: PackLayout,
    scores: Scores,
) -> torch.Tensor:
    """[1, P, Hq, Dv] from all tokens of the pack."""
    half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    same = query.shape[-1] == value.shape[-1]
    if half and attend_varlen is not None and scores.plain and same:
        return _end_to_end(attend_varlen, query, key, value, packed_layout, scores)
    # [P, H, D]: tokens first, so that one index takes whole tokens.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    parts = [_rectangle(q, k, v, b, scores) for b in packed_layout.buckets]
    return torch.cat(parts).index_select(0, packed_layout.order)[None]


def _end_to_end(
    attend: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_layout: PackLayout,
    scores: Scores,
) -> torch.Tensor:
    """[1, P, Hq, D] by a kernel that takes rows end to end."""
    every = packed_layout.keys
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    of_rows = (k, v) if every is None else [x.index_select(0, every) for x in (k, v)]
    whole = packed_layout.rows
    if whole.longest < LONG_ROW or scores.window is not None or not takes_long_rows(q, k):
        return _neighbours(attend, q, of_rows[0], of_rows[1], whole, scores)[None]
    parts, seen, runs = [], 0, packed_layout.runs
    queries = torch.split(q, [run.queries for run in runs])
    both = zip(*(torch.split(x, [run.keys for run in runs]) for x in of_rows), strict=True)
    for run, own, (k, v) in zip(runs, queries, both, strict=True):
        if not run.alone:
            parts.append(_neighbours(attend, own, k, v, run, scores))
        else:
            if every is not None and run.queries < run.keys:
                own = q.index_select(0, every[seen : seen + run.keys])
            parts.append(attend_row(own, k, v, scores.scaling)[run.keys - run.queries :])
        seen += run.keys
    return torch.cat(parts)[None]


def _neighbours(
    attend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    run: RowRun,
    scores: Scores,
) -> torch.Tensor:
    """[t, Hq, D] of the queries of rows end to end, in one call: the last of a row sees all its keys."""
    window = (-1 if scores.window is None else scores.window - 1, 0)
    places = (run.cu_queries, run.cu_keys, run.most_queries, run.longest)
    out = attend(q, k, v, *places, scale=scores.scaling, window_size=window)
    assert isinstance(out, torch.Tensor)
    return out


def _rectangle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bucket: RowRectangle,
    scores: Scores,
) -> torch.Tensor:
    """One bucket's attention: [t, Hq, Dv], its real tokens row after row."""
    length = bucket.gather.shape[1]
    first = 0 if scores.window is None else max(0, bucket.start + 1 - scores.window)
    tables = (bucket.gather[:, bucket.start :], *[bucket.gather[:, first:]] * 2)
    rectangles = [
        x.index_select(0, table.reshape(-1)).view(*table.shape, *x.shape[1:]).transpose(1, 2)
        for x, table in zip((q, k, v), tables, strict=True)
    ]
    mask = None
    windowed = scores.window is not None and length > scores.window
    if bucket.start or windowed or not scores.plain:
        column = torch.arange(length, device=q.device)
        age = column[bucket.start :, None] - column[first:]
        mask = (age >= 0) & (age < (scores.window or length))
    if scores.plain:
        out = F.scaled_dot_product_attention(
            rectangles[0],
            rectangles[1],
            rectangles[2],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        assert mask is not None
        out = _explicit(rectangles[0], rectangles[1], rectangles[2], mask, scores)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.cells)


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention that no kernel of torch computes, with all scores [n, Hq, Lq, L] in memory: [n, Hq, Lq, Dv]."""
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    found = q @ k.mT * (q.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling)
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    found = found.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(found.dtype)[None, :, None, None]
        found = torch.cat([found, sinks.expand(*found.shape[:3], 1)], -1)
    shares = found.softmax(-1, torch.float32).to(v.dtype)
    return shares[..., : v.shape[2]] @ v


def keep_out_of_graphs(hf: nn.Module) -> None:
    """Have `torch.compile` cut its graphs around what runs over rows: otherwise each layout is compiled again."""
    outside: Any = torch.compiler.disable  # torch leaves it untyped
    AttentionInterface.register(NAME, outside(packed_attention))
    for module in hf.modules():
        if is_stateful(module):
            module.forward = outside(module.forward)


AttentionInterface.register(NAME, packed_attention)


def is_stateful(module: nn.Module) -> bool:
    """Whether a layer keeps a state from one token to the next, which `split_rows` lets begin with each row."""
    return _STATEFUL.search(type(module).__name__) is not None


def rows_per_laid(hf: nn.Module) -> int:
    """Tokens of rows in a micro-batch of `hf`, at most, per token that it may lay."""
    return STATEFUL_ROWS_PER_LAID if any(map(is_stateful, hf.modules())) else ROWS_PER_LAID


def split_rows(hf: nn.Module) -> None:
    """Let the layers of `hf` that keep a state run over the rows of a pack, in place. What it has of others stays."""
    known: dict[type, str] = {}
    for module in hf.modules():
        if is_stateful(module):
            module.forward = partial(_in_rows, module.forward, known)


def _in_rows(
    forward: Any,
    known: dict[type, str],
    hidden_states: torch.Tensor,
    *,
    packed_layout: PackLayout | None = None,
    **named: Any,
) -> torch.Tensor:
    """[1, P, H] of [1, P, H], by a `forward` that takes rows [n, L, H]. Raises UserError where it knows no rows."""
    layer = forward.__self__
    if packed_layout is None:
        raise UserError(
            f"{type(layer).__name__} gets no row boundaries: packed training does not support it"
        )
    _calls.count = calls() + 1
    if type(layer) not in known:
        known[type(layer)] = name_of_starts(layer, hidden_states)
    if name := known[type(layer)]:
        rows, every = packed_layout.rows, packed_layout.keys
        if every is not None:
            hidden_states = hidden_states.index_select(1, every)
        out: torch.Tensor = forward(
            hidden_states, **row_starts(name, rows.cu_keys, rows.keys), **named
        )
        if every is None:
            return out
        # A row's own tokens are its last ones.
        before = torch.repeat_interleave(
            (rows.cu_keys - rows.cu_queries)[1:], rows.cu_queries.diff(), output_size=rows.queries
        )
        own = torch.arange(rows.queries, device=before.device) + before
        return out.index_select(1, own)
    parts = [
        forward(hidden_states[0][bucket.gather], **named)[:, bucket.start :]
        .flatten(0, 1)
        .index_select(0, bucket.cells)
        for bucket in packed_layout.buckets
    ]
    return torch.cat(parts).index_select(0, packed_layout.order)[None]


def take_falcon() -> None:
    """Give Falcon packed attention: its code does not ask transformers' attention interface."""
    from transformers.models.falcon import modeling_falcon

    own: Any = modeling_falcon  # half of it has no types

    class PackedFalconAttention(own.FalconAttention):  # type: ignore[misc]
        def forward(
            self,
            hidden_states: torch.Tensor,
            alibi: torch.Tensor | None,
            attention_mask: torch.Tensor | None,
            position_ids: torch.Tensor | None = None,
            position_embeddings: Any = None,
            **_: Any,
        ) -> tuple[torch.Tensor, None]:
            """[1, P, H] of [1, P, H], and no weights. Raises UserError for distances that a pack has not."""
            if alibi is not None:
                raise UserError("packed training does not support alibi")
            split = self._split_heads(self.query_key_value(hidden_states))
            query, key, value = (x.transpose(1, 2) for x in split)
            query, key = own.apply_rotary_pos_emb(query, key, *position_embeddings)
            found = packed_attention(
                self, query, key, value, attention_mask, position_ids=position_ids
            )[0]
            return self.dense(found.flatten(2)), None

    own.FALCON_ATTENTION_CLASSES[NAME] = PackedFalconAttention
