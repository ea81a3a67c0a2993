"""The `vllm` engine, over a stock vLLM server: its options, its HTTP routes, how it is started and checked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import os
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, JsonValue, PositiveFloat, PositiveInt
from typing_extensions import override

from meshrl.common import plugins
from meshrl.common.config import Config as BaseConfig
from meshrl.common.config import Machine, read_options
from meshrl.common.device_lease import DeviceShare
from meshrl.contract.errors import InfraError, UserError
from meshrl.contract.types import OnUpdate, SamplingParams, Version
from meshrl.rollout.native_updates.vllm import NativeSender, RootBuilder
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts
from meshrl.rollout.server_engine.config import ServerConfig, quantization_arguments
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.server_engine.http import HttpClient, error_message
from meshrl.rollout.server_engine.kind import (
    PROBE,
    AdapterClient,
    ServedAdapters,
    ServerKind,
    check_max_length,
    check_same_model,
    processed,
)
from meshrl.rollout.server_engine.request import Picture, ServerRequest
from meshrl.rollout.server_engine.response import Chunk, told_prompt
from meshrl.rollout.tokenizer import Tokenizer

Array: TypeAlias = npt.NDArray[Any]

ENGINES = "meshrl.rollout.engines"
PLUGIN_DIR = Path(__file__).parent / "_plugins"
"""Added to the server's PYTHONPATH: the folder of `meshrl_vllm`."""
UPDATE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "staged": (
        "--worker-extension-cls",
        "meshrl_vllm.Worker",
        "--weight-transfer-config",
        '{"backend": "mesh"}',
    ),
    "native": ("--weight-transfer-config", '{"backend": "nccl"}'),
}
"""Arguments without which a server takes no weights, by `rollout.engine.update`."""
ARGUMENTS = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
"""Arguments without which the mesh cannot use a server."""
ROUTED_EXPERTS = "--enable-return-routed-experts"
"""The argument without which a server does not tell experts; vLLM's second model runner does, which needs Triton."""
PICTURE_ARGUMENTS = (
    # Pixels come with the request as the model reads them: nothing to normalise, and nothing to keep.
    "--no-mm-device-do-normalize",
    "--mm-processor-cache-gb",
    "0",
    "--limit-mm-per-prompt",
    '{"video": 0}',
)
"""Arguments of a server of a vision-language model. vLLM's own image processor, which is not used, needs the
tokenizer."""
PLUGIN_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
ADAPTER_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM accepts."""
MOST_GUESSES = 128
"""Guesses of a step that its sampler takes."""
CHILD_ENVIRONMENT = {
    # On a CPU: a second engine would be pinned to the first one's cores, and idle OpenMP threads spin.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # On a GPU: its sampler imports flashinfer, which vLLM does not require, and a start without it fails.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Defaults; the parent's environment and `rollout.engine.env` override them."""

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of token-in/token-out requests."""
METRICS_S = 10.0
RAW_TENSOR = 3
"""msgpack's extension type of a tensor's bytes."""
PAUSE = {
    OnUpdate.DRAIN: {"mode": "wait", "clear_cache": "true"},
    OnUpdate.INTERRUPT: {"mode": "keep", "clear_cache": "true"},
    OnUpdate.IN_FLIGHT: {"mode": "keep", "clear_cache": "false"},
}
"""`keep` with `clear_cache` preempts running requests: their cache is recomputed under the new weights."""


class Speculative(BaseConfig):
    """Tokens that are guessed, and then computed side by side in one step, for a server that is started here.

    A guess is kept as often as the policy would have sampled it, so the distribution and its log-probs stay those of
    the policy.
    """

    tokens: int = Field(default=4, ge=1, le=MOST_GUESSES)
    """Guesses of a step."""
    longest_ngram: PositiveInt = 4
    """Longest n-gram: guesses are what followed the last tokens where prompt or response had them before."""
    draft: Path | None = None
    """A checkpoint of a small model with the policy's tokenizer, which guesses instead and is never updated."""

    def arguments(self) -> Sequence[str]:
        """Server arguments."""
        how: dict[str, object] = {"method": "ngram", "prompt_lookup_max": self.longest_ngram}
        if self.draft is not None:
            how = {"method": "draft_model", "model": str(self.draft)}
        return "--speculative-config", json.dumps({**how, "num_speculative_tokens": self.tokens})


