"""The embedded engine: a Llama-family model in this process, batched continuously, on CPU or one GPU.

    stage_weights ─▶ staged {version: built or as it arrived}  ─commit─▶ swap between two decode steps ─▶ serving
    generate ─▶ Row ─▶ decode thread ─▶ deltas ─▶ TokenStream

Nothing is served before the first committed version: requests wait. Log-probs are those of the distribution that was
sampled (after temperature, top-k and top-p); a greedy request (temperature 0) gets those of the untempered one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from meshrl.common.config import read_options
from meshrl.common.device_lease import DeviceShare, chosen_device
from meshrl.common.shared_buffers import Pin, page_lock
from meshrl.contract.errors import (
    EngineGoneError,
    InfraError,
    MeshError,
    NotFoundError,
    UnavailableError,
    UserError,
)
from meshrl.contract.ports import DeviceReceiver, LendingSink, LentBucket, PinningSink
from meshrl.contract.types import (
    EngineStats,
    GenerateDelta,
    GenerateRequest,
    OnUpdate,
    Uint8,
    Version,
    WeightManifest,
)
from meshrl.rollout.config import TorchEngineConfig as Config
from meshrl.rollout.end_tokens import StopStrings, with_end_of
from meshrl.rollout.engines._plugins.meshrl_lent import LentMemory
from meshrl.rollout.engines.torch.architecture import DecoderArchitecture, read_architecture
from meshrl.rollout.engines.torch.batch import DecodeBatch, DecodeRow
from meshrl.rollout.engines.torch.decode_thread import (
    Abort,
    DecodeThread,
    Sleep,
    Stop,
    Submit,
    Swap,
)
from meshrl.rollout.engines.torch.forward import KvCache, TorchDecoder
from meshrl.rollout.engines.torch.graphs import CudaGraphs, StaticSteps
from meshrl.rollout.engines.torch.linear_attention import RowStates
from meshrl.rollout.engines.torch.staging import (
    Built,
    StagedVersion,
    Staging,
    choose,
    free_bytes,
    stage,
)
from meshrl.rollout.engines.torch.weights import DTYPES, check_checkpoint, from_checkpoint
from meshrl.rollout.ports import UNSERVED
from meshrl.rollout.streams import TokenStream, check_request, response_before
from meshrl.rollout.time_slices import SleepingEngine
from meshrl.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2 << 30
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
CUDA_CACHE_SHARE = 0.5
"""Share of the memory that is free at start; the rest is for one or two versions of the weights and activations."""
CUDA_CACHE_REST = 0.75
"""At most this share of what one version leaves of it."""
CLOSE_S = 30.0
"""Much longer than a decode step."""


def build(
    config: Mapping[str, object],
    *,
    model: Path,
    slots: int,
    tokenizer: Tokenizer | None = None,
) -> TorchEngine:
    """An engine over the checkpoint directory `model` that runs up to `slots` requests at once.

    `tokenizer` is needed by requests with stop strings only. Raises ConfigError for wrong options.
    """
    options = read_options(Config, config, where="rollout.engine")
    return TorchEngine(options, model=model, slots=slots, tokenizer=tokenizer)


class TorchEngine(SleepingEngine, PinningSink, LendingSink):
    """The embedded engine."""

    def __init__(
        self, config: Config, *, model: Path, slots: int, tokenizer: Tokenizer | None
    ) -> None:
        self._config = config
        self._model = model
        self._slots = slots
        self._tokenizer = tokenizer
        self._thread: DecodeThread | None = None
        self._decoder: TorchDecoder | None = None
        self._cache: KvCache | None = None
        self._lengths: deque[int] = deque(maxlen=slots)
        """The longest lengths that the last requests may reach."""
        self._max_length = 0
        self._eos: tuple[int, ...] = ()
        self._staged: dict[Version, StagedVersion] = {}
        self._staging = ""
        """Memory of the last staged version: `device` or `host`; empty before the first."""
        self._lent: LentMemory | None = None
        """Device memory that receives versions."""
        self._arrives = ""
        """Destination of the last version, in words for the log."""
        self._token_texts: dict[int, str] = {}
        self._closed = False

    @property
    def version(self) -> Version:
        """The version that samples the next token; UNSERVED before the first commit."""
        return self._thread.version if self._thread else UNSERVED

    @property
    def max_model_len(self) -> int:
        """Prompt and response tokens that one request may have."""
        return self._max_length

    async def start(self) -> None:
        """Read the checkpoint's shapes and start the decode thread.

        Raises:
            UserError: the checkpoint cannot be read or run.
        """
        if self._thread is not None:
            return
        batch = await asyncio.to_thread(self._prepare)
        self._thread = DecodeThread(
            batch, asyncio.get_running_loop(), stream_interval=self._config.stream_interval
        )
        self._thread.start()

    async def close(self) -> None:
        """End the thread; running requests end with `abort`. Idempotent."""
        self._closed = True
        self._staged = {}
        if self._thread is None:
            return
        try:
            self._thread.post(Stop())
        except EngineGoneError:
            return  # it has ended already
        if not await asyncio.to_thread(self._thread.join, CLOSE_S):
            raise InfraError(f"the engine's thread did not end within {CLOSE_S:.0f} s")
        self._take_back()

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Sample one response. Raises UserError, when iterated, for a request that cannot be run."""
        return self.generate_together([request])[0]

    def generate_together(self, requests: Sequence[GenerateRequest]) -> Sequence[TokenStream]:
        """Start `requests` at the same decode step, in this order (as far as slots allow).

        The same requests on an idle engine give the same bits, at any time.
        """
        streams = [TokenStream() for _ in requests]
        rows: list[DecodeRow] = []
        try:
            thread = self._serving_thread()
            for request, stream in zip(requests, streams, strict=True):
                try:
                    row = self._row(request, stream.push)
                except UserError as error:
                    stream.push(error)
                    continue
                if row.done:
                    stream.push(row.take_fresh(self.version))
                    continue
                self._lengths.append(row.longest)
                stream.on_close = functools.partial(_abort, thread, row)
                rows.append(row)
            thread.post(Submit(rows))
        except EngineGoneError as error:
            for stream in streams:
                stream.push(error)
        return streams

    @property
    @override
    def pin(self) -> Pin | None:
        on_gpu = self._decoder is not None and self._decoder.device.type == "cuda"
        cudart: Any = torch.cuda.cudart  # torch leaves it untyped
        return page_lock(cudart()) if on_gpu else None

    async def stage_weights(self, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
        """Keep a version in addition to the serving one: built on the device, or as it came; see staging.py."""
        decoder, cache = self._loaded_decoder(), self._cache
        assert cache is not None
        self._take_back()
        device = torch.device("cpu") if self.asleep else decoder.device
        where: Staging = "device"
        if self.version != UNSERVED and not self.asleep:
            free = free_bytes(device, cache.may_grow_by)
            where, why = choose(self._config.weight_staging, manifest, decoder.dtype, free)
            if where != self._staging:
                log.info(
                    "from weights %s on: staged on the %s, as %s", manifest.version, where, why
                )
            self._staging = where
        self._staged[manifest.version] = await asyncio.to_thread(
            stage, where, manifest, buckets, decoder.architecture, decoder.dtype, device
        )

    @override
    async def lend(
        self, manifest: WeightManifest, receiver: DeviceReceiver
    ) -> Sequence[LentBucket]:
        """The first version comes by the host, from which it is built."""
        if self.version == UNSERVED or self.asleep:
            return ()
        try:
            lent = await self._room_to_lend(manifest, receiver)
            arrives, why = f"in memory of GPU {lent.gpu}", f"{receiver.memory} handles are opened"
        except (OSError, UnavailableError) as error:
            lent, arrives, why = None, "on the host", str(error)
            self._take_back()
        if arrives != self._arrives:
            log.info("from weights %s on: arriving %s, as %s", manifest.version, arrives, why)
        self._arrives = arrives
        pairs = zip(lent.handles, lent.sizes, strict=True) if lent is not None else ()
        return [LentBucket(handle, nbytes) for handle, nbytes in pairs]

    async def _room_to_lend(self, manifest: WeightManifest, receiver: DeviceReceiver) -> LentMemory:
        """Raises UnavailableError or OSError, with the reason, where there is none that the receiver can open."""
        decoder, cache, lent = self._loaded_decoder(), self._cache, self._lent
        assert cache is not None
        if lent is not None and lent.sizes == manifest.bucket_bytes and lent.gpu == receiver.gpu:
            return lent
        self._take_back()
        free = free_bytes(decoder.device, cache.may_grow_by)
        where, why = choose(self._config.weight_staging, manifest, None, free)
        if where == "host":
            raise UnavailableError(why)
        sizes, device = manifest.bucket_bytes, decoder.device
        lent = self._lent = await asyncio.to_thread(LentMemory, receiver.memory, sizes, device)
        if lent.gpu != receiver.gpu:
            raise UnavailableError(
                f"the receiver is on GPU {receiver.gpu}, the engine on {lent.gpu}"
                " (weights.nccl.env: CUDA_VISIBLE_DEVICES)"
            )
        await receiver.reach(LentBucket(lent.handles[0], sizes[0]))
        return lent

    @override
    async def stage_lent(self, manifest: WeightManifest, digests: Sequence[str]) -> None:
        """Keep the version as it arrived; the commit copies it over the served weights."""
        decoder, lent = self._loaded_decoder(), self._lent
        if lent is None:
            raise NotFoundError(f"no memory is lent for weights {manifest.version}")
        self._staging = "device"
        model = (decoder.architecture, decoder.dtype, decoder.device)
        self._staged[manifest.version] = await asyncio.to_thread(
            stage, "host", manifest, lent.buckets, *model
        )

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.free()
            self._lent = None

    async def commit_weights(self, version: Version, on_update: OnUpdate) -> None:
        """Serve the staged `version` from the next decode step on. Committing twice is committing once.

        Raises:
            NotFoundError: it is not staged.
            FencedError: a newer version is served.
        """
        if version == self.version:
            return
        if version not in self._staged:
            known = ", ".join(str(each) for each in self._staged) or "none"
            raise NotFoundError(f"version {version} is not staged (staged: {known})")
        swap = Swap(version=version, staged=self._staged[version], on_update=on_update)
        self._serving_thread().post(swap)
        await asyncio.wrap_future(swap.done)
        self._staged = {each: w for each, w in self._staged.items() if each > version}

    async def discard_weights(self, version: Version) -> None:
        """Remove a staged version."""
        self._staged.pop(version, None)

    async def serve_checkpoint(self, version: Version) -> None:
        """Serve the weights in the model directory itself, as `version`: evaluation without a trainer."""
        decoder = self._loaded_decoder()
        weights = await asyncio.to_thread(
            from_checkpoint, self._model, decoder.architecture, decoder.dtype, decoder.device
        )
        self._staged[version] = Built(weights)
        await self.commit_weights(version, OnUpdate.DRAIN)

    @property
    @override
    def asleep(self) -> bool:
        return self._thread is not None and self._thread.asleep

    async def sleep(self) -> None:
        """Keep the weights on the host, and no cache: rows that run are computed again by `wake` or a commit."""
        await self._command(Sleep())
        if self._decoder is not None and self._decoder.device.type == "cuda":
            host = torch.device("cpu")
            self._staged = {each: staged.to(host) for each, staged in self._staged.items()}
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        """Continue with the version that was served."""
        await self._command(Sleep(wake=True))

    async def _command(self, command: Sleep) -> None:
        self._serving_thread().post(command)
        await asyncio.wrap_future(command.done)

    def stats(self) -> EngineStats:
        """Never blocks."""
        thread = self._thread
        return EngineStats(
            version=self.version,
            running=thread.running if thread else 0,
            capacity=self._capacity,
            tokens_generated=thread.tokens_generated if thread else 0,
            tokens_per_s=thread.tokens_per_s if thread else 0.0,
            updates=thread.updates if thread else 0,
            update_pause_s=thread.update_pause_s if thread else 0.0,
            staging=self._staging,
        )

    @property
    def _capacity(self) -> int:
        """Requests as long as the last ones, or before those as long as any may be, that the cache holds at once."""
        if self._cache is None:
            return self._slots
        return self._cache.rows_of(max(self._lengths, default=self._max_length))

    def _prepare(self) -> DecodeBatch:
        config = self._config
        architecture = read_architecture(self._model)
        check_checkpoint(self._model, architecture)
        device = torch.device(chosen_device("rollout.engine.device", config.device, torch))
        name = config.dtype
        if name == "auto":
            name = "bfloat16" if device.type == "cuda" else "float32"
        weights = sum(map(math.prod, architecture.shapes().values())) * DTYPES[name].itemsize
        rule = architecture.delta_rule
        attending = architecture.num_layers - (0 if rule is None else len(rule.layers))
        cache = self._cache = KvCache(
            shape=(attending, architecture.num_kv_heads, architecture.head_dim),
            dtype=DTYPES[name],
            device=device,
            max_rows=self._slots,
            max_bytes=config.kv_cache_bytes or _default_cache_bytes(device, weights),
            steady=device.type == "cuda",
            states=None if rule is None else RowStates(rule, DTYPES[name], device),
        )
        self._max_length = _max_length(config, architecture, cache)
        given, known = config.eos_token_ids, architecture.eos_token_ids
        self._eos = with_end_of(self._tokenizer, known) if given is None else given
        decoder = self._decoder = TorchDecoder(architecture, DTYPES[name], device, self._max_length)
        steps = None
        # How many tokens go to an expert is known on the device only: nothing to record.
        if device.type == "cuda" and architecture.mixture is None:
            recorder = None if config.enforce_eager else CudaGraphs()
            steps = StaticSteps(decoder, cache, self._slots, recorder)
        return DecodeBatch(
            decoder,
            cache,
            slots=self._slots,
            static_steps=steps,
            max_prefill_tokens=config.max_prefill_tokens or PREFILL_TOKENS[device.type],
        )

    def _row(
        self, request: GenerateRequest, deliver: Callable[[GenerateDelta | MeshError], None]
    ) -> DecodeRow:
        """Check a request at the threshold."""
        sampling = request.sampling
        architecture = self._loaded_decoder().architecture
        vocabulary = architecture.vocab_size
        check_request(request, vocab_size=vocabulary)
        prompt = request.prompt_ids
        room = self._max_length - len(prompt)
        if room < (0 if request.continued else 1):
            raise UserError(
                f"request {request.request_id}: {len(prompt)} prompt tokens leave no room for a response in "
                f"{self._max_length} (rollout.engine.max_model_len)"
            )
        if request.experts_from is not None and architecture.mixture is None:
            raise UserError(f"request {request.request_id}: {architecture.name} has no experts")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise UserError(
                f"request {request.request_id}: prompt ids go from {prompt.min()} to {prompt.max()}, the model "
                f"knows 0 to {vocabulary - 1}: prompt and model have different tokenizers"
            )
        if sampling.stop and self._tokenizer is None:
            raise UserError("stop strings need a tokenizer, and the engine was built without one")
        return DecodeRow(
            request=request,
            deliver=deliver,
            limit=request.continued + min(sampling.max_tokens, room),
            stop_ids=frozenset((*self._eos, *sampling.stop_token_ids)),
            stop_strings=StopStrings(sampling.stop, self._tokenizer, self._token_texts)
            if sampling.stop and self._tokenizer
            else None,
            tokens=response_before(request),
        )

    def _serving_thread(self) -> DecodeThread:
        if self._thread is None or self._closed:
            raise EngineGoneError(f"the engine is {'closed' if self._closed else 'not started'}")
        return self._thread

    def _loaded_decoder(self) -> TorchDecoder:
        if self._decoder is None:
            raise EngineGoneError("the engine is not started")
        return self._decoder


def _abort(thread: DecodeThread, row: DecodeRow) -> None:
    try:
        thread.post(Abort(row))
    except EngineGoneError:
        log.debug("%s: the engine ended before the request", row.request.request_id)


def _default_cache_bytes(device: torch.device, weights: int) -> int:
    """Half of a GPU's memory or of a share of it; less where `weights` bytes take more than a third."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    share = DeviceShare.of()
    # Others of this GPU may still be starting: what is free now is theirs too.
    own = min(free, total * (1.0 if share is None else share.memory))
    return max(0, int(min(own * CUDA_CACHE_SHARE, (own - weights) * CUDA_CACHE_REST)))


def _max_length(config: Config, architecture: DecoderArchitecture, cache: KvCache) -> int:
    """Most tokens of one request, by configuration, checkpoint and cache."""
    asked = config.max_model_len or architecture.max_length
    if asked > architecture.max_length:
        raise UserError(
            f"rollout.engine.max_model_len is {asked}, the checkpoint allows {architecture.max_length}"
        )
    if cache.longest_row < asked:
        if config.max_model_len or cache.longest_row == 0:
            raise UserError(
                f"rollout.engine.kv_cache_bytes holds {cache.longest_row} tokens, max_model_len is {asked}"
            )
        log.warning("requests are limited to %d tokens by kv_cache_bytes", cache.longest_row)
    return min(asked, cache.longest_row)
