"""Recorded decode steps say what plain ones say, and end when what they hold moves in memory."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshrl.rollout.engines.torch.architecture import read_architecture
from meshrl.rollout.engines.torch.batch import DecodeBatch, DecodeRow
from meshrl.rollout.engines.torch.forward import KvCache, TorchDecoder
from meshrl.rollout.engines.torch.graphs import (
    MOST_FAILURES,
    CudaGraphs,
    Recorder,
    StaticSteps,
    Work,
)
from meshrl.rollout.engines.torch.operations import attend, attend_up_to, row_ends
from meshrl.rollout.engines.torch.staging import Built
from meshrl.rollout.engines.torch.weights import Weights, from_checkpoint

from .checkpoints import Checkpoint, make_model, prompts, request

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SLOTS, LENGTH = 40, 600
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
devices = pytest.mark.parametrize(
    "device", [CPU, pytest.param(GPU, marks=[needs_gpu, pytest.mark.gpu])], ids=str
)
SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "sampled": [{"temperature": 1.0}, {"temperature": 0.7}],
    "of every kind": [{"temperature": 0.0}, {"temperature": 1.2}, {"temperature": 1.0, "top_k": 7}],
    "with changed logits": [
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.9},
        {"logit_bias": {7: 4.0}, "min_p": 0.1},
    ],
}


class Recordings:
    """A Recorder whose recordings notice that the cache has moved."""

    def __init__(self, cache: KvCache) -> None:
        self.made = self.repeated = 0
        self._cache = cache

    def __call__(self, work: Work) -> Work:
        self.made += 1
        held = self._addresses()

        def repeat() -> None:
            assert self._addresses() == held
            self.repeated += 1
            work()

        return repeat

    def _addresses(self) -> list[tuple[int, torch.Size]]:
        return [(layer.data_ptr(), layer.shape) for layer in self._cache.layers]


class Story:
    """A batch and what happens to it, in decode steps."""

    def __init__(
        self,
        model: Checkpoint,
        device: torch.device,
        recorder: Callable[[KvCache], Recorder] | None,
    ) -> None:
        architecture = read_architecture(model.path)
        self.device = device
        self.cache = KvCache(
            shape=(architecture.num_layers, architecture.num_kv_heads, architecture.head_dim),
            dtype=torch.float32,
            device=device,
            max_rows=SLOTS,
            max_bytes=1 << 28,
            steady=recorder is not None,
        )
        decoder = TorchDecoder(architecture, torch.float32, device, LENGTH)
        self.recorder = recorder(self.cache) if recorder else None
        steps = StaticSteps(decoder, self.cache, SLOTS, self.recorder) if recorder else None
        self.batch = DecodeBatch(
            decoder, self.cache, slots=SLOTS, max_prefill_tokens=512, static_steps=steps
        )
        self.weights = self.read(model)
        self.rows: list[DecodeRow] = []

    def read(self, model: Checkpoint) -> Weights:
        return from_checkpoint(
            model.path, read_architecture(model.path), torch.float32, self.device
        )

    def join(self, count: int, samplings: list[dict[str, Any]], tokens: int) -> None:
        first = len(self.rows)
        for index, prompt in enumerate(prompts(count, seed=first), start=first):
            sampling = samplings[index % len(samplings)] | {"max_tokens": tokens + index % 5}
            made = request(str(index), prompt, seed=3, **sampling)
            self.rows.append(
                DecodeRow(
                    request=made,
                    deliver=lambda _: None,
                    limit=made.sampling.max_tokens,
                    stop_ids=frozenset(),
                    stop_strings=None,
                )
            )
        self.batch.admit(self.weights, deque(self.rows[first:]))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.batch.step(self.weights)

    def swap(self, model: Checkpoint) -> None:
        self.weights = Built(self.read(model)).serve(self.weights, self.device)

    def end(self) -> None:
        while len(self.batch):
            self.batch.step(self.weights)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    model = make_model("Qwen3", seed=1, head_dim=8, tie_word_embeddings=True)
    path = tmp_path_factory.mktemp("other")
    model.save_pretrained(path)
    return Checkpoint(model, path)


def assert_same(told: Story, plain: Story, tolerance: float = 1e-4) -> None:
    assert len(told.rows) == len(plain.rows)
    others = 0
    for got, want in zip(told.rows, plain.rows, strict=True):
        assert got.error is None
        if got.tokens == want.tokens:
            np.testing.assert_allclose(got.fresh_logprobs, want.fresh_logprobs, atol=tolerance)
        else:
            others += 1
    # Between a GPU and a CPU a draw, and all after it, may depend on the last bits of logits.
    assert others <= (1 if told.device != plain.device else 0)


def on(device: torch.device) -> Callable[[KvCache], Recorder]:
    return Recordings if device.type == "cpu" else lambda cache: CudaGraphs()


@devices
@pytest.mark.parametrize("kind", SAMPLINGS)
@torch.inference_mode()
def test_graphs_say_what_plain_steps_say(
    kind: str, device: torch.device, qwen3: Checkpoint, other: Checkpoint
) -> None:
    told, plain = Story(qwen3, device, on(device)), Story(qwen3, CPU, None)
    for story in (told, plain):
        story.join(5, SAMPLINGS[kind], tokens=40)
        story.steps(6)
        story.join(14, SAMPLINGS[kind], tokens=30)  # another width, while others run
        story.steps(4)
        story.batch.remove(story.rows[2:4])
        story.swap(other)
        story.steps(5)
        story.batch.release_cache()  # as an engine that sleeps
        story.batch.recompute(story.weights)
        story.steps(3)
        story.join(3, SAMPLINGS[kind], tokens=250)  # the cache grows and moves
        story.end()
        story.join(2, SAMPLINGS[kind], tokens=8)
        story.end()
    assert_same(told, plain, 1e-3)
    if isinstance(told.recorder, Recordings):
        assert told.recorder.repeated > 10 * told.recorder.made > 0


@devices
@torch.inference_mode()
def test_graphs_give_the_bits_of_unrecorded_steps(device: torch.device, qwen3: Checkpoint) -> None:
    told = Story(qwen3, device, on(device))
    bare = Story(qwen3, device, lambda cache: None)  # type: ignore[arg-type,return-value]
    for story in (told, bare):
        story.join(7, SAMPLINGS["sampled"], tokens=40)
        story.end()
    assert_same(told, bare, 0.0)


@devices
@torch.inference_mode()
def test_graphs_live_on_when_weights_are_written_over(
    device: torch.device, qwen3: Checkpoint, other: Checkpoint
) -> None:
    told, plain = Story(qwen3, device, on(device)), Story(qwen3, CPU, None)
    live = told.weights
    for story in (told, plain):
        story.join(4, SAMPLINGS["sampled"], tokens=40)
        story.steps(8)
        if device.type == "cpu":
            story.weights.copy_(story.read(other))
        else:
            story.swap(other)
        story.end()
    assert told.weights is live
    assert_same(told, plain, 1e-3)
    if isinstance(told.recorder, Recordings):
        assert told.recorder.made == 1


def failing(work: Work) -> Work:
    raise RuntimeError("operation not permitted\nwhen a stream is capturing")


@torch.inference_mode()
def test_steps_that_graphs_cannot_record_run_as_they_are(
    qwen3: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    told, plain = Story(qwen3, CPU, lambda cache: failing), Story(qwen3, CPU, None)
    with caplog.at_level(logging.WARNING):
        for story in (told, plain):
            story.join(3, SAMPLINGS["sampled"], tokens=20)
            story.end()
    assert_same(told, plain)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == MOST_FAILURES
    assert all(line.endswith(": operation not permitted") for line in said)


def test_a_recording_that_failed_leaves_torch_s_allocator_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.11 continues recording to the pool of a capture that it cannot end, and takes that pool no more."""
    recording: list[int] = []
    pools = itertools.count(1)

    class Graph:
        broken = False

        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            if pool in recording:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            recording.append(pool)

        def capture_end(self) -> None:
            if self.broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            recording.pop()

        def replay(self) -> None:
            """Nothing."""

    released: list[int] = []
    for name, value in {
        "Stream": lambda: SimpleNamespace(device_index=0),
        "stream": lambda stream: nullcontext(),
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: next(pools),
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ends = {"_cuda_endAllocateToPool": recording.remove, "_cuda_releasePool": released.append}
    for name, end in ends.items():
        monkeypatch.setattr(torch._C, name, lambda device, pool, end=end: end(pool), raising=False)
    recorder, kept = CudaGraphs(), []
    kept.append(recorder(lambda: None))
    with monkeypatch.context() as meanwhile, pytest.raises(RuntimeError, match="previous error"):
        recorder(lambda: meanwhile.setattr(Graph, "broken", True))
    assert (recording, released) == ([], [1])
    kept.append(recorder(lambda: None))
    assert not recording


def test_graphs_are_few_as_rows_are_padded_to_few_widths(qwen3: Checkpoint) -> None:
    cache = Story(qwen3, CPU, None).cache
    steps = StaticSteps(
        TorchDecoder(read_architecture(qwen3.path), torch.float32, CPU, 64), cache, 300
    )
    widths = [steps.width(count, 32) for count in range(1, SLOTS + 1)]
    assert sorted({*widths}) == [1, 2, 4, 8, 16, 24, 32, SLOTS]  # 48 do not fit
    assert all(width >= count for count, width in enumerate(widths, start=1))
    cache.reserve(SLOTS - 2, 32, kept=0)
    assert [steps.width(count, 32) for count in range(1, SLOTS + 1)] == widths


def test_a_version_that_waited_on_the_host_needs_no_second_one_on_the_device(
    qwen3: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, meta = Story(qwen3, CPU, None).weights, torch.device("meta")
    live = read.to(meta)
    monkeypatch.delattr(Weights, "to")
    assert Built(read).serve(live, meta) is live


def test_where_a_single_row_ends_stands_side_by_side_for_its_heads() -> None:
    ends = row_ends(torch.tensor([5]), 4, 2, 32)[2]
    assert ends.tolist() == [5, 5] and ends.stride() == (1,)  # the kernel on a GPU refuses a view


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 64, 128])
def test_attention_of_graphs_is_that_of_a_cpu(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    made = torch.randn(5, 2 * 3 + 2, size), torch.randn(2, 5, 2, 96, size)
    queries, cached = (values.to(dtype) for values in made)
    lengths = torch.tensor([1, 96, 7, 64, 65])
    mask = torch.zeros(5, 96).masked_fill(torch.arange(96) >= lengths[:, None], -torch.inf)
    heads = queries[:, :6]  # as of a step: not contiguous
    want = attend(heads.float(), *cached.float(), mask.repeat_interleave(2, 0)[:, None])
    on_gpu = cached.to(GPU)
    on_gpu[0, 2, :, 7:] = torch.nan  # what is beyond a row's end is not read
    got = attend_up_to(queries.to(GPU)[:, :6], *on_gpu, row_ends(lengths.to(GPU), 6, 2, 96)).cpu()
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
