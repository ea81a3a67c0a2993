"""Whether a server is up, and whether it is one that the mesh can drive."""

from __future__ import annotations

import asyncio
import logging
import time

from meshrl.contract.errors import InfraError, UserError
from meshrl.rollout.engines._vllm.client import Client
from meshrl.rollout.engines._vllm.server import PLUGIN_ARGUMENTS, PLUGIN_DIR, Server

log = logging.getLogger(__name__)

LOOK_S = 0.2
REPORT_S = 15.0
ALMOST_ZERO = 1e-3


async def wait_ready(client: Client, server: Server | None, wait_s: float) -> None:
    """Return once the server answers.

    Raises:
        UserError: it ended first (with the log's last error), or was not ready within `wait_s`.
    """
    began = reported = time.monotonic()
    while not await client.healthy(wait_s=5.0):
        if server is not None and server.exit_code is not None:
            raise UserError(
                f"vLLM ended with exit code {server.exit_code} before it was ready: {server.last_words()} "
                f"(log: {server.log})"
            )
        now = time.monotonic()
        if now - began > wait_s:
            where = f"the log {server.log} ends: {server.last_words()}" if server else "is it up?"
            raise UserError(f"no vLLM server answers at {client.url} within {wait_s:g} s; {where}")
        if now - reported > REPORT_S:
            log.info(
                "vLLM starts since %.0f s: %s",
                now - began,
                server.last_words() if server else client.url,
            )
            reported = now
        await asyncio.sleep(LOOK_S)


async def check_server(client: Client, max_length: int) -> None:
    """Ask for everything that generation and updates will need; also pays for the first request's warm-up.

    Raises:
        UserError: naming the option that the server was started without, or its limit below `max_length`.
    """
    try:
        await client.label()
    except UserError as error:
        raise _started_without(client, "the environment variable VLLM_SERVER_DEV_MODE=1") from error
    try:
        await client.call("POST", "/init_weight_transfer_engine", json={"init_info": {}})
    except InfraError as error:
        options = " ".join(PLUGIN_ARGUMENTS[:4])
        raise _started_without(client, f"{options} and PYTHONPATH={PLUGIN_DIR}") from error
    (card, *_) = (await client.call("GET", "/v1/models"))["data"]
    allowed = card.get("max_model_len") or max_length
    if allowed < max_length:
        raise UserError(
            f"the vLLM server at {client.url} allows {allowed} tokens of prompt and response, the engine "
            f"{max_length}: set rollout.engine.max_model_len"
        )
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
    request = {"token_ids": [1, 2, 3], "sampling_params": {**sampling, "detokenize": False}}
    try:
        chunks = [chunk async for chunk in client.generate(request)]
    except UserError as error:
        raise _started_without(client, f"--enable-scale-out ({error})") from error
    # Of one token alone the processed probability is 1; the raw one is not.
    if any(logprob < -ALMOST_ZERO for chunk in chunks for logprob in chunk.logprobs):
        raise _started_without(client, "--logprobs-mode processed_logprobs")


def _started_without(client: Client, what: str) -> UserError:
    return UserError(f"the vLLM server at {client.url} was started without {what}")
