"""The HTTP app that the Tinker SDK calls: requests in, futures out; a request's name says whose answer is wanted.

    train/MODEL/NUMBER     a request of the port `Training`, durable before it is answered
    sample/SAMPLER/NUMBER  a request of `Samplers`; `SampleNotices` tell one poll of all that have ended

The server keeps no state of sessions and futures: models are named by their session, samplers by the path of their
weights, requests by both and a number. After a restart a client continues as before; only samples are drawn again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from typing_extensions import override

from meshrl.contract.errors import (
    ConflictError,
    ForbiddenError,
    InfraError,
    NotFoundError,
    UnavailableError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.ports import Training
from meshrl.contract.types import (
    CreateModel,
    Json,
    LoadWeights,
    Refused,
    SamplingParams,
    SaveWeights,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
)
from meshrl.http.common import AsciiJSON, BodyLimit, install, presented_by, problem
from meshrl.http.tinker import models as m
from meshrl.http.tinker import wire
from meshrl.http.tinker.checkpoints import UNNAMED, HostedCheckpoints
from meshrl.http.tinker.sampling import SampleAnswer, Samplers, SampleWish, request_of
from meshrl.images import ImageProcessor
from meshrl.rpc.identity import TINKER, Identity
from meshrl.rpc.web_origin import PROTOBUF
from meshrl.trainer.hosted import is_called
from meshrl.v1 import tinker_pb2 as pb

PREFIX = "tml-"
"""The beginning that the SDK wants of every key; it is no part of ours."""
POLL_S = 20.0
"""How long a call for a result waits; the SDK asks again."""
NO_TOP = -99_999.0
"""The log-prob that says, with token 0, that a place has no likeliest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerModel:
    """The model that callers begin with."""

    name: str
    tokenizer: Path
    longest: int
    """Tokens of a prompt and its answer."""
    vocabulary: int
    images: ImageProcessor | None = None
    """Reader of pictures; None for a model of text."""


class _TinkerRoute(APIRoute):
    """Admits a caller before a byte of the body is read."""

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            identity: Identity = request.app.state.identity
            key = request.headers.get("x-api-key", "").removeprefix(PREFIX)
            identity.admit(TINKER, presented_by(request, authorization=f"Bearer {key}"))
            return await handle(request)

        return admitted


def build_app(
    training: Training,
    samplers: Samplers,
    checkpoints: HostedCheckpoints,
    base: TinkerModel,
    identity: Identity,
) -> FastAPI:
    """The app."""
    app = FastAPI(title="Tinker", default_response_class=AsciiJSON)
    app.add_middleware(BodyLimit, limit=wire.MOST_BYTES, refuse=problem)
    install(app)
    app.state.identity = identity

    @app.get("/api/v1/healthz")
    async def health() -> dict[str, str]:
        """Whether the server is up."""
        return {"status": "ok"}

    router = APIRouter(prefix="/api/v1", route_class=_TinkerRoute)
    _add_sessions(router, base)
    _add_training(router, training, checkpoints, base)
    _add_sampling(router, samplers, checkpoints, base)
    _add_results(router, training, samplers, checkpoints)
    _add_checkpoints(router, checkpoints)
    app.include_router(router)
    return app


