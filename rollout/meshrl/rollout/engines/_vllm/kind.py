"""What a vLLM server is: how one is started, and whether it is one that the mesh can drive."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshrl.contract import plugins
from meshrl.contract.errors import InfraError, UserError
from meshrl.rollout.engines._server.checkpoint import Checkpoint
from meshrl.rollout.engines._server.request import Ask
from meshrl.rollout.engines._vllm.client import Client
from meshrl.rollout.engines._vllm.config import Config
from meshrl.rollout.engines._vllm.native import NativeSender, RootBuilder

ENGINES = "meshrl.rollout.engines"
PLUGIN_DIR = Path(__file__).with_name("plugin")
"""Goes on the server's PYTHONPATH: the folder of `meshrl_vllm`."""
UPDATE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "staged": (
        *("--worker-extension-cls", "meshrl_vllm.Worker"),
        *("--weight-transfer-config", '{"backend": "mesh"}'),
    ),
    "native": ("--weight-transfer-config", '{"backend": "nccl"}'),
}
"""What a server must be started with to take weights, by `rollout.engine.update`."""
ARGUMENTS = ("--logprobs-mode", "processed_logprobs", "--enable-scale-out")
"""What any server must be started with to be driven by the mesh."""
PLUGIN_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
CHILD_ENVIRONMENT = {
    # On a CPU: a second engine would be pinned to the first one's cores, and threads of neighbours spin.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults; what the parent's environment or `rollout.engine.env` says wins."""
ALMOST_ZERO = 1e-3


class Vllm:
    """Satisfies `meshrl.rollout.engines._server.server.Kind`."""

    name = "vLLM"
    package = "vllm"
    # Not the `vllm` command, which vllm-cpu 0.32.0 ships broken.
    module: tuple[str, ...] = ("-m", "vllm.entrypoints.openai.api_server")
    plugin = PLUGIN_DIR

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when versions are to be broadcast and cannot be."""
        self._config = config
        if config.update == "native":
            self._build_root: RootBuilder = plugins.load(ENGINES, config.root, "build")
            self._build_root(config.nccl)  # what is wrong with the options is said now

    def arguments(
        self, checkpoint: Checkpoint, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Of a server that is started."""
        return (
            *("--model", str(checkpoint.path)),
            *("--host", "127.0.0.1", "--port", port),
            *("--dtype", self._config.dtype),
            *("--max-model-len", str(max_length)),
            *("--max-num-seqs", str(slots)),
            # Requests carry everything themselves: ids in, ids out, no default of the checkpoint applied.
            *("--skip-tokenizer-init", "--generation-config", "vllm"),
            *UPDATE_ARGUMENTS[self._config.update],
            *ARGUMENTS,
            *self._config.extra_args,
        )

    def environment(self) -> Mapping[str, str]:
        """Of a server that is started; `rollout.engine.env` comes on top."""
        return {**CHILD_ENVIRONMENT, **os.environ, **PLUGIN_ENVIRONMENT}

    def client(self, url: str) -> Client:
        """Speaks to the server there."""
        config = self._config
        return Client(
            url, silence_s=config.silence_s, update_s=config.update_s, sender=self._sender()
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

    async def check(self, client: Client, checkpoint: Checkpoint, max_length: int) -> None:
        """Ask for everything that generation and updates will need; also pays for the first request's warm-up.

        Raises:
            UserError: naming the option that the server was started without, or its limit below `max_length`.
        """
        try:
            await client.label()
        except UserError as error:
            raise _without(client, "the environment variable VLLM_SERVER_DEV_MODE=1") from error
        try:
            await client.ready_for_weights()
        except InfraError as error:
            options = " ".join(UPDATE_ARGUMENTS[self._config.update])
            if self._config.update == "staged":
                options += f" and PYTHONPATH={PLUGIN_DIR}"
            raise _without(client, f"{options} ({error})") from error
        (card, *_) = (await client.call("GET", "/v1/models"))["data"]
        allowed = card.get("max_model_len") or max_length
        if allowed < max_length:
            raise UserError(
                f"the vLLM server at {client.url} allows {allowed} tokens of prompt and response, the engine "
                f"{max_length}: set rollout.engine.max_model_len"
            )
        try:
            chunks = [chunk async for chunk in client.generate(uuid.uuid4().hex, PROBE, "probe")]
        except UserError as error:
            raise _without(client, f"--enable-scale-out ({error})") from error
        # Of one token alone the processed probability is 1; the raw one is not.
        if any(logprob < -ALMOST_ZERO for chunk in chunks for logprob in chunk.logprobs):
            raise _without(client, "--logprobs-mode processed_logprobs")


PROBE = Ask(
    token_ids=[1, 2, 3],
    temperature=1.0,
    top_p=1.0,
    top_k=1,
    max_tokens=1,
    stop_token_ids=(),
    seed=0,
    stream_interval=1,
)


def _without(client: Client, what: str) -> UserError:
    return UserError(f"the vLLM server at {client.url} was started without {what}")
