"""Decode steps that a GPU repeats from a recording (a CUDA graph): one launch instead of some hundred.

    columns of rows ─one copy─▶ input ─▶ [ embedding, layers, logits, draw ] ─▶ output ─one copy─▶ tokens, log-probs
                                           recorded once for each key

A recording holds shapes and addresses. So rows are padded to a few counts, and its key is (padded rows, kind of the
draw). All recordings end when the weights or the cache move in memory. The first step of a key runs as it is, which
loads what it needs and computes the same bits; the second is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from meshrl.rollout.engines.torch.forward import KvCache, TorchDecoder
from meshrl.rollout.engines.torch.sampler import CUT, GREEDY, SamplingRows, greedy, plain, uniforms
from meshrl.rollout.engines.torch.weights import Weights

log = logging.getLogger(__name__)

Work = Callable[[], None]
Recorder = Callable[[Work], Work]
"""Makes of work, which it does not do, what repeats it."""
MOST_FAILURES = 3
"""Failures after which nothing is recorded; one may be by a thread that waited for the whole device."""


class CudaGraphs:
    """A Recorder. What its recordings compute between shares one memory, as one runs at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, work: Work) -> Work:
        """Other threads may allocate and copy meanwhile, but not wait for the whole device."""
        if not self._alive:  # torch takes no pool again that all graphs have left
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                self._end(graph)
        self._alive.add(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the recording, even a failed one: torch would record on, free nothing and refuse the pool."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError, AttributeError):  # it has ended, or this torch cannot
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
                torch._C._cuda_releasePool(self._stream.device_index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            raise


class StaticSteps:
    """Decode steps of dense models over buffers that stay where they are, `slots` wide."""

    def __init__(
        self, decoder: TorchDecoder, cache: KvCache, slots: int, recorder: Recorder | None = None
    ) -> None:
        """Prepare; with no recorder each step runs as it is."""
        self._decoder, self._cache, self._slots = decoder, cache, slots
        self._recorder = recorder
        self._failures = 0
        self._repeats: dict[tuple[int, int], Work | None] = {}
        """None for a key that was met once."""
        self._holds: tuple[Weights, int] | None = None
        """Weights and cache that recordings are of."""
        on_gpu = decoder.device.type == "cuda"
        long = partial(torch.zeros, dtype=torch.int64)
        self._host_input = long(4, slots, pin_memory=on_gpu)
        self._input = long(4, slots, device=decoder.device)
        """Tokens, positions, and as float64 uniforms and temperatures."""
        self._host_output = long(2, slots, pin_memory=on_gpu)
        self._output = long(2, slots, device=decoder.device)
        """Tokens, and as float64 log-probs."""
        self._logits: torch.Tensor | None = None
        """[slots, V], for rows that are not drawn in the recording."""

    def width(self, count: int, length: int) -> int:
        """How many rows are computed for `count` rows of `length` positions.

        1, 2, 4, 8, 16, 24, 32, 48, 64, 96 …, else a multiple of 8, if they fit, whatever was before: same rows, same
        bits. Those beyond `count` write to rows of the cache that hold nothing.
        """
        power = 1 << (count - 1).bit_length()
        between = power * 3 // 4
        padded = min(self._slots, between if count <= between and power >= 32 else power)
        widths = padded, -(-count // 8) * 8
        return next((each for each in widths if self._cache.fits(each, length)), count)

    def forget(self) -> None:
        """End all recordings."""
        self._repeats.clear()
        self._holds = self._logits = None

    def step(
        self,
        weights: Weights,
        width: int,
        tokens: npt.NDArray[np.int64],
        stored: npt.NDArray[np.int64],
        sampling: SamplingRows,
        sampled: npt.NDArray[np.int64],
    ) -> tuple[list[int], list[float]]:
        """Feed `tokens` [n] at the positions `stored` [n] to rows `0 … n - 1`, and draw.

        Args:
            weights: The version to run.
            width: Result of `width`: rows of the cache.
            tokens: Sampled last.
            stored: Positions that rows have in the cache.
            sampling: How to draw.
            sampled: int64[n], response tokens sampled before this one.

        Returns:
            Tokens and log-probs.
        """
        count = len(tokens)
        rows = slice(0, count)
        kinds = sampling.kinds(rows, self._decoder.architecture.vocab_size)
        alike = (kinds == kinds[0]).all() and not sampling.changes_logits(rows)
        kind = int(kinds[0]) if alike else CUT
        columns = self._host_input.numpy()[:, :width]
        columns[:, count:] = 0
        columns[0, rows], columns[1, rows] = tokens, stored
        uniform, temperature = columns[2:].view(np.float64)
        uniform[rows] = uniforms(sampling.key[rows], sampled)
        temperature[rows], temperature[count:] = sampling.temperature[rows], 1.0
        self._input.copy_(self._host_input, non_blocking=True)
        self._run(weights, width, kind)
        if kind == CUT:
            assert self._logits is not None
            drawn, logprobs = sampling.sample(self._logits[:count], rows, sampled)
            return drawn.tolist(), logprobs.tolist()
        self._host_output.copy_(self._output)
        answer = self._host_output.numpy()[:, rows]
        return answer[0].tolist(), answer[1].view(np.float64).tolist()

    def _run(self, weights: Weights, width: int, kind: int) -> None:
        now = self._cache.reshaped
        if self._holds is None or self._holds[0] is not weights or self._holds[1] != now:
            self.forget()
            self._holds = weights, now
        if kind == CUT and self._logits is None:
            size = self._decoder.architecture.vocab_size
            self._logits = weights.head.new_empty(self._slots, size)
        work = partial(self._compute, weights, width, kind)
        key = width, kind
        repeat = self._repeats.get(key)
        if repeat is None and key in self._repeats and self._recorder is not None:
            repeat = self._recorded(self._recorder, work)
        self._repeats[key] = repeat
        (repeat or work)()

    def _recorded(self, recorder: Recorder, work: Work) -> Work | None:
        try:
            return recorder(work)
        except RuntimeError as error:
            self._failures += 1
            log.warning(
                "decode steps run without a CUDA graph: recording failed: %s",
                str(error).partition("\n")[0],
            )
            if self._failures == MOST_FAILURES:
                self._recorder = None
            return None

    def _compute(self, weights: Weights, width: int, kind: int) -> None:
        tokens, positions = self._input[:2, :width]
        logits = self._decoder.decode(weights, self._cache, tokens, positions)
        if kind == CUT:
            assert self._logits is not None
            self._logits[:width] = logits
            return
        if kind == GREEDY:
            drawn, logprobs = greedy(logits)
        else:
            uniform, temperature = self._input[2:, :width].view(torch.float64)
            drawn, logprobs = plain(logits, temperature.float(), uniform)
        self._output[0, :width] = drawn
        self._output[1, :width].view(torch.float64).copy_(logprobs)
