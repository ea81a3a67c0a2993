"""The `sglang` engine, over a stock SGLang server: its options, its HTTP routes, how it is started and checked.

The behaviour of the server that this relies on was read in the sources of SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import override

from meshrl.common.config import Machine, read_options
from meshrl.common.device_lease import DeviceShare
from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.types import OnUpdate, SamplingParams, Version
from meshrl.images import PROCESSORS, ImageProcessor, processor_class
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.config import ServerConfig, quantization_arguments
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.server_engine.http import HttpClient
from meshrl.rollout.server_engine.kind import (
    PROBE,
    AdapterClient,
    ServedAdapters,
    ServerKind,
    check_max_length,
    check_same_model,
    picture_probe,
    processed,
)
from meshrl.rollout.server_engine.request import ServerRequest
from meshrl.rollout.server_engine.response import Chunk, told_prompt
from meshrl.rollout.server_engine.sglang_messages import (
    EventReader,
    ServerFacts,
    image_data,
    named_empty_tensor,
    places,
    prompt_body,
    request_body,
)
from meshrl.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PLUGIN_DIR = Path(__file__).parent / "_plugins"
"""Added to the server's PYTHONPATH: the folder of `meshrl_sglang`."""
PICTURES = {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "meshrl_sglang_pictures"}
"""Environment of a server that takes our pixels; one whose model reads text does not look at it."""
LOADER = "meshrl_sglang.load"
LOADER_ARGUMENTS = ("--custom-weight-loader", LOADER)
ROUTED_EXPERTS = "--enable-return-routed-experts"
READ_VERSION = "0.5.23"
"""The version whose sources were read."""
WEIGHTS, CACHE = ["weights"], ["kv_cache", "cuda_graph"]
"""Tags of memory that a server gives up together."""
RESERVED_TOKENS = 6
"""Tokens of the context length that no request can use: the server keeps one, and refuses prompts within five tokens
of the rest."""
ABORT_S = 5.0
"""Deadline of the abort of a request that its reader leaves."""

PATCH = 14
"""Pixels of a patch of Qwen2.5-VL, as SGLang 0.5.23 knows it."""
UNTIED = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures whose `tie_word_embeddings` SGLang 0.5.23 does not read."""


class Config(ServerConfig):
    """`rollout.engine` for `rollout.name: sglang`."""

    package: ClassVar[str] = "sglang"
    joint_cut: ClassVar[bool] = True
    pictures: ClassVar[bool] = True

    update: Literal["staged", "disk"] = "staged"
    """How the server gets a version: `staged`: every rank reads the staged file, through our loader that the server
    was started with; `disk`: the same file through /update_weights_from_disk, without that loader."""

    @override
    def unable(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        if sampling.repetition_penalty != 1:
            yield (
                "repetition_penalty",
                f"{sampling.repetition_penalty}, and SGLang counts the tokens of the response alone, and forgets them"
                " where it is continued; want 1, or the engine torch or vllm",
            )
        if sampling.temperature and sampling.min_p and sampling.top_p < 1:
            yield (
                "min_p",
                f"{sampling.min_p} with top_p {sampling.top_p}: SGLang cuts by top_p first, the others by min_p,"
                " which are two distributions; want one of the two alone",
            )

    @override
    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        yield from super().faults(machine, model)
        config = machine.json(model / "config.json")
        name = (config.get("architectures") or ["none"])[0]
        if "vision_config" in config and self.update != "staged":
            yield (
                "update",
                f"{self.update} leaves SGLang what the old vision tower made of pictures, and {model} reads them;"
                " want staged",
            )
        patch = (config.get("vision_config") or {}).get("patch_size", PATCH)
        if config.get("model_type") == "qwen2_5_vl" and patch != PATCH:
            yield (
                "",
                f"SGLang ends at a picture for {model}, whose vision_config.patch_size is {patch}, not {PATCH}; want"
                " rollout.name=vllm",
            )
        processor = processor_class(machine.json(model / "preprocessor_config.json"))
        if PROCESSORS.get(processor) == "tiles":
            yield (
                "",
                f"{model} makes tiles of pictures ({processor}), which SGLang is not given; want rollout.name=vllm",
            )
        if name in UNTIED and config.get("tie_word_embeddings"):
            yield (
                "",
                f"SGLang gives {name} an output embedding of its own, and {model} ties it to the input's: it would"
                " sample from uninitialised memory; want rollout.name=vllm, or a model with lm_head.weight and"
                " tie_word_embeddings: false",
            )


def build(
    config: Mapping[str, object],
    *,
    model: Path,
    slots: int,
    tokenizer: Tokenizer | None = None,
) -> ServerEngine:
    """An engine over the checkpoint directory `model` that runs up to `slots` requests at once.

    `tokenizer` is needed by requests with stop strings only. Raises ConfigError for wrong options.
    """
    options = read_options(Config, config, where="rollout.engine")
    kind = SglangServer(options)
    return ServerEngine(kind, options, model=model, slots=slots, tokenizer=tokenizer)


def share_arguments(share: DeviceShare | None) -> Sequence[str]:
    """Server arguments of a placement: tensor parallelism over the GPUs, a share of their memory, NCCL's port."""
    if share is None or not share.devices:
        return ()
    arguments = ["--tp-size", str(len(share.devices))]
    arguments += ["--mem-fraction-static", f"{share.memory:g}"]
    if share.in_turns:
        arguments.append("--enable-memory-saver")
    if share.ports:
        arguments += ["--nccl-port", str(share.ports[-1])]
    return tuple(arguments)


