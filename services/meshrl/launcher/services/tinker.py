"""The Tinker server: models that callers train by requests of their own, and samples of them, in one process.

HTTP of the Tinker SDK ─┐
                        ├─▶ HostedTraining ──▶ policy         Samplers ──▶ engines, or one server with adapters
gRPC, TrainingClient ───┘        └── <run.dir>/tinker: journals, checkpoints ──┘
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from typing_extensions import override

from meshrl.config.recipe import Recipe, TinkerConfig
from meshrl.config.stages import vocabulary
from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import GenerateDelta, GenerateRequest, Version
from meshrl.http.common import problem
from meshrl.http.tinker.app import PREFIX, TinkerModel, build_app
from meshrl.http.tinker.checkpoints import HostedCheckpoints
from meshrl.http.tinker.notices import SampleNotices
from meshrl.http.tinker.sampling import SamplerEngine, Samplers
from meshrl.launcher.evaluation import VERSION, CheckpointEngine
from meshrl.launcher.stage_service import work_until_stopped
from meshrl.rollout.engines import build_engine
from meshrl.rollout.server_engine.checkpoint import ADAPTER_FILE
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.tokenizer import load_tokenizer
from meshrl.rpc.credentials import MeshRole, file_of_role
from meshrl.rpc.http_server import serving_http
from meshrl.rpc.runtime import GrpcServer, ServiceContext
from meshrl.rpc.servicers import TrainingServicer
from meshrl.trainer.hosted import FOLDER
from meshrl.trainer.hosted.host import HostedTraining
from meshrl.trainer.hosted.workbench import PolicyBench
from meshrl.trainer.ranks.world import World

log = logging.getLogger(__name__)
ADAPTER = "adapter"
"""Folder of a checkpoint for samplers with its adapter as peft reads it."""


async def run(recipe: Recipe, context: ServiceContext) -> None:
    """Serve until stopped."""
    settings = context.settings
    name = str(recipe.model.path)
    folder = recipe.run.path / FOLDER
    async with AsyncExitStack() as stack:
        world = World.start(recipe.trainer.device)
        stack.callback(world.close)
        bench = await asyncio.to_thread(PolicyBench, recipe.model, world, names=[name])
        training = HostedTraining(folder, bench)
        await training.open()
        stack.push_async_callback(training.close)
        checkpoints = HostedCheckpoints(folder, recipe.model.path, name)
        engines = _Engines(recipe)
        stack.push_async_callback(engines.close)
        samplers = Samplers(
            checkpoints.sampler, engines.start, SampleNotices(folder / "samples.log")
        )
        stack.push_async_callback(samplers.close)
        identity = settings.identity()
        server = GrpcServer(settings, [TrainingServicer(training)], identity=identity)
        await stack.enter_async_context(server)
        base = TinkerModel(
            name=name,
            tokenizer=recipe.tokenizer_dir,
            longest=bench.longest,
            vocabulary=vocabulary(recipe),
            images=bench.images,
        )
        address = await stack.enter_async_context(
            serving_http(
                build_app(training, samplers, checkpoints, base, identity),
                settings.host,
                (recipe.tinker or TinkerConfig()).http_port,
                settings.tls,
                refuse=problem,
                name="Tinker API",
            )
        )
        key = file_of_role(recipe.run.path, MeshRole.TUNER)
        log.info("TINKER_BASE_URL=%s TINKER_API_KEY=%s$(cat %s)", address, PREFIX, key)
        await server.ready()
        stopping = asyncio.Event()
        await work_until_stopped(server, stopping.wait(), stopping.set)


class _Engines:
    """Engines as the recipe's rollout has them: one of each checkpoint, or a server of the base and its adapters."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises ConfigError for an engine that cannot serve the checkpoints of callers."""
        self._recipe, self._tokenizer = recipe, load_tokenizer(recipe.tokenizer_dir)
        self._most_rank: int = getattr(self._engine(recipe.model.path), "most_lora_rank", 0)
        self._alone = recipe.rollout.engine.get("url") is not None
        """There is one server, and no other can be started."""
        if self._alone and not self._most_rank:
            raise ConfigError(
                "rollout.engine.url is one server, and each sampler has weights of its own: set"
                " rollout.engine.max_lora_rank, so that it serves them as adapters"
            )
        self._server: ServerEngine | None = None
        self._starting = asyncio.Lock()

    async def start(self, folder: Path) -> SamplerEngine:
        """An engine that serves the checkpoint in a folder.

        Raises:
            UserError: there is none for weights of this form.
        """
        base, adapter = folder == self._recipe.model.path, folder / ADAPTER
        if not self._most_rank or not (base or adapter.is_dir()):
            if self._alone:
                raise UserError("the server at rollout.engine.url samples from adapters only")
            engine: SamplerEngine = await self._started(folder)
            return engine
        rank = 0 if base else json.loads((adapter / ADAPTER_FILE).read_text())["r"]
        if rank > self._most_rank:
            raise UserError(
                f"an adapter of rank {rank}; rollout.engine.max_lora_rank is {self._most_rank}"
            )
        async with self._starting:
            if self._server is not None and self._server.gone:
                await self.close()
            if self._server is None:
                self._server = await self._started(self._recipe.model.path)
            return _Beside(self._server, await self._server.add_adapter(adapter) if rank else "")

    async def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _started(self, folder: Path) -> Any:
        engine = self._engine(folder)
        try:
            await engine.start()
            await engine.serve_checkpoint(VERSION)
        except BaseException:
            await engine.close()
            raise
        return engine

    def _engine(self, folder: Path) -> Any:
        engine = build_engine(self._recipe.rollout, model=folder, tokenizer=self._tokenizer)
        if not isinstance(engine, CheckpointEngine):
            raise ConfigError(
                "meshrl serve tinker needs an engine that serves a checkpoint by itself;"
                f" {self._recipe.rollout.name} does not (rollout.name=torch does)"
            )
        return engine


class _Beside(SamplerEngine):
    """An adapter of a server that has others; the base model without a name."""

    def __init__(self, server: ServerEngine, name: str) -> None:
        self._server, self._name = server, name

    @override
    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateDelta]:
        return self._server.generate(request, adapter=self._name)

    @property
    @override
    def version(self) -> Version:
        return self._server.version

    @override
    async def close(self) -> None:
        if self._name:
            await self._server.remove_adapter(self._name)
