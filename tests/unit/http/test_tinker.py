"""The Tinker API without its SDK: who may call, what is refused and how, that refused requests use their number."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from fastapi import FastAPI

from meshrl.contract.errors import (
    EngineGoneError,
    InfraError,
    MeshError,
    UnavailableError,
    UserError,
)
from meshrl.contract.types import (
    GenerateDelta,
    GenerateRequest,
    Pass,
    PromptLogprobs,
    Refused,
    Version,
)
from meshrl.http.tinker import sampling, wire
from meshrl.http.tinker.app import PREFIX, TinkerModel, build_app
from meshrl.http.tinker.checkpoints import MOST_UNNAMED, HostedCheckpoints
from meshrl.http.tinker.notices import SampleNotices
from meshrl.http.tinker.sampling import Samplers
from meshrl.rollout.streams import TokenStream
from meshrl.rpc import credentials
from meshrl.rpc.credentials import MeshRole
from meshrl.rpc.identity import Identity
from meshrl.testing.engines.echo import Config, EchoEngine
from meshrl.trainer.hosted.host import HostedTraining
from meshrl.v1 import tinker_pb2 as pb
from tests.doubles.hosted import StandInBench

OPEN = {("GET", "/api/v1/healthz")}
TOKENS = [5, 6, 7, 8]
MODEL = "s:train:0"


NONE: Any = np.zeros(0)
TOLD = [
    PromptLogprobs(
        logprobs=np.array([np.nan, -1, -2, -3], np.float32),
        top_ids=np.ones((4, 2), np.int32),
        top_logprobs=np.array([[np.nan] * 2] + [[-1, -1]] * 3, np.float32),
    )
]
"""Log-probs of prompts by the engines; empty: they send none."""


class FailingEngine(EchoEngine):
    """Requests end with these errors, the later ones well."""

    def __init__(self, faults: list[MeshError], asked: list[tuple[int, str]]) -> None:
        super().__init__(Config(), slots=8)
        self._faults, self._asked = faults, asked

    def generate(self, request: GenerateRequest) -> Any:
        self._asked.append((request.sampling.seed, request.request_id))
        if not self._faults:
            told = super().generate(request)
            if request.prompt_top and TOLD:
                told.push(
                    GenerateDelta(tokens=NONE, logprobs=NONE, version=self.version, prompt=TOLD[0])
                )
            return told
        stream = TokenStream()
        stream.push(self._faults.pop(0))
        return stream


class OffTheLoop(HostedCheckpoints):
    """Whatever looks at files is called in threads."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def called(*args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread(), name
            return found(*args)

        return called


class Served:
    """The app, its parts and a caller."""

    def __init__(self, folder: Path) -> None:
        credentials.open_run_directory(folder)
        self.folder = folder
        self.training = HostedTraining(folder / "tinker", StandInBench())
        checkpoints = OffTheLoop(folder / "tinker", folder, "base")
        self.started: list[Path] = []
        self.faults: list[MeshError] = []
        """Whatever the next requests of engines end with."""
        self.asked: list[tuple[int, str]] = []
        """Seed and name of each request of engines."""
        notices = SampleNotices(folder / "samples.log")
        self.samplers = Samplers(checkpoints.sampler, self._start, notices)
        self.app: FastAPI = build_app(
            self.training,
            self.samplers,
            checkpoints,
            TinkerModel(name="base", tokenizer=folder, longest=32, vocabulary=100),
            Identity(credentials.verifiers_file(folder)),
        )

    async def _start(self, folder: Path) -> Any:
        self.started.append(folder)
        engine = FailingEngine(self.faults, self.asked)
        await engine.start()
        engine.version = Version(0, 1)
        return engine

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        headers = {"x-api-key": PREFIX + self.token(MeshRole.TUNER), **more.pop("headers", {})}
        kind = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(f"/api/v1/{path}", headers=headers, **kind, **more)

    async def get(self, path: str) -> Any:
        headers = {"x-api-key": PREFIX + self.token(MeshRole.TUNER)}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get(f"/api/v1/{path}", headers=headers)).json()

    def token(self, role: MeshRole) -> str:
        return credentials.file_of_role(self.folder, role).read_text().strip()

    async def made(self) -> None:
        body = {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "base",
            "lora_config": {"rank": 4},
        }
        accepted = await self.post("create_model", body)
        assert accepted.json() == {"request_id": f"train/{MODEL}/0", "model_id": MODEL}
        assert (await self.answer(0)).json()["model_id"] == MODEL

    async def answer(self, number: int) -> httpx.Response:
        return await self.post("retrieve_future", {"request_id": f"train/{MODEL}/{number}"})

    async def step(self, number: int, rate: float | None = 0.1) -> httpx.Response:
        adam = {"learning_rate": rate}
        body = {"model_id": MODEL, "seq_id": number, "adam_params": adam}
        return await self.post("optim_step", body)

    async def saved(self, number: int, path: str | None = None) -> Any:
        body = {"model_id": MODEL, "seq_id": number, "path": path}
        assert (await self.post("save_weights_for_sampler", body)).status_code == 200
        return (await self.answer(number)).json()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    found = Served(tmp_path)
    await found.training.open()
    yield found
    await found.samplers.close()
    await found.training.close()