class Config(ServerConfig):
    """`rollout.engine` for `rollout.name: vllm`."""

    package: ClassVar[str] = "vllm"
    pictures: ClassVar[bool] = True

    update: Literal["staged", "native"] = "staged"
    """How the server gets a version: `staged`: every rank reads the staged file, through our plugin; `native`: this
    process broadcasts it over NCCL to vLLM's own backend, which needs neither the plugin nor a common file system."""
    nccl: dict[str, JsonValue] = Field(default_factory=dict)
    """For `native`: options of rank 0's process, the keys of `weights.nccl`."""
    packed_bytes: PositiveInt = 256 << 20
    """For `native`: a broadcast has as many whole tensors as it takes to exceed this many bytes."""
    join_s: PositiveFloat = 120.0
    """For `native`: deadline for meeting the server's ranks, in seconds."""
    root: str = "meshrl.weights.nccl.root"
    """For `native`: the module whose `build` makes rank 0."""
    speculative: Speculative | None = None
    """Guess tokens, and compute several in one step: {} guesses by n-grams. Faster where few rows run and responses
    repeat themselves or their prompts."""

    @override
    def unable(self, sampling: SamplingParams) -> Iterator[tuple[str, str]]:
        for key, off in (("min_p", 0), ("logit_bias", {})):
            if self.speculative is not None and getattr(sampling, key):
                yield (
                    key,
                    f"vLLM takes none with rollout.engine.speculative; want {off}, or no guesses",
                )

    @property
    @override
    def stages_out_of_sight(self) -> bool:
        return self.update == "staged" and super().stages_out_of_sight

    @override
    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        yield from super().faults(machine, model)
        draft = self.speculative and self.speculative.draft
        if draft and self.url is None and not machine.json(draft / "config.json"):
            yield "speculative.draft", f"no checkpoint in {draft}"


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
    return ServerEngine(VllmServer(options), options, model=model, slots=slots, tokenizer=tokenizer)


class VllmServer(ServerKind["VllmClient"]):
    """How a vLLM server is started and checked."""

    name = "vLLM"
    package = "vllm"
    # Not the `vllm` command, which vllm-cpu 0.32.0 ships broken.
    module: tuple[str, ...] = (
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--middleware",
        "meshrl_key.Asks",
    )
    key_name = "VLLM_API_KEY"
    plugin: Path | None = PLUGIN_DIR

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for wrong options of `update: native`."""
        self._config = config
        if config.update == "native":
            self._build_root: RootBuilder = plugins.load(ENGINES, config.root, "build")
            self._build_root(config.nccl)  # raises for wrong options now, not at the first update

    def arguments(
        self, checkpoint: CheckpointFacts, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Command-line arguments of a server that is started here."""
        pictures = ("--skip-tokenizer-init",) if checkpoint.images is None else PICTURE_ARGUMENTS
        routed_experts = (ROUTED_EXPERTS,) if self._config.return_routed_experts else ()
        return (
            "--model",
            str(checkpoint.path),
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--dtype",
            self._config.dtype,
            "--max-model-len",
            str(max_length),
            "--max-num-seqs",
            str(slots),
            # Requests are complete: token ids in and out, no default of the checkpoint applies.
            "--generation-config",
            "vllm",
            *pictures,
            *UPDATE_ARGUMENTS[self._config.update],
            *ARGUMENTS,
            *routed_experts,
            *quantization_arguments(self._config),
            *(self._config.speculative.arguments() if self._config.speculative else ()),
            *share_arguments(DeviceShare.of()),
            *adapter_arguments(self._config.max_lora_rank),
            *self._config.extra_args,
        )

    def environment(self) -> Mapping[str, str]:
        """Environment of a server that is started here; `rollout.engine.env` is added to it."""
        adapters = ADAPTER_ENVIRONMENT if self._config.max_lora_rank else {}
        return {**CHILD_ENVIRONMENT, **os.environ, **PLUGIN_ENVIRONMENT, **adapters}

    def client(self, url: str, key: str | None) -> VllmClient:
        """A client of the server at `url`, which presents `key`."""
        config = self._config
        return VllmClient(
            url,
            key=key,
            silence_s=config.silence_s,
            update_s=config.update_s,
            sender=self._sender(),
            adapters=config.max_lora_rank > 0,
        )

    def _sender(self) -> NativeSender | None:
        config = self._config
        if config.update != "native":
            return None
        return NativeSender(
            functools.partial(self._build_root, config.nccl),
            buffer_bytes=config.packed_bytes,
            join_s=config.join_s,
            update_s=config.update_s,
        )

    async def check(self, client: VllmClient, checkpoint: CheckpointFacts, max_length: int) -> None:
        """Try everything that generation and updates will need; also warms the server up.

        Raises:
            UserError: naming the option that the server was started without, or its limit below `max_length`.
        """
        try:
            await client.label()
        except UserError as error:
            raise _without(client, "the environment variable VLLM_SERVER_DEV_MODE=1") from error
        try:
            await client.prepare_updates()
        except InfraError as error:
            options = " ".join(UPDATE_ARGUMENTS[self._config.update])
            if self._config.update == "staged":
                options += f" and PYTHONPATH={PLUGIN_DIR}"
            raise _without(client, f"{options} ({error})") from error
        models = await client.call("GET", "/v1/models")
        check_same_model(self.name, client.url, models, checkpoint)
        check_max_length(self.name, client.url, models, max_length)
        experts = self._config.return_routed_experts
        probe = replace(PROBE, experts_from=0 if experts else None)
        try:
            chunks = [chunk async for chunk in client.generate(uuid.uuid4().hex, probe, "probe")]
        except UserError as error:
            raise _without(client, f"--enable-scale-out ({error})") from error
        if experts and chunks[-1].experts is None:
            raise _without(client, ROUTED_EXPERTS)
        if not processed(chunks):
            raise _without(client, "--logprobs-mode processed_logprobs")