def _add_sessions(router: APIRouter, base: TinkerModel) -> None:
    """Add routes of sessions and configuration."""

    @router.post("/client/config")
    async def config() -> dict[str, Json]:
        return {
            "proto_compress_fwdbwd": True,
            "sample_use_retrieve_futures": True,
            "use_pyqwest_transport": False,
        }

    @router.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Json]:
        return {"sample_cancel_enabled": True}

    @router.post("/create_session")
    async def create_session() -> dict[str, Json]:
        return {"type": "create_session", "session_id": f"s{secrets.token_hex(8)}"}

    @router.post("/session_heartbeat")
    async def heartbeat() -> dict[str, Json]:
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session}/finish")
    async def finish(session: str) -> dict[str, Json]:
        return {}

    @router.post("/telemetry")
    async def telemetry() -> dict[str, Json]:
        return {"status": "accepted"}

    @router.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Json]:
        model: dict[str, Json] = {
            "model_name": base.name,
            "max_context_length": base.longest,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    @router.post("/create_custom_loss")
    async def create_custom_loss() -> None:
        raise UserError("losses are computed by the SDK here, not sent")


def _add_training(
    router: APIRouter, training: Training, checkpoints: HostedCheckpoints, base: TinkerModel
) -> None:
    """Add routes of a model's requests, each with its number."""

    async def accepted(model: str, number: int, verb: TrainingVerb) -> dict[str, Json]:
        try:
            await training.submit(TrainingRequest(model=model, number=number, verb=verb))
        except ConflictError as error:
            raise UserError(error.message) from error  # the SDK repeats what conflicts
        except UserError as error:
            if not await _is_used_up(training, model, number):
                raise error
        return {"request_id": f"train/{model}/{number}", "model_id": model}

    async def created(model: str, verb: CreateModel | Refused) -> dict[str, Json]:
        answer = await accepted(model, 0, verb)
        if isinstance(verb, CreateModel):
            await asyncio.to_thread(checkpoints.remember, model, verb)
        return answer

    @router.post("/create_model")
    async def create_model(body: m.CreateModelBody) -> dict[str, Json]:
        return await created(f"{body.session_id}:train:{body.model_seq_id}", body.verb())

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Json]:
        encoding = request.headers.get("content-encoding", "")
        body = wire.decompressed(await request.body(), encoding)
        asked = await asyncio.to_thread(wire.read_forward_backward, body, base.images)
        return await accepted(asked.model, asked.number, asked.verb)

    @router.post("/optim_step")
    async def optim_step(body: m.OptimStepBody) -> dict[str, Json]:
        return await accepted(body.model_id, body.seq_id, body.verb())

    @router.post("/save_weights")
    async def save_weights(body: m.SaveWeightsBody) -> dict[str, Json]:
        name = body.path or f"step-{body.seq_id}"
        verb = SaveWeights(name=name, overwrite=body.overwrite)
        return await accepted(body.model_id, body.seq_id, verb)

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: m.SaveWeightsBody) -> dict[str, Json]:
        name = body.path or f"{UNNAMED}{body.seq_id}"
        verb = SaveWeights(name=name, for_sampler=True, overwrite=body.overwrite)
        return await accepted(body.model_id, body.seq_id, verb)

    @router.post("/load_weights")
    async def load_weights(body: m.LoadWeightsBody) -> dict[str, Json]:
        if body.model_id is not None:
            load = LoadWeights(path=body.path, with_optimizer=body.optimizer)
            return await accepted(body.model_id, body.seq_id or 0, load)
        verb = CreateModel(
            base_model=body.base_model or base.name,
            load_from=body.path,
            with_optimizer=body.optimizer,
        )
        return await created(f"{body.session_id}:train:{body.model_seq_id}", verb)

    @router.post("/get_info")
    def get_info(body: m.ModelBody) -> dict[str, Json]:
        form = checkpoints.form(body.model_id)
        data: dict[str, Json] = {"model_name": base.name, "tokenizer_id": str(base.tokenizer)}
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_name": base.name,
            "model_data": data,
            "is_lora": form["lora_rank"] is not None,
            "lora_rank": form["lora_rank"],
        }


async def _is_used_up(training: Training, model: str, number: int) -> bool:
    """Whether a request that was refused has its answer, as all have whose number counts."""
    try:
        await training.result(model, number, wait_s=0)
    except (NotFoundError, ConflictError, WaitTimeoutError):
        return False
    return True


def _add_sampling(
    router: APIRouter, samplers: Samplers, checkpoints: HostedCheckpoints, base: TinkerModel
) -> None:
    """Add routes of samplers and their requests."""

    @router.post("/create_sampling_session")
    def create_sampling_session(body: m.SamplingSessionBody) -> dict[str, Json]:
        path = body.model_path or ""
        asked = body.base_model or ""
        if not path and not (is_called(asked, base.name) or is_called(asked, str(base.tokenizer))):
            raise UserError(f"base_model: got {body.base_model!r}, want {base.name}")
        checkpoints.sampler(path)
        sampler = sampler_id(path, f"{body.session_id}.{body.sampling_session_seq_id}")
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @router.get("/samplers/{sampler}")
    async def get_sampler(sampler: str) -> dict[str, Json]:
        path = path_of_sampler(sampler)
        return {"sampler_id": sampler, "base_model": base.name, "model_path": path or None}

    @router.post("/join_sampling_session")
    async def join_sampling_session() -> dict[str, Json]:
        return {"type": "join_sampling_session", "client_counter": 1 + secrets.randbelow(1 << 20)}

    @router.post("/asample")
    async def asample(body: m.SampleBody) -> dict[str, Json]:
        sampler = body.sampling_session_id or sampler_id(body.model_path or "", "once")
        number = secrets.randbelow(m.MOST_NUMBER) if body.seq_id is None else body.seq_id
        wish = await asyncio.to_thread(_wish, sampler, number, path_of_sampler(sampler), body, base)
        await samplers.ask(wish)
        sequences: list[Json] = [f"{wish.request}/{index}" for index in range(wish.samples)]
        return {"request_id": wish.request, "sample_sequence_ids": sequences}

    @router.post("/retrieve_futures")
    async def retrieve_futures(body: m.FuturesBody) -> dict[str, Json]:
        session, clone = body.target.sampling_session_id, body.target.cloned_sampler_id
        wait_s = POLL_S if body.timeout is None else min(body.timeout, POLL_S)
        ended, cursor = await samplers.notices.poll(session, clone, body.prev_cursor, wait_s=wait_s)
        # The answer may be an error: the SDK then fetches that.
        completions: list[Json] = [
            {"state": "finished", "request_id": request_of(session, number)} for number in ended
        ]
        return {"completions": completions, "cursor": cursor}

    @router.post("/cancel_future")
    async def cancel_future(body: m.FutureBody) -> dict[str, Json]:
        samplers.cancel(body.request_id)
        return {}


