"""What an SGLang server is: how one is started, and whether it is one that the mesh can drive."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.contract.errors import InfraError, UserError
from meshrl.rollout.engines._server.checkpoint import Checkpoint
from meshrl.rollout.engines._server.request import Ask
from meshrl.rollout.engines._sglang.client import LOADER, Client, Facts, Sender
from meshrl.rollout.engines._sglang.config import Config

log = logging.getLogger(__name__)

PLUGIN_DIR = Path(__file__).with_name("plugin")
"""Goes on the server's PYTHONPATH: the folder of `meshrl_sglang`."""
LOADER_ARGUMENTS = ("--custom-weight-loader", LOADER)
READ_VERSION = "0.5.23"
"""Whose sources this engine was written after."""
ALMOST_ZERO = 1e-3


class Sglang:
    """Satisfies `meshrl.rollout.engines._server.server.Kind`."""

    name = "SGLang"
    package = "sglang"
    module: tuple[str, ...] = ("-m", "sglang.launch_server")
    plugin = PLUGIN_DIR

    def __init__(self, config: Config) -> None:
        self._config = config

    def arguments(
        self, checkpoint: Checkpoint, *, max_length: int, slots: int, port: str
    ) -> Sequence[str]:
        """Of a server that is started."""
        return (
            *("--model-path", str(checkpoint.path)),
            *("--host", "127.0.0.1", "--port", port),
            *("--dtype", self._config.dtype),
            *("--context-length", str(max_length)),
            *("--max-running-requests", str(slots)),
            # Requests carry everything themselves: ids in, ids out, no default of the checkpoint applied.
            *("--skip-tokenizer-init", "--sampling-defaults", "openai"),
            "--incremental-streaming-output",
            *LOADER_ARGUMENTS,
            *self._config.extra_args,
        )

    def environment(self) -> Mapping[str, str]:
        """Of a server that is started; `rollout.engine.env` comes on top."""
        return dict(os.environ)

    def client(self, url: str) -> Client:
        """Speaks to the server there."""
        config = self._config
        return Client(
            url,
            update=config.update,
            silence_s=config.silence_s,
            update_s=config.update_s,
            sender=_sender(config) if config.update == "native" else None,
        )

    async def check(self, client: Client, checkpoint: Checkpoint, max_length: int) -> None:
        """Ask for everything that generation and updates will need; also pays for the first request's warm-up.

        Raises:
            UserError: naming the option that the server was started with or without, or its limit below `max_length`.
        """
        info = await client.call("GET", "/server_info")
        self._check_options(client, info)
        if self._config.update != "disk":
            with contextlib.suppress(InfraError):  # 405: it is there, for POST
                await client.call("GET", "/begin_weight_update")
        client.facts = Facts(
            ranks=int(info.get("tp_size") or 1),
            overlaps=not info.get("disable_overlap_schedule"),
            increments=bool(info.get("incremental_streaming_output")),
            eos_token_ids=checkpoint.eos_token_ids,
            vocab_size=checkpoint.vocab_size,
            mask_tokens=int(info.get("sampling_mask_max_tokens") or 1),
        )
        if client.facts.overlaps:
            log.info(
                "SGLang at %s overlaps steps: updates in flight compute running requests anew, so that every token's "
                "version is exact (--disable-overlap-schedule keeps their cache instead)",
                client.url,
            )
        (card, *_) = (await client.call("GET", "/v1/models"))["data"]
        allowed = card.get("max_model_len") or max_length
        if allowed < max_length:
            raise UserError(
                f"the SGLang server at {client.url} allows {allowed} tokens of prompt and response, the engine "
                f"{max_length}: set rollout.engine.max_model_len"
            )
        chunks = [chunk async for chunk in client.generate(uuid.uuid4().hex, PROBE, "probe")]
        if chunks[-1].spans is None:
            raise UserError(
                f"the SGLang server at {client.url} ({info.get('version')}) does not say which weights sampled its "
                f"tokens: want {READ_VERSION} or later"
            )
        # Of one token alone the probability after top-k is 1; without its mask it is not.
        if any(logprob < -ALMOST_ZERO for chunk in chunks for logprob in chunk.logprobs):
            raise UserError(
                f"the SGLang server at {client.url} gives log-probs of a distribution that was not sampled"
            )

    def _check_options(self, client: Client, info: Mapping[str, Any]) -> None:
        """Raises UserError for what would fail at the first update."""
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
        if int(info.get("pp_size") or 1) > 1 and self._config.update == "native":
            raise UserError(
                f"{where} with --pp-size {info['pp_size']}: its weight-update group knows tensor-parallel ranks only"
            )
        if info.get("weight_cache_mode", "off") != "off":
            raise UserError(
                f"{where} with --weight-cache-mode {info['weight_cache_mode']}: it refuses weights; want off"
            )


def _sender(config: Config) -> Sender:
    from meshrl.rollout.engines._sglang.native import GroupSender  # torch, for nothing else

    return GroupSender(
        address=config.group_address,
        backend=config.group_backend,
        bucket_bytes=config.bucket_bytes,
        deadline_s=config.update_s,
    )


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