class VllmClient(HttpClient, AdapterClient):
    """The routes of a vLLM server. Satisfies `server_engine.kind.ServerClient`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        silence_s: float,
        update_s: float,
        sender: NativeSender | None = None,
        adapters: bool = False,
    ) -> None:
        """Broadcast versions through `sender`; None: the server's plugin reads them.

        `adapters`: versions are LoRA adapters, which the server serves beside its base model.
        """
        super().__init__("vLLM", url, key=key, silence_s=silence_s, update_s=update_s)
        self._sender = sender
        self._adapters = ServedAdapters(self) if adapters else None
        self._asleep = False

    async def close(self) -> None:
        """Leave the communicator, free the connections."""
        if self._sender is not None:
            await self._sender.close()
        await super().close()

    async def prepare_updates(self) -> None:
        """Make the server's workers ready for an update. Raises MeshError."""
        if self._sender is not None:
            await self._sender.join(self)
        else:
            await self.call("POST", "/init_weight_transfer_engine", json={"init_info": {}})

    async def label(self) -> str:
        """The version label that the server currently stamps on tokens. Raises what `call` does."""
        return str((await self.call("GET", "/weight_info"))["weight_version"])

    async def cache_tokens(self) -> int:
        """Tokens that the KV caches of all engine cores hold, from the server's metrics; 0 without metrics."""
        return cache_tokens(await self.text("/metrics", wait_s=METRICS_S))

    async def sleep(self) -> None:
        """Level 2: weights and cache go, requests stay paused and are computed again. Raises MeshError."""
        if self._adapters is not None:
            raise InfraError("no update brings back the base model of adapters")
        await self.call("POST", "/sleep", params={"level": "2", "mode": "keep"})
        self._asleep = True

    async def load(self, directory: Path, version: Version, on_update: OnUpdate) -> None:
        """Pause, replace the weights by those in `directory`, label them, resume.

        Raises:
            MeshError: at any point; the server must then be considered half loaded.
        """
        if self._adapters is not None:
            await self._adapters.load(directory, version)
            return
        if self._sender is not None:
            await self._sender.join(self)  # again, if rank 0 has died since
        if self._asleep:  # and paused
            await self.call("POST", "/wake_up", params={"tags": "weights"})
        else:
            await self.call("POST", "/pause", params=PAUSE[on_update])
        await self.call("POST", "/start_weight_update")
        if self._sender is not None:
            await self._sender.send(self, directory)
        else:
            info = {"path": str(directory)}
            await self.call("POST", "/update_weights", json={"update_info": info})
        await self.call("POST", "/finish_weight_update", json={"weight_version": str(version)})
        label = await self.label()
        if label != str(version):
            raise InfraError(f"vLLM at {self.url} says its weights are {label!r}, not {version}")
        if self._asleep:
            await self.call("POST", "/wake_up", params={"tags": "kv_cache"})
            self._asleep = False
        await self.call("POST", "/resume")

    @override
    async def load_adapter(self, name: str, directory: Path) -> None:
        """Not in place: vLLM would read the file again at every step."""
        adapter = {"lora_name": name, "lora_path": str(directory)}
        await self.call("POST", "/v1/load_lora_adapter", json=adapter)

    @override
    async def unload_adapter(self, name: str) -> None:
        await self.call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    @override
    async def set_label(self, version: Version) -> None:
        await self.call("POST", "/update_weight_version", json={"new_version": str(version)})

    async def generate(
        self, request_id: str, request: ServerRequest, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one response. Closing the iterator closes the connection, which aborts the request.

        Raises:
            UserError: the server refuses the request.
            InfraError: the server failed, disconnected or sent nothing for too long.
        """
        body: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": request.token_ids,
            "cache_salt": salt,
            "sampling_params": sampling_params(request),
            "stream": True,
        }
        if request.pictures:
            body["features"] = await asyncio.to_thread(features, request.pictures, salt)
        if self._adapters is None:
            chunks = self._chunks(request, body)
        else:
            adapter = request.adapter or self._adapters.newest
            named = {"model": adapter} if adapter else {}
            chunks = self._adapters.labelled(adapter, self._chunks(request, {**body, **named}))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self, request: ServerRequest, body: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        if request.prompt_top is not None:
            # A request of its own: streams tell nothing of prompts.
            wanted = {"max_tokens": 1, "prompt_logprobs": request.prompt_top}
            tokens = request.token_ids[: request.prompt_length]
            asked = {
                **body,
                "request_id": f"{body['request_id']}-prompt",
                "token_ids": tokens,
                "sampling_params": {**body["sampling_params"], **wanted},
                "stream": False,
            }
            async with contextlib.aclosing(self.stream(GENERATE, asked)) as events:
                async for event in events:
                    yield told_prompt(tokens, _places(event), request.prompt_top)
        async with contextlib.aclosing(self.stream(GENERATE, body)) as events:
            async for event in events:
                yield _chunk(event)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk."""
        await self.call("POST", ABORT, json={"request_ids": [ID_PREFIX + request_id]})


def share_arguments(share: DeviceShare | None) -> Sequence[str]:
    """Server arguments of a placement: tensor parallelism over the GPUs, and a share of their memory."""
    if share is None or not share.devices:
        return ()
    arguments = ["--tensor-parallel-size", str(len(share.devices))]
    arguments += ["--gpu-memory-utilization", f"{share.memory:g}"]
    if share.in_turns:
        arguments.append("--enable-sleep-mode")
    return tuple(arguments)


def adapter_arguments(rank: int) -> Sequence[str]:
    """Server arguments for adapters of up to `rank`; several versions run at once while responses end."""
    if not rank:
        return ()
    fits = next((each for each in LORA_RANKS if each >= rank), rank)
    return (
        "--enable-lora",
        "--max-lora-rank",
        str(fits),
        "--max-loras",
        "4",
        "--max-cpu-loras",
        "32",
    )


def cache_tokens(metrics: str) -> int:
    """The sum over the samples of `vllm:cache_config_info`, one for each engine core.

    `kv_cache_size_tokens` counts groups of layers that share blocks; servers without it have one kind of layer.
    """
    total = 0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                blocks = _count(sample.labels, "num_gpu_blocks")
                tokens = _count(sample.labels, "kv_cache_size_tokens")
                total += tokens or blocks * _count(sample.labels, "block_size")
    return total


def _count(labels: Mapping[str, str], name: str) -> int:
    """0 for a label that is absent or no number: vLLM writes None."""
    text = labels.get(name, "")
    return int(text) if text.isdigit() else 0


def sampling_params(request: ServerRequest) -> Mapping[str, Any]:
    """The `sampling_params` of the token-in/token-out route."""
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()} or None,
        "max_tokens": request.max_tokens,
        "seed": request.seed if request.temperature else None,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # `stop_token_ids` has those that count
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": request.stream_interval,
        # A server without the flag, or an older one, need not know the field.
        **(
            {}
            if request.experts_from is None
            else {"routed_experts_prompt_start": request.experts_from}
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _PictureItem:
    """One item of vLLM's image input: a whole picture of patches, or one tile."""

    name: str
    start: int
    num_tokens: int
    data: str


def features(pictures: Sequence[Picture], salt: str) -> dict[str, Any]:
    """Pictures as the token-in/token-out route takes them, in order: by name, place and data.

    The data are a message of msgpack in base64, with a tensor and how it is batched for each input of the tower, as
    `vllm.v1.serial_utils` of 0.32 reads it. `salt` is in the names, by which vLLM keeps what the tower made: an
    update in flight leaves that. Takes a processor's time: in a thread. Raises UserError.
    """
    items = [item for each in pictures for item in _items(each, salt)]
    return {
        "mm_hashes": {"image": [each.name for each in items]},
        "mm_placeholders": {
            "image": [{"offset": each.start, "length": each.num_tokens} for each in items]
        },
        "kwargs_data": {"image": [each.data for each in items]},
    }


def _items(picture: Picture, salt: str) -> Iterator[_PictureItem]:
    image, name = picture.features(), f"{picture.media.sha256}-{salt}"
    if image.pixels.ndim == 2:
        data = _packed({"pixel_values": image.pixels}, {"image_grid_thw": image.grid})
        yield _PictureItem(name=name, start=picture.start, num_tokens=picture.num_tokens, data=data)
        return
    # Features of an item are adjacent, and other tokens are between tiles: each tile is an item.
    tiles = image.embeds.reshape(len(image.pixels), -1)
    for number, (pixels, places) in enumerate(zip(image.pixels, tiles, strict=True)):
        seen = np.ones((1, *pixels.shape[1:]), dtype=np.bool_)
        data = _packed(
            {"pixel_values": pixels[None], "pixel_attention_mask": seen},
            {"num_patches": np.array(1)},
        )
        yield _PictureItem(
            name=f"{name}-{number}",
            start=picture.start + int(places[0]),
            num_tokens=len(places),
            data=data,
        )


def _packed(flat: Mapping[str, Array], batched: Mapping[str, Array]) -> str:
    """Inputs of the tower: those that are joined along their first dimension, and those that are stacked."""
    import msgpack  # a package of pictures: other runs do without it

    def told(array: Array) -> list[Any]:
        data = np.ascontiguousarray(array).tobytes()
        return [array.dtype.name, list(array.shape), msgpack.ExtType(RAW_TENSOR, data)]

    item: dict[str, Any] = {}
    for name, array in flat.items():
        whole = {"slices": [[0, len(array), None]], "dim": 0, "keep_on_cpu": False}
        item[name] = {"data": told(array), "field": ["flat", whole]}
    for name, array in batched.items():
        item[name] = {"data": told(array), "field": ["batched", {"keep_on_cpu": True}]}
    packed: bytes = msgpack.packb(item)
    return base64.b64encode(packed).decode()


def _chunk(event: Mapping[str, Any]) -> Chunk:
    if "choices" not in event:
        raise InfraError(f"vLLM failed a request: {error_message(event)}")
    (choice,) = event["choices"]
    content = (choice["logprobs"] or {}).get("content") or []
    spans = choice.get("weight_versions")
    tokens = choice["token_ids"] or []
    if len(content) != len(tokens):
        raise InfraError(f"vLLM gave {len(content)} log-probs for {len(tokens)} tokens")
    return Chunk(
        tokens=tokens,
        logprobs=[entry["logprob"] for entry in content],
        finish_reason=choice["finish_reason"] or "",
        spans=None
        if spans is None
        else [(span["version"], span["start"], span["end"]) for span in spans],
        experts=routed_experts(choice.get("routed_experts")),
    )


def _places(event: Mapping[str, Any]) -> list[dict[int, float]]:
    """Log-probs at each place of a prompt but the first."""
    told = event.get("prompt_logprobs") or [None]
    return [
        {int(token): float(each["logprob"]) for token, each in (place or {}).items()}
        for place in told[1:]
    ]


def routed_experts(encoded: str | None) -> npt.NDArray[Any] | None:
    """[n, L, K] of the base64 of a `.npy` file. Raises InfraError."""
    if encoded is None:
        return None
    try:
        found = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InfraError(f"vLLM gave routed experts that cannot be read: {error}") from error
    if found.ndim != 3 or found.dtype.kind not in "ui":
        raise InfraError(f"vLLM gave routed experts as {found.dtype.name}{list(found.shape)}")
    return found  # type: ignore[no-any-return]


def _without(client: VllmClient, what: str) -> UserError:
    return UserError(f"the vLLM server at {client.url} was started without {what}")