def sampler_id(path: str, client: str) -> str:
    """The name of a sampler's session: the path of its weights, and whose it is."""
    return f"{base64.urlsafe_b64encode(path.encode()).decode() or '='}.{client}"


def path_of_sampler(sampler: str) -> str:
    """The path of the weights of a sampler's session. Raises NotFoundError."""
    try:
        return base64.urlsafe_b64decode(sampler.partition(".")[0].encode()).decode()
    except (binascii.Error, UnicodeError) as error:
        raise NotFoundError(f"there is no sampling session {sampler}") from error


def _wish(
    session: str, number: int, path: str, body: m.SampleBody, base: TinkerModel
) -> SampleWish:
    """Raises UserError for what no engine here can do."""
    prompt, media = wire.laid_out(body.prompt.parts(), base.images)
    wanted = body.sampling_params
    if not len(prompt):
        raise UserError("prompt: it is empty")
    if prompt.min() < 0 or prompt.max() >= base.vocabulary:
        raise UserError(f"prompt: want tokens from 0 to {base.vocabulary - 1}")
    room = base.longest - len(prompt)
    if room < 1:
        raise UserError(
            f"prompt: {len(prompt)} tokens leave no room for a sample; the model takes {base.longest}"
        )
    stop = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or ())
    if wanted.stop is not None and not stop:
        raise UserError("sampling_params.stop: [] for no end at all is not known here; want null")
    return SampleWish(
        session=session,
        number=number,
        path=path,
        prompt=prompt,
        media=media,
        sampling=SamplingParams(
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            max_tokens=min(wanted.max_tokens or room, room),
            stop=tuple(each for each in stop if isinstance(each, str)),
            stop_token_ids=tuple(each for each in stop if isinstance(each, int)),
            seed=wanted.seed or 0,
        ),
        seeded=wanted.seed is not None,
        samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        top=body.topk_prompt_logprobs,
        last=body.prompt_logprobs_last_n,
        is_polled=body.seq_id is not None,
    )


def _add_results(
    router: APIRouter, training: Training, samplers: Samplers, checkpoints: HostedCheckpoints
) -> None:
    """Add routes of answers to requests."""

    @router.post("/retrieve_future")
    async def retrieve_future(body: m.FutureBody) -> Response:
        kind, _, rest = body.request_id.partition("/")
        owner, _, number = rest.rpartition("/")
        try:
            if kind == "sample":
                return await _sample(samplers, body.request_id)
            if kind != "train" or not number.isdigit():
                raise NotFoundError(f"there is no request {body.request_id}")
            result = await training.result(owner, int(number), wait_s=POLL_S)
        except WaitTimeoutError:
            return _try_again(body.request_id)
        except NotFoundError as error:
            return problem(410, error.code, error.message)
        except (UserError, ConflictError, ForbiddenError) as error:
            return _failure(error.message, user=True)
        except UnavailableError:
            raise
        except InfraError as error:
            return _failure(error.message, user=False)
        if result.error is not None:
            return _failure(result.error, user=result.user_error)
        if _is_unnamed(result.path):
            await asyncio.to_thread(checkpoints.forget_unnamed, owner)
        return _result(result, owner, int(number))


def _try_again(request: str) -> Response:
    return AsciiJSON({"type": "try_again", "request_id": request, "queue_state": "active"})


def _failure(error: str, *, user: bool) -> Response:
    return AsciiJSON({"error": error, "category": "user" if user else "server"})