def forward_backward(number: int, loss: str = "ppo", **more: Any) -> bytes:
    message = pb.TinkerForwardBackwardRequest(model_id=MODEL, seq_id=number, loss_fn=loss, **more)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(TOKENS, "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array(TOKENS, "<i8").tobytes(), pb.TINKER_TYPE_INT64
    targets.shape.append(len(TOKENS))
    return message.SerializeToString()


def routes(app: FastAPI) -> Iterable[tuple[str, str]]:
    return [(m.upper(), path) for path, item in app.openapi()["paths"].items() for m in item]


async def test_each_route_asks_who_calls_before_it_reads_a_body(served: Served) -> None:
    transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for method, path in routes(served.app):
            place = path.format(model="m", kind="weights", name="a", session="s", sampler="=.s")
            if (method, path) in OPEN:
                assert (await http.request(method, place)).status_code == 200
                continue
            for key in ("", "tml-guess", served.token(MeshRole.TUNER)[:-1]):
                answer = await http.request(method, place, headers={"x-api-key": key}, content=b"{")
                assert answer.status_code == 401, (path, key)
            for role in MeshRole:
                headers = {"x-api-key": PREFIX + served.token(role)}
                answer = await http.request(method, place, headers=headers, content=b"{")
                refused = role not in (MeshRole.TUNER, MeshRole.OPERATOR)
                assert (answer.status_code == 403) == refused, (path, role, answer.text)


async def test_a_pass_a_step_and_a_sampler_of_the_weights_that_were_saved(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.made()
    body = zstandard.compress(forward_backward(1))
    headers = {"content-encoding": "zstd", "content-type": "application/x-protobuf"}
    accepted = await served.post("forward_backward", body, headers=headers)
    assert accepted.json()["request_id"] == f"train/{MODEL}/1"
    output = pb.TinkerForwardBackwardOutput.FromString((await served.answer(1)).content)
    assert len(output.loss_fn_outputs) == 1
    assert (await served.step(2)).status_code == 200
    assert (await served.answer(2)).json()["metrics"]["value"] > 0
    saved = await served.saved(3, "best")
    assert saved["path"] == f"tinker://{MODEL}/sampler_weights/best"

    session = {"session_id": "s", "sampling_session_seq_id": 0, "model_path": saved["path"]}
    sampler = (await served.post("create_sampling_session", session)).json()["sampling_session_id"]
    wish = {
        "prompt": {"chunks": [{"tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 4},
        "num_samples": 3,
        "sampling_session_id": sampler,
        "seq_id": 1,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    asked = (await served.post("asample", wish)).json()
    again = (await served.post("asample", wish)).json()
    assert asked == again
    found = await served.post("retrieve_future", {"request_id": asked["request_id"]})
    response = pb.TinkerSampleResponse.FromString(found.content)
    assert len(response.sequences) == 3
    first, *rest = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(first) and rest == [-1, -2, -3]
    top = response.topk_prompt_logprobs
    assert (top.length, top.k) == (4, 2)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [0, 0] + [1] * 6
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-99999] * 2 + [-1] * 6
    assert [folder.name for folder in served.started] == ["best"]
    monkeypatch.setattr(f"{__name__}.TOLD", [])
    asked = (await served.post("asample", wish | {"seq_id": 2})).json()
    found = await served.post("retrieve_future", {"request_id": asked["request_id"]})
    error = "prompt_logprobs: the engine returned none for this prompt"
    assert found.json() == {"error": error, "category": "user"}


async def test_a_wrong_pass_uses_its_number_up_and_later_ones_need_not_wait(
    served: Served,
) -> None:
    await served.made()
    body = forward_backward(1, loss_fn_config={"wrong": 1.0})
    for _ in range(2):  # the same request again is the same one
        accepted = await served.post("forward_backward", body)
        assert accepted.status_code == 200, accepted.text
    answer = (await served.answer(1)).json()
    assert "wrong it is" in answer["error"] and answer["category"] == "user"
    assert (await served.step(2)).status_code == 200
    assert (await served.answer(2)).json()["error"] == "no gradients wait, or bad ones"


async def test_a_step_without_a_rate_uses_its_number_up(served: Served) -> None:
    await served.made()
    assert (await served.step(1, None)).status_code == 200  # the SDK sends NaN as null
    assert "adam_params.learning_rate" in (await served.answer(1)).json()["error"]
    assert (await served.step(2)).status_code == 200
    assert (await served.answer(2)).json()["error"] == "no gradients wait, or bad ones"


async def test_what_is_not_there_or_not_of_this_model_is_said_in_one_line(served: Served) -> None:
    await served.made()
    assert (await served.step(1)).status_code == 200
    other = await served.post("forward_backward", forward_backward(1))
    assert other.status_code == 422 and "another request 1" in other.json()["detail"]
    gone = await served.post("retrieve_future", {"request_id": "sample/x/1"})
    assert gone.status_code == 410  # the SDK asks for the sample again
    assert (await served.answer(9)).status_code == 410
    absent = await served.post("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {}})
    assert absent.status_code == 404
    wrong = {
        "session_id": "s",
        "model_seq_id": 1,
        "base_model": "base",
        "lora_config": {"rank": 13},
    }
    assert (await served.post("create_model", wrong)).status_code == 200
    request = {"request_id": "train/s:train:1/0"}
    failed = (await served.post("retrieve_future", request)).json()
    assert failed["error"] == "rank 13 brings bad luck"
    session = {"session_id": "s", "sampling_session_seq_id": 0}
    for path in ("tinker://x/sampler_weights/a", "tinker://../sampler_weights/a", "/etc"):
        answer = await served.post("create_sampling_session", {**session, "model_path": path})
        assert answer.status_code in (404, 422), (path, answer.text)
    answer = await served.post("create_sampling_session", {**session, "base_model": "gpt"})
    assert answer.status_code == 422 and "want base" in answer.json()["detail"]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"tokens": [100]}]}},
        {"prompt": {"chunks": [{"tokens": [-1]}]}},
        {"prompt": {"chunks": [{"tokens": [1] * 32}]}},
        {"prompt": {"chunks": [{"type": "image", "data": "x"}]}},
        {"num_samples": 100_000},
        {"topk_prompt_logprobs": 1000},
        {"topk_sample_logprobs": 5},
        {"sampling_params": {"stop": []}},
        {"prompt": {"chunks": [{"tokens": [2**40]}]}},
        {"prompt": {"chunks": [{"tokens": [2**70]}]}},
        {"sampling_params": {"temperature": -1.0}},
        {"sampling_params": {"temperature": "1e999"}},
        {"sampling_params": {"top_p": 5.0}},
        {"sampling_params": {"top_k": -5}},
        {"sampling_params": {"seed": 2**70}},
        {"sampling_params": {"stop": [2**70]}},
    ],
)
async def test_samples_that_cannot_be_given_are_refused(
    served: Served, more: dict[str, Any]
) -> None:
    wish = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}, **more}
    answer = await served.post("asample", wish)
    assert answer.status_code == 422, answer.text


