"""Models of callers over gRPC: every verb, errors by their class, and a server that is killed in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.client import TrainingClient
from meshrl.client.sync import TrainingClient as SyncTrainingClient
from meshrl.contract import codec
from meshrl.contract.codec import pack_training
from meshrl.contract.errors import (
    ConflictError,
    InfraError,
    NotFoundError,
    UserError,
    WaitTimeoutError,
)
from meshrl.contract.types import (
    AdamStep,
    CreateModel,
    LoadWeights,
    Media,
    Pass,
    Refused,
    SaveWeights,
    TrainingExample,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
    UnloadModel,
)
from meshrl.rpc.runtime import GrpcServer
from meshrl.rpc.servicers import TrainingServicer
from meshrl.trainer.hosted.host import HostedTraining
from meshrl.v1 import training_pb2
from tests.doubles.hosted import StandInBench

from .test_servicers import serving

CREATE = CreateModel(base_model="m", lora_rank=4, lora_seed=3, lora_mlp=False)
STEP = AdamStep(learning_rate=0.1)


def learn(number: float = 0, **more: float) -> Pass:
    inputs: dict[str, Any] = {
        "target_tokens": np.array([[1, 2], [3, 4]]),
        "weights": np.array([[0.5, np.inf], [np.nan, -1]], np.float32),
    }
    example = TrainingExample(
        tokens=np.array([7, 9], np.int32), loss_inputs=inputs, media=(Media.of(b"one"),)
    )
    return Pass(examples=[example], loss="ppo", loss_settings={"number": float(number), **more})


@asynccontextmanager
async def hosted(folder: Path, port: int = 0) -> AsyncIterator[tuple[GrpcServer, str]]:
    training = HostedTraining(folder, StandInBench())
    await training.open()
    try:
        async with serving(TrainingServicer(training), port) as server:
            yield server, f"127.0.0.1:{server.port}"
    finally:
        await training.close()


@pytest.mark.parametrize(
    "verb",
    [
        CREATE,
        CreateModel(base_model="m", load_from="tinker://m/weights/a", with_optimizer=True),
        learn(1),
        Pass(examples=[], loss="gspo", backward=False),
        AdamStep(learning_rate=0.1, beta1=0.0, beta2=0.5, eps=0.0, weight_decay=1.0),
        SaveWeights(name="a", for_sampler=True),
        LoadWeights(path="p", with_optimizer=True),
        UnloadModel(),
        Refused(error="no"),
    ],
)
def test_every_verb_travels_as_it_is(verb: TrainingVerb) -> None:
    request = TrainingRequest(model="m", number=3, verb=verb)
    message = codec.TRAINING_REQUEST.encode(request).SerializeToString()
    back = codec.TRAINING_REQUEST.decode(training_pb2.TrainingRequest.FromString(message))
    assert pack_training(back) == pack_training(request)


def test_what_another_language_leaves_out_has_its_default() -> None:
    sent = training_pb2.TrainingRequest(model="m", create_model={"base_model": "b"})
    assert codec.TRAINING_REQUEST.decode(sent).verb == CreateModel(base_model="b")
    sent = training_pb2.TrainingRequest(model="m", adam_step={"learning_rate": 0.5})
    assert codec.TRAINING_REQUEST.decode(sent).verb == AdamStep(learning_rate=0.5)
    with pytest.raises(UserError, match="it has no verb"):
        codec.TRAINING_REQUEST.decode(training_pb2.TrainingRequest(model="m"))


def test_an_answer_travels_as_it_is() -> None:
    outputs = [{"logprobs": np.array([[1, np.nan]], np.float32)}, {}]
    for answer in (
        TrainingResult(outputs=outputs, metrics={"loss:sum": 0.1}, path="p"),
        TrainingResult(error="no", user_error=False),
    ):
        message = codec.TRAINING_RESULT.encode(answer)
        assert pack_training(codec.TRAINING_RESULT.decode(message)) == pack_training(answer)


async def test_a_loop_from_outside(tmp_path: Path) -> None:
    async with hosted(tmp_path) as (_, address), TrainingClient.connect(address) as training:
        model = await training.create(CREATE, name="mine")
        passed = [await model.submit(learn(number)) for number in range(3)]
        stepped = await model.ask(STEP)
        assert stepped.metrics["value"] > 0
        logprobs = [(await model.result(number)).outputs[0]["logprobs"] for number in passed]
        assert [values[1] for values in logprobs] == [1, 2, 3]
        assert (await model.ask(SaveWeights(name="a"))).path == "tinker://mine/weights/a"
        with pytest.raises(UserError, match="wrong it is"):
            await model.submit(learn(wrong=1))
        with pytest.raises(UserError, match="cannot be sent"):
            await model.submit(SaveWeights(name="\ud83d"))
        with pytest.raises(UserError, match="there is no checkpoint"):
            await model.ask(LoadWeights(path="tinker://mine/weights/b"))
        with pytest.raises(InfraError, match="ZeroDivisionError"):
            await model.ask(learn(fails=1))
        other = training.model("mine", next_number=1)
        with pytest.raises(ConflictError):
            await other.submit(STEP)
        with pytest.raises(NotFoundError):
            await other.result(100)
        await training.port.submit(TrainingRequest(model="mine", number=99, verb=STEP))
        with pytest.raises(WaitTimeoutError, match="request 99 of model mine is not done"):
            await model.result(99, wait_s=0.1)
        with pytest.raises(UserError, match="rank 13"):
            await training.create(CreateModel(base_model="m", lora_rank=13))
        await model.ask(UnloadModel())
    with pytest.raises(UserError, match="not connected"):
        await training.create(CREATE)


async def test_a_loop_goes_on_when_its_server_is_another_one(tmp_path: Path) -> None:
    async with (
        hosted(tmp_path / "whole") as (_, address),
        TrainingClient.connect(address) as training,
    ):
        model = await training.create(CREATE)
        wanted = [await model.ask(verb) for verb in (learn(1), STEP, learn(2), STEP)]
    async with hosted(tmp_path / "cut") as (server, address):
        training = TrainingClient.connect(address)
        await training.__aenter__()
        model = await training.create(CREATE)
        answers = [await model.ask(verb) for verb in (learn(1), STEP)]
        number = await model.submit(learn(2))
    waiting = asyncio.create_task(model.result(number))
    asking = asyncio.create_task(model.ask(STEP))
    await asyncio.sleep(0.1)
    async with hosted(tmp_path / "cut", server.port):
        answers += [await waiting, await asking]
        await training.close()
    assert list(map(pack_training, answers)) == list(map(pack_training, wanted))


async def test_without_await(tmp_path: Path) -> None:
    def loop(address: str) -> float:
        with SyncTrainingClient.connect(address) as training:
            model = training.create(CREATE)
            number = model.submit(learn(1))
            model.ask(STEP)
            assert model.next_number == 3 and model.name
            return float(model.result(number).outputs[0]["logprobs"][1])

    async with hosted(tmp_path) as (_, address):
        assert await asyncio.to_thread(loop, address) == 1