async def _sample(samplers: Samplers, request: str) -> Response:
    found = await samplers.answer(request, wait_s=POLL_S)
    if found is None:
        return _try_again(request)
    return Response(_sample_bytes(found), media_type=PROTOBUF)


def _sample_bytes(found: SampleAnswer) -> bytes:
    message = pb.TinkerSampleResponse()
    for response in found.responses:
        stopped = response.finish_reason == "stop"
        message.sequences.add(
            stop_reason=pb.TINKER_STOP_STOP if stopped else pb.TINKER_STOP_LENGTH,
            tokens=response.tokens.astype("<i4").tobytes(),
            logprobs=response.logprobs.astype("<f4").tobytes(),
        )
    if found.prompt_logprobs is not None:
        message.prompt_logprobs = found.prompt_logprobs.astype("<f4").tobytes()
    if found.top_ids is not None and found.top_logprobs is not None:
        hidden = np.isnan(found.top_logprobs)
        message.topk_prompt_logprobs.CopyFrom(
            pb.TinkerTop(
                token_ids=np.where(hidden, 0, found.top_ids).astype("<i4").tobytes(),
                logprobs=np.where(hidden, NO_TOP, found.top_logprobs).astype("<f4").tobytes(),
                length=found.top_ids.shape[0],
                k=found.top_ids.shape[1],
            )
        )
    return message.SerializeToString()


def _is_unnamed(path: str | None) -> bool:
    return path is not None and path.rpartition("/")[2].startswith(UNNAMED)


def _result(result: TrainingResult, model: str, number: int) -> Response:
    """The answer; one form for all requests but a pass, because the SDK ignores fields that it did not ask for."""
    if result.outputs:
        return Response(wire.write_outputs(result), media_type=PROTOBUF)
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    body: dict[str, Json] = {"model_id": model, "metrics": dict(metrics)}
    if result.path is not None and _is_unnamed(result.path):
        body["sampling_session_id"] = sampler_id(result.path, f"{model}.{number}")
    elif result.path is not None:
        body["path"] = result.path
    return AsciiJSON(body)


def _add_checkpoints(router: APIRouter, checkpoints: HostedCheckpoints) -> None:
    """Add routes of checkpoints of models, by their paths; the functions run in threads."""

    @router.post("/weights_info")
    def weights_info(body: m.PathBody) -> Mapping[str, Json]:
        return checkpoints.info(body.tinker_path)

    @router.get("/checkpoints")
    def of_all(limit: int = 100, offset: int = 0) -> dict[str, Json]:
        return _page("checkpoints", checkpoints.all(), limit, offset)

    @router.get("/training_runs")
    def runs(limit: int = 20, offset: int = 0) -> dict[str, Json]:
        page = _page("training_runs", checkpoints.models(), limit, offset)
        return {**page, "training_runs": [checkpoints.run(each) for each in page["training_runs"]]}

    @router.get("/training_runs/{model}")
    def run(model: str) -> dict[str, Json]:
        return checkpoints.run(model)

    @router.get("/sessions")
    def sessions(limit: int = 20, offset: int = 0) -> dict[str, Json]:
        return _page(
            "sessions", list(dict.fromkeys(map(_session_of, checkpoints.models()))), limit, offset
        )

    @router.get("/sessions/{session}")
    def models_of(session: str) -> dict[str, Json]:
        models: list[Json] = [each for each in checkpoints.models() if _session_of(each) == session]
        return {"training_run_ids": models, "sampler_ids": []}

    @router.post("/copy_weights")
    def copy_weights(body: m.CopyBody, request: Request) -> dict[str, Json]:
        # A request that the SDK repeats has the same key, and is for the same copy.
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(8)
        model = f"{body.session_id or f'copy-{key}'}:train:{body.model_seq_id}"
        return {"tinker_path": checkpoints.copy(body.source_path, model)}

    @router.get("/training_runs/{model}/checkpoints")
    def of_model(model: str) -> dict[str, Json]:
        return {"checkpoints": checkpoints.of(model)}

    @router.delete("/training_runs/{model}/checkpoints/{kind}/{name}")
    def delete(model: str, kind: str, name: str) -> dict[str, Json]:
        checkpoints.remove(f"tinker://{model}/{kind}/{name}")
        return {}


def _session_of(model: str) -> str:
    """The session in which a model was made. Sessions without models leave nothing."""
    return model.partition(":")[0]


def _page(name: str, found: Sequence[Any], limit: int, offset: int) -> dict[str, Any]:
    """A part of a list, as the SDK asks for it."""
    limit, offset = max(0, limit), max(0, offset)
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return {name: found[offset : offset + limit], "cursor": cursor}