async def test_samples_and_answers_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MOST_RUNNING", 4)
    monkeypatch.setattr(sampling, "ANSWERS_BYTES", 100)
    wish = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 4}}
    found = [
        (await served.post("asample", {**wish, "num_samples": samples})).status_code
        for samples in (3, 100, 1)
    ]
    assert found == [200, 200, 503]
    asked = []
    while len(asked) < 5:
        await asyncio.sleep(0.01)
        answer = await served.post("asample", wish)
        if answer.status_code == 200:
            asked.append(answer.json()["request_id"])
            await served.post("retrieve_future", {"request_id": asked[-1]})
    kept = [
        (await served.post("retrieve_future", {"request_id": each})).status_code for each in asked
    ]
    assert kept == [410, 410, 200, 200, 200]


async def sampled(served: Served, path: str = "", seed: int | None = None) -> httpx.Response:
    wish = {
        "prompt": {"chunks": [{"tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 4, "seed": seed},
        "model_path": path,
    }
    asked = await served.post("asample", wish)
    return await served.post("retrieve_future", {"request_id": asked.json()["request_id"]})


async def test_equal_seeds_give_equal_draws(served: Served) -> None:
    for seed in (3, 3, 0, None, None):
        await sampled(served, seed=seed)
    first, again, *others = served.asked
    assert first == again and len({first, *others}) == 4


async def test_a_sample_is_drawn_again_where_a_server_fails_for_a_while(served: Served) -> None:
    served.faults += [InfraError("the server has ended"), UnavailableError("it starts")]
    assert pb.TinkerSampleResponse.FromString((await sampled(served)).content).sequences
    assert len(served.started) == 1


async def test_an_engine_that_has_gone_fails_its_request_for_good_and_the_next_gets_another(
    served: Served,
) -> None:
    served.faults.append(EngineGoneError("it failed four times"))
    failed = await sampled(served)  # the SDK asks again for ever after a 503
    assert (failed.status_code, failed.json()["category"]) == (200, "server"), failed.text
    assert pb.TinkerSampleResponse.FromString((await sampled(served)).content).sequences
    assert len(served.started) == 2


async def test_weights_that_took_the_place_of_others_are_the_ones_that_answer(
    served: Served,
) -> None:
    await served.made()
    path = (await served.saved(1, "a"))["path"]
    await sampled(served, path)
    body = {"model_id": MODEL, "seq_id": 2, "path": "a", "overwrite": True}
    assert (await served.post("save_weights_for_sampler", body)).status_code == 200
    assert (await served.answer(2)).json()["path"] == path
    await sampled(served, path)
    await sampled(served, path)
    assert [each.name for each in served.started] == ["a", "a"]


async def test_weights_without_a_name_make_room_for_newer_ones(served: Served) -> None:
    await served.made()
    sessions = []
    for number in range(1, MOST_UNNAMED + 3):
        saved = await served.saved(number)
        assert saved.get("path") is None
        sessions.append(saved["sampling_session_id"])
    wish = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}, "seq_id": 0}
    found = [
        (await served.post("asample", {**wish, "sampling_session_id": each})).status_code
        for each in sessions
    ]
    assert found == [404, 404] + [200] * MOST_UNNAMED
    assert (await served.get("checkpoints"))["checkpoints"] == []


async def test_models_are_listed_by_session_the_newest_first(served: Served) -> None:
    await served.made()
    saved = await served.saved(1, "a")
    body = {"session_id": "t", "model_seq_id": 0, "base_model": "base"}
    await served.post("create_model", body)
    runs = await served.get("training_runs")
    assert [each["training_run_id"] for each in runs["training_runs"]] == ["t:train:0", MODEL]
    assert runs["cursor"] == {"offset": 0, "limit": 20, "total_count": 2}
    run = await served.get(f"training_runs/{MODEL}")
    assert (run["lora_rank"], run["last_checkpoint"]) == (4, None)
    assert run["last_sampler_checkpoint"]["tinker_path"] == saved["path"]
    assert (await served.get("training_runs/x:train:0"))["detail"] == "there is no model x:train:0"
    assert (await served.get("sessions?limit=1"))["sessions"] == ["t"]
    assert (await served.get("sessions/s"))["training_run_ids"] == [MODEL]
    assert (await served.get("sessions/x"))["training_run_ids"] == []


async def test_a_model_that_was_refused_is_not_listed(served: Served) -> None:
    await served.made()
    for sequence, lora, fault in (
        (0, {"rank": 5}, "another request 0"),
        (1, {"rank": 2**70}, "cannot be sent"),
    ):
        body = {"session_id": "s", "model_seq_id": sequence, "base_model": "base"}
        refused = await served.post("create_model", body | {"lora_config": lora})
        assert refused.status_code == 422 and fault in refused.json()["detail"], refused.text
    (run,) = (await served.get("training_runs"))["training_runs"]
    assert (run["training_run_id"], run["lora_rank"]) == (MODEL, 4)


async def test_checkpoints_are_listed_copied_and_removed_by_their_paths(served: Served) -> None:
    await served.made()
    saved = await served.saved(1, "a")
    copy = {"source_path": saved["path"], "session_id": "t", "model_seq_id": 3}
    copied = (await served.post("copy_weights", copy)).json()["tinker_path"]
    assert copied == "tinker://t:train:3/sampler_weights/a"
    assert (await served.post("copy_weights", copy)).json()["tinker_path"] == copied
    body = {"model_id": MODEL, "seq_id": 2, "path": "a", "overwrite": True}
    await served.post("save_weights_for_sampler", body)
    await served.answer(2)
    assert (await served.post("copy_weights", copy)).status_code == 422
    request = {"source_path": saved["path"], "destination_project_id": "p"}  # as the SDK asks
    once = {"headers": {"x-idempotency-key": "k"}}
    paths = [(await served.post("copy_weights", request, **once)).json() for _ in range(2)]
    assert paths == [{"tinker_path": "tinker://copy-k:train:0/sampler_weights/a"}] * 2
    listed = (await served.get("checkpoints?limit=1&offset=2"))["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [copied]
    assert (await served.post("weights_info", {"tinker_path": copied})).json()["lora_rank"] == 4
    transport = httpx.ASGITransport(served.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        headers = {"x-api-key": PREFIX + served.token(MeshRole.TUNER)}
        place = "/api/v1/training_runs/t:train:3/checkpoints/sampler_weights/a"
        assert (await http.delete(place, headers=headers)).status_code == 200
        assert (await http.delete(place, headers=headers)).status_code == 404


async def test_what_a_kill_leaves_of_a_removal_or_a_copy_is_no_checkpoint(served: Served) -> None:
    await served.made()
    await served.saved(1, "a")
    kept = served.folder / "tinker/checkpoints" / MODEL / "sampler_weights"
    for left in (".removing-a", ".writing-b"):
        shutil.copytree(kept / "a", kept / left)
    listed = (await served.get("checkpoints"))["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["sampler_weights/a"]
    again = HostedCheckpoints(served.folder / "tinker", served.folder, "base")
    again.remove(f"tinker://{MODEL}/sampler_weights/a")
    assert [each.name for each in kept.iterdir()] == [".writing-b"]


def test_a_body_that_grows_is_cut_off_before_it_takes_memory() -> None:
    bomb = zstandard.compress(bytes(wire.MOST_BYTES + 1))
    assert len(bomb) < 10_000
    with pytest.raises(Exception, match="more than"):
        wire.decompressed(bomb, "zstd")
    for encoding, body in (("zstd", b"no"), ("gzip", b"")):
        with pytest.raises(UserError):
            wire.decompressed(body, encoding)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda t: t.shape.__setitem__(0, 1 << 40), "want at most"),
        (lambda t: t.shape.__setitem__(0, -1), "want at most"),
        (lambda t: t.shape.append(3), "its shape is"),
        (lambda t: setattr(t, "dense", b"abc"), "not an array of"),
        (lambda t: setattr(t, "dtype", 0), "want float32 or int64"),
        (lambda t: t.sparse_csr.SetInParent(), "sparse rows do not fit"),
    ],
)
def test_tensors_are_compared_with_their_shapes_before_they_are_made(
    change: Any, fault: str
) -> None:
    message = pb.TinkerForwardBackwardRequest.FromString(forward_backward(1))
    change(message.data[0].loss_fn_inputs["target_tokens"])
    verb = wire.read_forward_backward(message.SerializeToString()).verb
    assert isinstance(verb, Refused) and fault in verb.error


def test_sparse_rows_become_whole_ones() -> None:
    message = pb.TinkerForwardBackwardRequest.FromString(forward_backward(1))
    weights = message.data[0].loss_fn_inputs["weights"]
    weights.dtype = pb.TINKER_TYPE_FLOAT32
    weights.shape.extend([3, 4])
    weights.sparse_csr.values = np.array([1, 2, 3], "<f4").tobytes()
    weights.sparse_csr.crow_indices = np.array([0, 2, 2, 3], "<i8").tobytes()
    weights.sparse_csr.col_indices = np.array([0, 3, 1], "<i8").tobytes()
    verb = wire.read_forward_backward(message.SerializeToString()).verb
    assert isinstance(verb, Pass)
    found = verb.examples[0].loss_inputs["weights"]
    assert found.tolist() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0]]


@pytest.mark.parametrize("loss", ["importance_sampling", "stable_reinforce"])
def test_spans_are_for_the_loss_that_reads_them(loss: str) -> None:
    message = pb.TinkerForwardBackwardRequest.FromString(forward_backward(1, loss))
    spans = message.data[0].loss_fn_input_spans
    spans.add().prompt_tokens.length = 1
    spans.add().sampled_tokens.length = 3
    verb = wire.read_forward_backward(message.SerializeToString()).verb
    assert isinstance(verb, Pass), verb
    mask = verb.examples[0].loss_inputs.get("mask")
    assert (mask is None) if loss != "stable_reinforce" else mask.tolist() == [0, 1, 1, 1]