def adapter_arguments(rank: int) -> Sequence[str]:
    """Server arguments for adapters of up to `rank`; several versions run at once while responses end."""
    if not rank:
        return ()
    return (
        "--enable-lora",
        "--max-lora-rank",
        str(rank),
        "--lora-target-modules",
        "all",
        "--max-loras-per-batch",
        "4",
    )


class SglangServer(ServerKind["SglangClient"]):
    """How an SGLang server is started and checked."""

    name = "SGLang"
    package = "sglang"
    module: tuple[str, ...] = ("-P", "-m", "meshrl_sglang_server")
    key_name = "SGLANG_API_KEY"
    plugin: Path | None = PLUGIN_DIR

    def __init__(self, config: Config) -> None:
        self._config = config

    def arguments(
        self, checkpoint: CheckpointFacts, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Command-line arguments of a server that is started here."""
        routed_experts = (ROUTED_EXPERTS,) if self._config.return_routed_experts else ()
        return (
            "--model-path",
            str(checkpoint.path),
            # Its own choice, the path, must not have a colon, and those of callers' checkpoints do.
            "--served-model-name",
            "policy",
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--dtype",
            self._config.dtype,
            "--context-length",
            str(max_length + RESERVED_TOKENS),
            "--max-running-requests",
            str(slots),
            # Requests are complete: token ids in and out, no default of the checkpoint applies.
            "--skip-tokenizer-init",
            "--sampling-defaults",
            "openai",
            "--incremental-streaming-output",
            *LOADER_ARGUMENTS,
            *routed_experts,
            *quantization_arguments(self._config),
            *share_arguments(DeviceShare.of()),
            *adapter_arguments(self._config.max_lora_rank),
            *self._config.extra_args,
        )

    def environment(self) -> Mapping[str, str]:
        """Environment of a server that is started here; `rollout.engine.env` is added to it."""
        # The reserved tokens may go beyond what the checkpoint allows; no token is ever at such a position.
        return {**os.environ, **PICTURES, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

    def client(self, url: str, key: str | None) -> SglangClient:
        """A client of the server at `url`, which presents `key`."""
        config = self._config
        return SglangClient(
            url,
            key=key,
            update=config.update,
            silence_s=config.silence_s,
            update_s=config.update_s,
            adapters=config.max_lora_rank > 0,
        )

    async def check(
        self, client: SglangClient, checkpoint: CheckpointFacts, max_length: int
    ) -> None:
        """Try everything that generation and updates will need; also warms the server up.

        Raises:
            UserError: naming the option that the server was started with or without, or its limit below `max_length`.
        """
        info = await client.call("GET", "/server_info")
        self._check_options(client, info)
        if self._config.update != "disk":
            with contextlib.suppress(InfraError):  # 405: the route exists, for POST
                await client.call("GET", "/begin_weight_update")
        client.facts = ServerFacts(
            ranks=int(info.get("tp_size") or 1),
            overlaps=not info.get("disable_overlap_schedule"),
            increments=bool(info.get("incremental_streaming_output")),
            eos_token_ids=checkpoint.eos_token_ids,
            vocab_size=checkpoint.vocab_size,
            mask_tokens=int(info.get("sampling_mask_max_tokens") or 1),
            experts=checkpoint.experts,
        )
        if client.facts.overlaps:
            log.info(
                "SGLang at %s overlaps steps: updates in flight recompute the cache of running requests, so that "
                "every token's version is exact (--disable-overlap-schedule keeps their cache instead)",
                client.url,
            )
        cache_tokens = int(info.get("max_total_num_tokens") or 0)
        if 0 < cache_tokens < max_length + RESERVED_TOKENS:
            raise UserError(
                f"the SGLang server at {client.url} says its cache holds {cache_tokens} tokens, the engine wants "
                f"{max_length} and {RESERVED_TOKENS} reserved ones: set rollout.engine.max_model_len"
            )
        models = await client.call("GET", "/v1/models")
        check_same_model(self.name, client.url, models, checkpoint)
        check_max_length(self.name, client.url, models, max_length, reserved=RESERVED_TOKENS)
        chunks = [chunk async for chunk in client.generate(uuid.uuid4().hex, PROBE, "probe")]
        if chunks[-1].spans is None:
            raise UserError(
                f"the SGLang server at {client.url} ({info.get('version')}) does not say which weights sampled its "
                f"tokens: want {READ_VERSION} or later"
            )
        if not processed(chunks):
            raise UserError(
                f"the SGLang server at {client.url} gives log-probs of a distribution that was not sampled"
            )
        if checkpoint.images is not None:
            await self._check_pictures(client, checkpoint.images)

    async def _check_pictures(self, client: SglangClient, images: ImageProcessor) -> None:
        """Raises UserError where the server does not take our pixels."""
        try:
            async for _ in client.generate(uuid.uuid4().hex, picture_probe(images), "probe"):
                pass
        except UserError as error:
            needs = " and ".join(f"{name}={value}" for name, value in PICTURES.items())
            raise UserError(
                f"the SGLang server at {client.url} was started without {needs} and PYTHONPATH={PLUGIN_DIR}"
                f" ({error.message})"
            ) from error

    def _check_options(self, client: SglangClient, info: Mapping[str, Any]) -> None:
        """Raises UserError for options with which the first update would fail."""
        where = f"the SGLang server at {client.url} was started"
        loaders = info.get("custom_weight_loader") or ()
        if self._config.update == "staged" and LOADER not in loaders:
            raise UserError(
                f"{where} without {' '.join(LOADER_ARGUMENTS)} and PYTHONPATH={PLUGIN_DIR} (or set "
                "rollout.engine.update=disk)"
            )
        if int(info.get("dp_size") or 1) > 1:
            raise UserError(
                f"{where} with --dp-size {info['dp_size']}: it refuses weights; want one server a replica"
            )
        if self._config.return_routed_experts and not info.get("enable_return_routed_experts"):
            raise UserError(f"{where} without {ROUTED_EXPERTS}")
        if info.get("weight_cache_mode", "off") != "off":
            raise UserError(
                f"{where} with --weight-cache-mode {info['weight_cache_mode']}: it refuses weights; want off"
            )


class SglangClient(HttpClient, AdapterClient):
    """The routes of an SGLang server. Satisfies `server_engine.kind.ServerClient`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        update: str,
        silence_s: float,
        update_s: float,
        adapters: bool = False,
    ) -> None:
        super().__init__("SGLang", url, key=key, silence_s=silence_s, update_s=update_s)
        self._adapters = ServedAdapters(self) if adapters else None
        self._update = update
        self.facts = ServerFacts(
            ranks=1, overlaps=True, increments=False, eos_token_ids=(), vocab_size=1, mask_tokens=1
        )
        """Set by the check at the start."""
        self._asleep = False

    async def label(self) -> str:
        """The version label that the server currently stamps on tokens. Raises what `call` does."""
        return str((await self.call("GET", "/model_info"))["weight_version"])

    async def cache_tokens(self) -> int:
        """Tokens that the KV cache holds; 0 where the server does not report it."""
        info = await self.call("GET", "/server_info")
        return int(info.get("max_total_num_tokens") or 0)

    async def sleep(self) -> None:
        """Running requests go back to the waiting queue; weights, cache and graphs go. Raises MeshError."""
        if self._adapters is not None:
            raise InfraError("no update brings back the base model of adapters")
        await self.call("POST", "/pause_generation", json={"mode": "retract"})
        await self.call("POST", "/release_memory_occupation", json={"tags": [*WEIGHTS, *CACHE]})
        self._asleep = True

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Pause, replace the weights by those in `directory`, label them, continue.

        Raises:
            MeshError: at any point; the server must then be considered half loaded.
        """
        if self._adapters is not None:
            await self._adapters.load(directory, version)
            return
        if self._asleep:  # and paused
            await self.call("POST", "/resume_memory_occupation", json={"tags": WEIGHTS})
        else:
            mode = self._pause_mode(on_update)
            await self.call("POST", "/pause_generation", json={"mode": mode})
        if self._update == "disk":
            await self._load_from_disk(directory, version)
        else:
            await self.call("POST", "/begin_weight_update", json={})
            await self._load_staged(directory, version)
            await self.call("POST", "/end_weight_update", json={})
        if self._asleep:
            await self.call("POST", "/resume_memory_occupation", json={"tags": CACHE})
            self._asleep = False
        elif on_update is OnUpdate.INTERRUPT:
            await self.call("POST", "/flush_cache")
        label = await self.label()
        if label != str(version):
            raise InfraError(f"{self.who} says its weights are {label!r}, not {version}")
        await self.call("POST", "/continue_generation", json={"torch_empty_cache": False})

    def _pause_mode(self, on_update: OnUpdate) -> str:
        """`retract` puts running requests back into the waiting queue; `in_place` keeps them where they are.

        With overlap, `in_place` leaves one step that was sampled and is not recorded yet: after the update its token
        would be labelled with weights that did not sample it. `retract` records it first.
        """
        keeps = on_update is not OnUpdate.INTERRUPT and not self.facts.overlaps
        return "in_place" if keeps else "retract"

    async def _load_staged(self, directory: Path, version: Version) -> None:
        payload = named_empty_tensor(str(directory))
        await self.call(
            "POST",
            "/update_weights_from_tensor",
            json={
                "serialized_named_tensors": [payload] * self.facts.ranks,
                "load_format": LOADER,
                "weight_version": str(version),
                # With running requests the server refuses the flush, after it has loaded the weights.
                "flush_cache": False,
            },
        )

    async def _load_from_disk(self, directory: Path, version: Version) -> None:
        await self.call(
            "POST",
            "/update_weights_from_disk",
            json={
                "model_path": str(directory),
                "load_format": "auto",  # the default is that of the start, which may be `dummy`
                "weight_version": str(version),
                "flush_cache": False,
            },
        )

    @override
    async def load_adapter(self, name: str, directory: Path) -> None:
        adapter = {"lora_name": name, "lora_path": str(directory)}
        await self.call("POST", "/load_lora_adapter", json=adapter)

    @override
    async def unload_adapter(self, name: str) -> None:
        await self.call("POST", "/unload_lora_adapter", json={"lora_name": name})

    @override
    async def set_label(self, version: Version) -> None:
        label = {"new_version": str(version), "abort_all_requests": False}
        await self.call("POST", "/update_weight_version", json=label)

    async def generate(
        self, request_id: str, request: ServerRequest, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one response. Closing the iterator aborts the request.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, disconnected or sent nothing for too long.
        """
        body = request_body(request_id, request, salt, self.facts)
        if request.pictures:
            made = await asyncio.to_thread(image_data, request.pictures, len(request.token_ids))
            body["image_data"] = [made]
        if self._adapters is None:
            chunks = self._chunks(request, body)
        else:
            adapter = request.adapter or self._adapters.newest
            named = {"lora_path": adapter} if adapter else {}
            chunks = self._adapters.labelled(adapter, self._chunks(request, {**body, **named}))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self, request: ServerRequest, body: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        if request.prompt_top is not None and request.pictures:
            # Its log-probs are those of numbers in place of the prompt's pictures.
            raise UserError("prompt_logprobs: SGLang tells none of a prompt with pictures")
        if request.prompt_top is not None:
            # A request of its own: each event of a stream would tell all of the prompt again.
            asked = prompt_body(request, body)
            async with contextlib.aclosing(self.stream("/generate", asked)) as events:
                async for event in events:
                    yield told_prompt(asked["input_ids"], places(event), request.prompt_top)
        reader = EventReader(
            increments=self.facts.increments,
            cut=body["return_sampling_mask"],
            experts=self.facts.experts,
        )
        ended = False
        try:
            async with contextlib.aclosing(self.stream("/generate", body)) as events:
                async for event in events:
                    chunk = reader.read(event)
                    ended = bool(chunk.finish_reason)
                    yield chunk
        finally:
            if not ended:
                # The server notices a closed connection seconds later, or with the next token.
                with contextlib.suppress(MeshError):
                    await self.abort(body["rid"], wait_s=ABORT_S)

    async def abort(self, request_id: str, *, wait_s: float | None = None) -> None:
        """End a request, and every other whose id begins with `request_id`; its stream gets a last chunk."""
        await self.call("POST", "/abort_request", json={"rid": request_id}, wait_s=wait_s)
