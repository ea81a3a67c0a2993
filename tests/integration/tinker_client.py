"""Loops of the Tinker SDK for tests, in a process of its own: its threads end with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import tinker
from PIL import Image
from tinker import types

PROMPT = [5, 6, 7, 8, 9]
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)
ADAM = types.AdamParams(learning_rate=1e-2)
LOSS = "importance_sampling"


def datum(sequence: Any) -> types.Datum:
    """A row as the losses want it."""
    tokens, skipped = PROMPT + list(sequence.tokens), [0.0] * (len(PROMPT) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": skipped + list(sequence.logprobs),
        "advantages": skipped + [1.0] * len(sequence.tokens),
    }
    read = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=read, loss_fn_inputs=inputs)


def drawn(sampler: Any, params: Any, samples: int = 1) -> Any:
    """Samples after the prompt."""
    return sampler.sample(types.ModelInput.from_ints(PROMPT), samples, params).result().sequences


def made(server: Any, model: str) -> Any:
    """A model that is the same each time."""
    return server.create_lora_training_client(base_model=model, rank=4, seed=1).result()


def logprobs(client: Any, row: types.Datum, loss: Any = LOSS) -> list[float]:
    """Log-probs of a row's tokens, as the learner computes them."""
    (output,) = client.forward([row], loss).result().loss_fn_outputs
    return [float(value) for value in output["logprobs"].data]


def fails(asked: Any, fault: str) -> None:
    """Wait for an error of the SDK's."""
    try:
        asked.result()
    except tinker.TinkerError as error:
        assert fault in str(error), error
    else:
        raise AssertionError(fault)


def loop(model: str) -> None:
    """Train a step; each sampler answers with the weights that were saved for it."""
    server = tinker.ServiceClient()
    client = made(server, model)
    before = client.save_weights_and_get_sampling_client().result()
    sequences = drawn(before, types.SamplingParams(max_tokens=16, seed=3), 4)
    assert len({tuple(each.tokens) for each in sequences}) == 4
    rows = [datum(each) for each in sequences]
    passed = client.forward_backward(rows, LOSS).result()
    for sequence, output in zip(sequences, passed.loss_fn_outputs, strict=True):
        learner = output["logprobs"].to_numpy()[len(PROMPT) - 1 :]
        np.testing.assert_allclose(learner, sequence.logprobs, atol=1e-4)
    greedy = drawn(before, GREEDY)[0]
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0

    after = client.save_weights_and_get_sampling_client().result()
    other, same = drawn(after, GREEDY)[0], drawn(before, GREEDY)[0]
    assert list(same.logprobs) == list(greedy.logprobs) != list(other.logprobs)
    whole = types.ModelInput.from_ints(PROMPT + list(greedy.tokens))
    scores = before.compute_logprobs(whole).result()
    np.testing.assert_allclose(scores[len(PROMPT) :], greedy.logprobs, atol=1e-4)

    assert after.get_base_model() == model
    rest = tinker.RestClient()
    saved = client.save_state("one").result().path
    copied = rest.copy_weights(saved, "any project").result()
    copy = server.create_training_client_from_state(copied).result()
    fails(client.forward_backward(rows, "no_such_loss"), "no_such_loss")
    assert logprobs(client, rows[0]) == logprobs(copy, rows[0])
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [each.tinker_path for each in listed] == [saved]
    runs = rest.list_training_runs().result().training_runs
    assert [each.training_run_id for each in runs] == [copy.model_id, client.model_id]
    assert rest.get_training_run(client.model_id).result().last_checkpoint == listed[0]
    (session,) = rest.list_sessions().result().sessions
    assert len(rest.get_session(session).result().training_run_ids) == 2
    refused(server, client, before)
    server.close("success").result()


