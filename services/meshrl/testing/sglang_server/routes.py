"""The fake's HTTP routes: SGLang 0.5.23's names, bodies, statuses and failure texts, and two of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from meshrl.testing.sglang_server.scheduler import Died, Request, Scheduler, Updates, spans

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
RESERVED_OF_PROMPTS = 6
Body = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Fault:
    """An error that a route answers with instead of its normal answer."""

    status: int
    message: str
    times: int
    streamed: bool
    """The answer has status 200, and the error is an event of its stream."""


class Routes:
    """Handlers over one scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        updates: Updates,
        *,
        info: Mapping[str, Any],
        die: Callable[[str], None],
    ) -> None:
        """`info` is the answer of /server_info; `die` ends the process with a last line."""
        self._scheduler = scheduler
        self._updates = updates
        self._info = dict(info)
        self._increments = bool(info["incremental_streaming_output"])
        self._die = die
        self._released: set[str] = set()
        """Tags of memory that was given up."""
        self._faults: dict[str, Fault] = {}
        self._calls: list[tuple[str, Body]] = []

    def app(self) -> Starlette:
        """The application; the scheduler runs while it serves."""
        get = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/models": self._models,
            "/fake/state": self._state,
        }
        post: dict[str, Callable[[Body], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._take_again,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_disk": self._from_disk,
            "/update_weight_version": self._relabel,
            "/fake/fault": self._fault,
        }
        routes = [Route(path, _got(handler)) for path, handler in get.items()]
        routes += [
            Route(path, self._posted(path, handler), methods=["POST"])
            for path, handler in post.items()
            if path not in self._info["without_route"]
        ]
        return Starlette(routes=routes, lifespan=self._running)

    @asynccontextmanager
    async def _running(self, app: Starlette) -> AsyncIterator[None]:
        steps = asyncio.create_task(self._scheduler.run())
        yield
        steps.cancel()

    def _posted(
        self, path: str, handler: Callable[[Body], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def handle(request: HttpRequest) -> Response:
            raw = await request.body()
            body = orjson.loads(raw) if raw else {}
            if path not in ("/generate", "/fake/fault"):
                self._calls.append((path, body))
            fault = self._faults.get(path)
            if fault is not None:
                fault.times -= 1
                if fault.times <= 0:
                    del self._faults[path]
                return (_refused if fault.streamed else _failed)(fault.message, fault.status)
            try:
                return await handler(body)
            except Died as died:
                self._die(str(died))
                raise

        return handle

    # Queries

    async def _health(self) -> Response:
        # A real server generates one token, which a pause blocks.
        healthy = not self._scheduler.paused and not self._scheduler.stalled
        return Response(status_code=200 if healthy else 503)

    async def _model_info(self) -> Response:
        return JSONResponse(
            {"model_path": self._info["model_path"], "weight_version": self._scheduler.label}
        )

    async def _server_info(self) -> Response:
        return JSONResponse(self._info)

    async def _models(self) -> Response:
        card = {"id": self._info["model_path"], "max_model_len": self._info["context_length"]}
        return JSONResponse({"object": "list", "data": [card]})

    async def _state(self) -> Response:
        scheduler = self._scheduler
        return JSONResponse(
            {
                "calls": self._calls,
                "mark": scheduler.mark,
                "label": scheduler.label,
                "paused": scheduler.paused,
                "requests": list(scheduler.requests),
                "tokens": scheduler.tokens,
            }
        )

    # Generation

    async def _generate(self, body: Body) -> Response:
        params, prompt = body["sampling_params"], len(body["input_ids"])
        length = self._info["context_length"]
        if prompt + params["max_new_tokens"] > length:
            return _refused(f"Requested token count exceeds the context length of {length} tokens")
        if prompt >= length - RESERVED_OF_PROMPTS:
            return _refused(
                f"Input length ({prompt} tokens) exceeds the maximum allowed length "
                f"({length - RESERVED_OF_PROMPTS} tokens)"
            )
        if params["temperature"] < 0:
            return _refused(
                "temperature must be a non-negative finite number, got "
                f"{float(params['temperature'])}."
            )
        params["max_new_tokens"] = min(params["max_new_tokens"], length - 2 - prompt)
        request = Request(
            rid=body["rid"],
            prompt=tuple(body["input_ids"]),
            params=params,
            salt=body.get("cache_salt") or "",
        )
        events = self._events(request, body)
        if not body.get("stream"):
            whole = [event async for event in events][-2]  # then comes [DONE]
            return Response(whole.removeprefix(b"data: "), media_type="application/json")
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(self, request: Request, body: Body) -> AsyncIterator[bytes]:
        scheduler = self._scheduler
        refusal = self._refusal(request, body)
        if refusal:
            reason = {"type": "abort", "message": refusal, "status_code": 400}
            meta = {"id": request.rid, "finish_reason": reason}
            yield b"data: " + orjson.dumps({"output_ids": [], "meta_info": meta}) + b"\n\n"
            yield b"data: [DONE]\n\n"
            return
        await scheduler.until(lambda: not scheduler.paused)
        scheduler.add(request)
        sent, last = 0, False
        try:
            while not last:
                last = await request.out.get()
                while not request.out.empty():
                    last = request.out.get_nowait()
                event = self._event(request, sent, cut=body.get("return_sampling_mask", False))
                sent = len(request.tokens)
                yield b"data: " + orjson.dumps(event) + b"\n\n"
        finally:
            scheduler.abort(request.rid, everything=False, reason={"type": "abort"})
            await scheduler.notify()
        yield b"data: [DONE]\n\n"

    def _refusal(self, request: Request, body: Body) -> str:
        cap, top_k = self._info["sampling_mask_max_tokens"], request.params.get("top_k", -1)
        if body.get("return_sampling_mask") and not 1 <= top_k <= cap:
            return (
                "return_sampling_mask requires top_k=1 for greedy sampling or finite "
                f"1 < top_k <= {cap}; got top_k={top_k}."
            )
        return ""

    def _event(self, request: Request, sent: int, *, cut: bool) -> Body:
        start = sent if self._increments else 0
        tokens, logprobs = request.tokens[start:], request.logprobs[start:]
        meta: Body = {
            "id": request.rid,
            "finish_reason": request.finish,
            "completion_tokens": len(request.tokens),
            # As of sending, not of sampling.
            "weight_version": self._scheduler.label,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(logprobs, tokens, strict=True)
            ],
        }
        if cut:
            meta["output_token_sampling_logprobs"] = [
                0.0 if request.params["top_k"] == 1 else value for value in logprobs
            ]
        if request.finish is not None:
            meta["weight_versions"] = spans(request)
            meta["weight_version"] = request.closing_label
        return {"output_ids": tokens, "meta_info": meta}

    async def _abort(self, body: Body) -> Response:
        rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
        if rid or everything:
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            self._scheduler.abort(rid, everything=everything, reason=reason)
            await self._scheduler.notify()
        return Response(status_code=200)

    async def _pause(self, body: Body) -> Response:
        mode = body.get("mode", "abort")
        if mode == "abort":
            self._scheduler.paused = True
            await self._abort({"abort_all": True})
        else:
            self._scheduler.pause(mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _release(self, body: Body) -> Response:
        if not self._scheduler.flush():
            raise Died("release_memory_occupation should be called only when server is idle.")
        self._released |= set(body["tags"])
        return Response()

    async def _take_again(self, body: Body) -> Response:
        for tag in body["tags"]:
            if tag not in self._released:
                raise Died(f"KeyError: {tag!r}")
            self._released.remove(tag)
        return Response()

    async def _continue(self, body: Body) -> Response:
        if self._released:
            raise Died(f"CUDA error: an illegal memory access: {sorted(self._released)}")
        self._scheduler.resume()
        await self._scheduler.notify()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, body: Body) -> Response:
        done = self._scheduler.flush()
        text = "Cache flushed.\n" if done else "Flush cache failed.\n"
        return Response(text, status_code=200 if done else 400)

    # Weights

    async def _begin(self, body: Body) -> Response:
        return _answered(await self._updates.begin())

    async def _end(self, body: Body) -> Response:
        return _answered(await self._updates.end())

    async def _from_tensor(self, body: Body) -> Response:
        if "weights" in self._released:
            raise Died("CUDA error: an illegal memory access: weights")
        await self._abort({"abort_all": body.get("abort_all_requests", False)})
        payloads = [_named_tensors(each) for each in body["serialized_named_tensors"]]
        name, _ = payloads[0][0]
        answer = await self._updates.from_loader(body.get("load_format"), Path(name))
        return await self._loaded(answer, body)

    async def _from_disk(self, body: Body) -> Response:
        await self._abort({"abort_all": body.get("abort_all_requests", False)})
        return await self._loaded(await self._updates.from_disk(Path(body["model_path"])), body)

    async def _loaded(self, answer: tuple[bool, str], body: Body) -> Response:
        """Label, then flush: a refused flush fails the call although the weights are loaded."""
        done, message = answer
        if done:
            label = body.get("weight_version")
            if label is not None:
                self._scheduler.relabel(label)
                message += f" Weight version updated to {label}."
            if body.get("flush_cache", True) and not self._scheduler.flush():
                done, message = False, NOT_FLUSHED
        return _answered((done, message))

    async def _relabel(self, body: Body) -> Response:
        await self._abort({"abort_all": body.get("abort_all_requests", True)})
        self._scheduler.relabel(body["new_version"])
        return _answered((True, f"Weight version updated to {body['new_version']}"))

    # Routes of the fake only

    async def _fault(self, body: Body) -> Response:
        """Set a fault.

        `{"route", "status", "message", "times", "streamed"}`: the route answers so; `{"die_at": tokens}`;
        `{"stalled": bool}`; `{"partial": bool}`: the next load stops halfway; `{"holds": [[tokens, label], …]}`:
        after these tokens no step runs until the label is set; `{"says_mark": bool}`: tokens equal the mark.
        """
        scheduler = self._scheduler
        if "route" in body:
            self._faults[body["route"]] = Fault(
                status=body["status"],
                message=body["message"],
                times=body.get("times", 1),
                streamed=body.get("streamed", False),
            )
        scheduler.die_at = body.get("die_at", scheduler.die_at)
        scheduler.tokens_are_marks = body.get("says_mark", scheduler.tokens_are_marks)
        if "holds" in body:
            at = scheduler.tokens
            scheduler.holds = deque((at + more, label) for more, label in body["holds"])
        scheduler.stalled = body.get("stalled", scheduler.stalled)
        self._updates.partial = body.get("partial", self._updates.partial)
        if not scheduler.stalled and not scheduler.paused:
            scheduler.resume()
        return JSONResponse({})


class _Tensor:
    """Stands for `torch.Tensor()`."""


class _Unpickler(pickle.Unpickler):
    """Allows one name. The real one allows some two hundred, this among them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("torch", "Tensor"):
            raise pickle.UnpicklingError(f"Blocked unsafe global ({module}.{name})")
        return _Tensor


def _named_tensors(payload: str) -> list[tuple[str, _Tensor]]:
    pairs: list[tuple[str, _Tensor]] = _Unpickler(
        io.BytesIO(base64.b64decode(payload, validate=True))
    ).load()
    return pairs


def _got(
    handler: Callable[[], Awaitable[Response]],
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(request: HttpRequest) -> Response:
        return await handler()

    return handle


def _answered(answer: tuple[bool, str]) -> Response:
    done, message = answer
    return JSONResponse({"success": done, "message": message}, status_code=200 if done else 400)


def _failed(message: str, status: int) -> Response:
    return JSONResponse({"success": False, "message": message}, status_code=status)


def _refused(message: str, status: int = 400) -> Response:
    """A request that is wrong is refused inside its stream."""
    error = {"message": message, "type": "invalid_request_error", "code": status}
    lines = b"data: " + orjson.dumps({"error": error}) + b"\n\n", b"data: [DONE]\n\n"
    return Response(b"".join(lines), media_type="text/event-stream")