def refused(server: Any, client: Any, sampler: Any) -> None:
    """Pictures get an error of the SDK's here; a traced loss is computed by the SDK."""
    wrong = types.AdamParams(learning_rate=float("nan"))
    fails(client.optim_step(wrong), "learning_rate")
    fault = "picture 1: the base model reads no pictures; want tokens"
    fails(sampler.sample(on(b"x"), 1, GREEDY), fault)
    fails(client.forward([seen(b"x")], "cross_entropy"), fault)

    def surprise(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/surprise:sum": loss}

    plain = seen()
    ranks: Any = {"logprobs": 1, "weights": 1}
    traced = server.create_custom_loss(surprise, ranks).result()
    told = client.forward_backward_custom([plain], traced).result().metrics
    wanted = client.forward([plain], "cross_entropy").result().metrics["loss:sum"]
    assert any(abs(value - wanted) < 1e-4 for value in told.values()), (told, wanted)


def killed(model: str) -> None:
    """Two models, one step each before the server is killed and one after it: the second model's is on its way."""
    server = tinker.ServiceClient()
    sampler = server.create_sampling_client(base_model=model).result()
    row = datum(drawn(sampler, GREEDY)[0])
    whole, cut = made(server, model), made(server, model)
    for client, steps in ((whole, 2), (cut, 1)):
        for _ in range(steps):
            client.forward_backward([row], LOSS).result()
            client.optim_step(ADAM).result()
    cut.forward_backward([row], LOSS).result()
    longer = types.SamplingParams(max_tokens=100)
    read = types.ModelInput.from_ints(PROMPT)
    waiting = [sampler.sample(read, 4, longer) for _ in range(40)]
    waiting[0].result()  # the others are asked for, and few are there
    print("kill it", flush=True)
    sys.stdin.readline()
    stepping = cut.optim_step(ADAM)
    print("start it", flush=True)
    stepping.result()
    assert logprobs(cut, row) == logprobs(whole, row)
    assert all(len(sample.result().sequences) == 4 for sample in waiting)


def server(model: str) -> None:
    """Samplers of two steps, before and after the server of both is killed."""
    client = made(tinker.ServiceClient(), model)
    samplers, greedy = [], []
    for _ in range(2):
        samplers.append(client.save_weights_and_get_sampling_client().result())
        greedy.append(drawn(samplers[-1], GREEDY)[0])
        client.forward_backward([datum(greedy[-1])], LOSS).result()
        client.optim_step(ADAM).result()
    assert greedy[0].logprobs != greedy[1].logprobs
    print("kill the server", flush=True)
    sys.stdin.readline()
    for sampler, before in zip(samplers, greedy, strict=True):
        again = drawn(sampler, GREEDY)[0]
        assert again.tokens == before.tokens
        np.testing.assert_allclose(again.logprobs, before.logprobs, atol=1e-5)


def file(seed: int, kind: str = "PNG", side: int = 64) -> bytes:
    """A picture, which has four tokens."""
    data, grey = BytesIO(), Image.linear_gradient("L").rotate(seed * 70)
    grey.resize((side, side)).save(data, kind)
    return data.getvalue()


def on(*files: bytes, answer: Sequence[int] = (), tokens: int = 4) -> types.ModelInput:
    """Pictures in a prompt, and tokens behind it."""
    chunks: list[Any] = []
    for data in files:
        picture = types.ImageChunk(data=data, format="png", expected_tokens=tokens)
        chunks += [types.EncodedTextChunk(tokens=[3, 9]), picture]
    return types.ModelInput(chunks=[*chunks, types.EncodedTextChunk(tokens=[12, *answer])])


def seen(*files: bytes, answer: Sequence[int] = (13, 14), tokens: int = 4) -> types.Datum:
    """A row whose answer is learned."""
    read = on(*files, answer=answer[:-1], tokens=tokens)
    skipped = [0] * (read.length - len(answer))
    inputs: Any = {
        "target_tokens": skipped + list(answer),
        "weights": [0.0] * len(skipped) + [1.0] * len(answer),
    }
    return types.Datum(model_input=read, loss_fn_inputs=inputs)


def pictures(model: str) -> None:
    """Two models, a step each on pictures; the server is killed while one computes its gradients."""
    server = tinker.ServiceClient()
    whole, cut = made(server, model), made(server, model)
    rows = [seen(file(1)), seen(file(2)), seen(file(1), file(2)), seen()]
    first, other = (logprobs(whole, row, "cross_entropy") for row in rows[:2])
    assert abs(first[-1] - other[-1]) > 1e-4
    whole.forward_backward(rows, "cross_entropy").result()
    stepped = whole.optim_step(ADAM).result().metrics
    assert stepped["grad_norm"] > 0
    waiting = cut.forward_backward(rows, "cross_entropy")
    print("kill it", flush=True)
    sys.stdin.readline()
    print("start it", flush=True)
    waiting.result()
    assert cut.optim_step(ADAM).result().metrics == stepped
    after = [logprobs(client, rows[2], "cross_entropy") for client in (cut, whole)]
    assert after[0] == after[1]
    sampler = server.create_sampling_client(base_model=model).result()
    for data, tokens, fault in (
        (file(5)[:200], 4, "no picture that can be read"),
        (file(5) + bytes(33 << 20), 4, "at most 16777216"),
        (file(5, side=8192), 4, "8192 x 8192 pixels, at most"),
        (file(5, "GIF"), 4, "its file is image/gif; want png or jpeg"),
        (file(5), 5, "expected_tokens is 5, and the model reads it as 4"),
    ):
        fails(sampler.sample(on(data, tokens=tokens), 1, GREEDY), fault)
        fails(whole.forward([seen(data, tokens=tokens)], "cross_entropy"), fault)


def shown(model: str) -> None:
    """Samples on pictures, by a server, before and after a step."""
    client, params = made(tinker.ServiceClient(), model), types.SamplingParams(max_tokens=6)
    for _ in range(2):
        sampler = client.save_weights_and_get_sampling_client().result()
        for files in ([file(1)], [file(2)], [file(1), file(2)]):
            (sequence,) = sampler.sample(on(*files), 1, params).result().sequences
            row, count = seen(*files, answer=sequence.tokens), len(sequence.tokens)
            learner = logprobs(client, row, "cross_entropy")[-count:]
            scores = sampler.compute_logprobs(on(*files, answer=sequence.tokens)).result()
            for sampled in (sequence.logprobs, scores[-count:]):
                np.testing.assert_allclose(learner, sampled, atol=1e-4)
        client.forward_backward([row], "cross_entropy").result()
        client.optim_step(ADAM).result()


if __name__ == "__main__":
    does: dict[str, Callable[[str], None]] = {
        "loop": loop,
        "killed": killed,
        "server": server,
        "pictures": pictures,
        "shown": shown,
    }
    does[sys.argv[1]](sys.argv[2])
