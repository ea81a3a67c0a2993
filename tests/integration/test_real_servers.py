"""The vllm and sglang engines against real servers on this machine's CPU (`make venv-vllm`, `make venv-sglang`).

One server of each kind, the child of the module's engine, answers everybody: the contract suite and the parity tests
attach to it by `url`; the tests that break it come last, and cost one more start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch

from meshrl.contract.errors import InfraError, MeshError, UserError
from meshrl.contract.ports import Engine
from meshrl.contract.types import GenerateRequest, OnUpdate, Uint8, Version, WeightManifest
from meshrl.images import ImageProcessor
from meshrl.rollout.engines import sglang, vllm
from meshrl.rollout.engines.torch import engine as torch_engine
from meshrl.rollout.server_engine import staging as lending
from meshrl.rollout.server_engine.engine import ServerEngine
from meshrl.rollout.streams import Response, sample
from meshrl.testing import vision
from meshrl.testing.contract.engine_suite import LONG, SLOTS, EngineSuite, until_running
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.model.packing import pack as pack_rows
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.snapshot import take_snapshot
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.ranks.world import World
from tests.doubles import vision_rows

from .. import servers
from ..listening import reachable_sockets
from ..sglang_conversation import hold
from ..unit.rollout.checkpoints import (
    SHAPE,
    assert_goes_on_with_the_old_cache,
    assert_told,
    forced_logprobs,
    greedy,
    make_model,
    pack,
    prompts,
    request,
)
from ..waiting import until
from . import weights_fleet

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "fixtures" / "sglang_conversation.json"
pytestmark = [pytest.mark.asyncio(loop_scope="module")]

TINY: dict[str, Any] = {
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2 * LONG,
}
"""Tied, so that an update that forgets the packed projection is seen."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A server that starts in seconds and does not take half of the machine's memory for its cache."""

    name: str
    package: str
    build: Callable[..., ServerEngine]
    arguments: Sequence[str]
    cache_tokens: int
    seeds: bool = True
    """Two requests with one seed get the same tokens."""
    renormalises: bool = True
    """Top-p cuts what top-k left; else both cut the whole distribution."""
    lost_file: str
    """Part of the error when the staged file is gone."""
    open_routes: str = "/health$"
    """A pattern of the routes that need no key."""
    speculative: dict[str, int] | None = None
    """`rollout.engine.speculative`, of vLLM."""

    @property
    def key_name(self) -> str:
        return f"{self.package.upper()}_API_KEY"

    def options(self, log: Path) -> dict[str, object]:
        """`rollout.engine` of an engine that starts the server."""
        return {
            "python": str(servers.python(self.package)),
            "dtype": "float32",
            "extra_args": list(self.arguments),
            "env": servers.environment(self.package),
            "log": str(log),
            "eos_token_ids": [],
            **self.guessing,
        }

    @property
    def guessing(self) -> dict[str, object]:
        return {"speculative": self.speculative} if self.speculative else {}


VLLM = Kind(
    name="vLLM",
    package="vllm",
    build=vllm.build,
    arguments=[
        *servers.VLLM_ARGUMENTS,
        "--block-size",
        "32",
        "--max-num-batched-tokens",
        str(2 * LONG),
    ],
    cache_tokens=servers.KV_BYTES
    // (2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * TINY["head_dim"] * 4),
    lost_file=".*safetensors",
)
SPECULATIVE = replace(VLLM, speculative={"tokens": 3, "longest_ngram": 2})
SGLANG = Kind(
    name="SGLang",
    package="sglang",
    build=sglang.build,
    arguments=[*servers.SGLANG_ARGUMENTS, "--max-total-tokens", "40000"],
    cache_tokens=40_000,
    seeds=False,  # its deterministic mode has no attention backend for CPUs
    renormalises=False,
    lost_file=".*exit code .*safetensors",
    open_routes="/(health|ready|metrics)",
)


def param(kind: Kind, *, nightly: bool = True) -> Any:
    ready = servers.is_here(kind.package)
    reason = f"no {kind.name} here: `make venv-{kind.package}` (x86-64 Linux)"
    marks = [getattr(pytest.mark, kind.package), pytest.mark.skipif(not ready, reason=reason)]
    if kind.speculative:  # `test_speculative.py` has what differs
        marks.append(pytest.mark.skipif(not servers.has_numba(), reason="vLLM guesses by numba"))
        marks += [pytest.mark.nightly] * nightly
    return pytest.param(
        kind, marks=marks, id=kind.package + "-speculative" * bool(kind.speculative)
    )


@pytest.fixture(scope="module", params=[param(VLLM), param(SPECULATIVE), param(SGLANG)])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


SWAPPED = 800
"""Response tokens of a request during which the weights change."""


class Words:
    """A tokenizer: token 7 is `w7 `."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"w{token} " for token in ids)


def tied(seed: int = 0) -> Any:
    return make_model("Qwen3", seed=seed, **TINY)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tied().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staging")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def owner(kind: Kind, checkpoint: Path, staging: Path) -> AsyncIterator[ServerEngine]:
    """The engine whose child everybody uses."""
    options = {**kind.options(server_log(kind, checkpoint)), "staging": str(staging)}
    engine = kind.build(options, model=checkpoint, slots=SLOTS, tokenizer=Words())
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(kind: Kind, owner: ServerEngine, checkpoint: Path) -> AsyncIterator[ServerEngine]:
    options = {**attached_to(kind, owner, checkpoint), "stream_interval": 4}
    attached = kind.build(options, model=checkpoint, slots=SLOTS, tokenizer=Words())
    await attached.start()
    yield attached
    await attached.close()


async def commit(
    engine: Engine, model: Any, version: Version, on_update: OnUpdate = OnUpdate.DRAIN
) -> None:
    await engine.stage_weights(*pack(model, version))
    await engine.commit_weights(version, on_update)


async def all_of(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Response]:
    return await asyncio.gather(*(sample(engine, each) for each in requests))


def server_log(kind: Kind, checkpoint: Path) -> Path:
    """The server's log file, by which its process is also found."""
    return checkpoint / f"{kind.package}.log"


def server_key(kind: Kind, checkpoint: Path) -> str:
    """The key that the child was given: its own user can read it there."""
    environ = Path(f"/proc/{server_pid(server_log(kind, checkpoint))}/environ").read_bytes()
    return dict(each.split("=", 1) for each in environ.decode().split("\0") if "=" in each)[
        kind.key_name
    ]


def attached_to(kind: Kind, owner: ServerEngine, checkpoint: Path) -> dict[str, object]:
    """`rollout.engine` of an engine that uses the child of `owner`."""
    key = server_key(kind, checkpoint)
    return {"url": owner.url, "env": {kind.key_name: key}, "eos_token_ids": [], **kind.guessing}


class TestContract(EngineSuite):
    @pytest.fixture
    def seeds(self, kind: Kind) -> bool:
        return kind.seeds

    def weights(self, version: Version) -> tuple[WeightManifest, Sequence[Uint8]]:
        return pack(tied(), version)


async def test_greedy_tokens_and_logprobs_are_those_of_transformers(engine: ServerEngine) -> None:
    model = tied(seed=3)  # not the checkpoint's weights: the update is part of what is compared
    await commit(engine, model, Version(1, 0))
    generate_requests = prompts(8)
    answers = await all_of(
        engine,
        [
            request(str(i), p, temperature=0.0, max_tokens=24)
            for i, p in enumerate(generate_requests)
        ],
    )
    for prompt, answer in zip(generate_requests, answers, strict=True):
        expected = greedy(model, prompt, 24)
        assert answer.tokens.tolist()[: len(expected)] == expected
        forced = forced_logprobs(model, prompt, answer.tokens.tolist())
        np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)
    wishes = [
        replace(request(f"told {top}", generate_requests[0] * 3, temperature=0.5), prompt_top=top)
        for top in (0, 3)
    ]
    for wish, answer in zip(wishes, await all_of(engine, wishes), strict=True):
        assert_told(model, wish.prompt_ids.tolist(), answer.prompt, wish.prompt_top or 0)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.2},
        {"temperature": 1.2, "min_p": 0.1, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.7, "repetition_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 0.8},
        {"temperature": 0.0, "logit_bias": {5: 3.5, 9: -100.0}},
        {"repetition_penalty": 1.3, "logit_bias": {5: 3.5, 9: -2.0}, "min_p": 0.05},
        {"logit_bias": {5: 3.5, 9: -2.0}, "min_p": 0.05},
    ],
    ids=str,
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    kind: Kind, engine: ServerEngine, sampling: dict[str, Any]
) -> None:
    if {"top_k", "top_p"} <= set(sampling) and not kind.renormalises:
        pytest.skip(f"{kind.name} cuts top-p before top-k, so it samples another distribution")
    refused = {"min_p", "logit_bias"} if kind.speculative else set()
    if not kind.renormalises:
        refused = {"repetition_penalty"}
    if refused & set(sampling):
        with pytest.raises(UserError, match="|".join(refused)):
            await sample(engine, request("a", [5], **sampling))
        return
    model = tied(seed=3)
    await commit(engine, model, Version(1, 0))
    generate_requests = prompts(8)
    answers = await all_of(
        engine,
        [request(str(i), p, max_tokens=24, **sampling) for i, p in enumerate(generate_requests)],
    )
    for prompt, answer in zip(generate_requests, answers, strict=True):
        forced = forced_logprobs(model, prompt, answer.tokens.tolist(), **sampling)
        np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)


async def test_tokens_are_drawn_as_often_as_their_logprobs_claim(engine: ServerEngine) -> None:
    model = tied(seed=3)
    await commit(engine, model, Version(1, 0))
    repeating = [[5, 6, 7, 8] * 4, [9, 10] * 8, [11, 12, 13] * 5, [14] * 9]  # so that n-grams guess
    answers = await all_of(
        engine,
        [request(str(i), repeating[i % 4], max_tokens=400, temperature=0.8) for i in range(8)],
    )
    surprise = variance = 0.0
    for i, answer in enumerate(answers):
        ids = torch.tensor([[*repeating[i % 4], *answer.tokens.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(repeating[i % 4]) - 1 : -1].float() / 0.8
        logprobs = logits.log_softmax(-1)
        expected = (logprobs.exp() * logprobs).sum(-1)
        variance += float((logprobs.exp() * logprobs.square()).sum() - expected.square().sum())
        surprise += float(answer.logprobs.sum() - expected.sum())
    assert abs(surprise) < 4 * variance**0.5


async def test_the_torch_engine_gives_the_same_greedy_answers(
    kind: Kind, engine: ServerEngine, checkpoint: Path
) -> None:
    penalised, biased = {"repetition_penalty": 1.4}, {"logit_bias": {5: 2.5, 9: -100.0}}
    hows: list[dict[str, Any]] = [{}, penalised, biased, {**penalised, **biased}]
    if kind.speculative or not kind.renormalises:
        hows = [{}, penalised if kind.speculative else biased]
    options = {"device": "cpu", "eos_token_ids": []}
    twin = torch_engine.build(options, model=checkpoint, slots=SLOTS)
    await twin.start()
    try:
        await twin.serve_checkpoint(Version(1, 0))
        await engine.serve_checkpoint(Version(1, 0))
        generate_requests = [
            request(str(i), p, temperature=0.0, max_tokens=24, **hows[i % len(hows)])
            for i, p in enumerate(prompts(8, seed=1))
        ]
        for ours, theirs in zip(
            await all_of(engine, generate_requests),
            await all_of(twin, generate_requests),
            strict=True,
        ):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    finally:
        await twin.close()


async def test_a_response_ends_with_its_stop_token_or_the_token_that_completes_its_stop_string(
    engine: ServerEngine,
) -> None:
    await commit(engine, tied(), Version(1, 0))
    whole = await sample(engine, request("a", [5, 6, 7], max_tokens=60, temperature=0.0))
    tokens = whole.tokens.tolist()
    wanted = tokens[20]
    end = tokens.index(wanted) + 1
    by_id = await sample(
        engine, request("a", [5, 6, 7], max_tokens=60, temperature=0.0, stop_token_ids=(wanted,))
    )
    by_text = await sample(
        engine, request("a", [5, 6, 7], max_tokens=60, temperature=0.0, stop=(f"w{wanted} ",))
    )
    for answer in (by_id, by_text):
        assert answer.tokens.tolist() == tokens[:end]
        assert answer.finish_reason == "stop"
        assert len(answer.logprobs) == end


async def _swapped(
    engine: ServerEngine,
    generate_requests: Sequence[Sequence[int]],
    models: tuple[Any, Any],
    step: int,
    on_update: OnUpdate,
) -> list[Response]:
    """Answers during which the second model's weights took the first one's place."""
    first, second = models
    await commit(engine, first, Version(1, step))
    # Answered before the swap, so that its prefixes are cached under the old weights.
    await all_of(
        engine, [request(f"c{i}", p, max_tokens=40) for i, p in enumerate(generate_requests)]
    )
    await engine.stage_weights(*pack(second, Version(1, step + 1)))
    before = engine.stats().tokens_generated
    running = [
        asyncio.create_task(sample(engine, request(str(i), p, temperature=0.0, max_tokens=SWAPPED)))
        for i, p in enumerate(generate_requests)
    ]
    await until(lambda: engine.stats().tokens_generated >= before + SLOTS * 30)
    await engine.commit_weights(Version(1, step + 1), on_update)
    return await asyncio.gather(*running)


@pytest.mark.parametrize("on_update", [OnUpdate.IN_FLIGHT, OnUpdate.INTERRUPT])
async def test_a_swap_in_mid_generation_labels_every_token_and_serves_the_new_weights(
    engine: ServerEngine, on_update: OnUpdate
) -> None:
    first, second = tied(seed=1), tied(seed=2)
    generate_requests = prompts(SLOTS, seed=5)
    # On a busy machine responses may end before the update begins: they say nothing, and the next ones may.
    for step in range(0, 10, 2):
        answers = await _swapped(engine, generate_requests, (first, second), step, on_update)
        if all(len(answer.spans) > 1 for answer in answers):
            break
    for prompt, answer in zip(generate_requests, answers, strict=True):
        versions = [span.version for span in answer.spans]
        assert versions == [Version(1, step), Version(1, step + 1)]
        assert (answer.spans[0].start, answer.spans[-1].end) == (0, SWAPPED)
        border = answer.spans[0].end
        tokens = answer.tokens.tolist()
        old = forced_logprobs(first, prompt, tokens[:border])
        np.testing.assert_allclose(answer.logprobs[:border], old, atol=1e-4)
        if on_update is OnUpdate.INTERRUPT:  # recomputed: exactly what the new weights say
            new = forced_logprobs(second, prompt, tokens)
            np.testing.assert_allclose(answer.logprobs[border:], new[border:], atol=1e-4)
            assert np.abs(answer.logprobs[:border] - new[:border]).max() > 1e-2
        else:
            assert_goes_on_with_the_old_cache((first, second), prompt, answer)
    later = await all_of(
        engine, [request(f"c{i}", p, max_tokens=40) for i, p in enumerate(generate_requests)]
    )
    for prompt, answer in zip(generate_requests, later, strict=True):
        forced = forced_logprobs(second, prompt, answer.tokens.tolist())
        np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)


async def test_rows_are_leased_by_the_tokens_that_the_servers_cache_holds(
    kind: Kind, owner: ServerEngine, checkpoint: Path
) -> None:
    held = kind.cache_tokens
    options = {**attached_to(kind, owner, checkpoint), "max_model_len": LONG}
    wide = kind.build(options, model=checkpoint, slots=10_000, tokenizer=Words())
    await wide.start()
    try:
        assert held // LONG - 1 <= wide.stats().capacity <= held // LONG
    finally:
        await wide.close()


@pytest.mark.parametrize("on_update", list(OnUpdate))
async def test_prefixes_that_another_engine_cached_under_the_same_label_are_not_found(
    kind: Kind, owner: ServerEngine, checkpoint: Path, on_update: OnUpdate
) -> None:
    prompt = prompts(1, seed=11)[0] * 8  # longer than a block of the cache
    for seed in (8, 9):
        options = attached_to(kind, owner, checkpoint)
        engine = kind.build(options, model=checkpoint, slots=SLOTS)
        await engine.start()
        try:
            await commit(engine, tied(seed=seed), Version(7, 0), on_update)
            answer = await sample(engine, request("a", prompt, max_tokens=24))
            forced = forced_logprobs(tied(seed=seed), prompt, answer.tokens.tolist())
            np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)
        finally:
            await engine.close()


async def test_every_token_of_the_context_can_be_used(engine: ServerEngine) -> None:
    await commit(engine, tied(), Version(1, 0))
    for prompt in (2 * LONG - 10, 2 * LONG - 1):
        rest = 2 * LONG - prompt
        answer = await sample(engine, request("a", [5] * prompt, max_tokens=rest))
        assert len(answer.tokens) == rest


async def test_the_server_listens_beyond_loopback_only_where_the_page_of_ports_says_so(
    kind: Kind, engine: ServerEngine
) -> None:
    await commit(engine, tied(), Version(1, 0))
    page = (ROOT / "docs" / "reference" / "ports.md").read_text()
    named = [line for line in page.splitlines() if line.startswith(f"| {kind.name}'s workers |")]
    found = reachable_sockets(os.getpid())
    assert len(found) <= len(named), f"{found} are not in docs/reference/ports.md"


async def test_every_route_of_a_server_that_is_started_here_asks_for_its_key(
    kind: Kind, owner: ServerEngine, checkpoint: Path
) -> None:
    key = server_key(kind, checkpoint)
    async with httpx.AsyncClient(base_url=owner.url, trust_env=False) as http:
        known = {"Authorization": f"Bearer {key}"}
        paths = (await http.get("/openapi.json", headers=known)).json()["paths"]
        routes = [(method, path) for path, methods in paths.items() for method in methods]
        assert len(routes) > 20
        for headers in ({}, {"Authorization": "Bearer " + "x" * len(key)}):
            answers = {
                (method, path): (await http.request(method, path, headers=headers)).status_code
                for method, path in [*routes, ("get", "/openapi.json"), ("get", "/no/such/route")]
                if not re.match(kind.open_routes, path)
            }
            assert set(answers.values()) == {401}, answers
        assert (await http.get("/health")).status_code == 200
    nobody = kind.build({"url": owner.url}, model=checkpoint, slots=SLOTS)
    with pytest.raises(UserError, match=f"asks for a key: set {kind.key_name} in"):
        await nobody.start()


async def test_sglang_answers_as_was_recorded(
    kind: Kind, owner: ServerEngine, checkpoint: Path
) -> None:
    """`test_sglang.py` holds the fake against the record; SGLANG_RECORD=1 writes it anew."""
    if kind is not SGLANG:
        pytest.skip("SGLang's conversation")
    said = await hold(owner.url, server_key(kind, checkpoint))
    if os.environ.get("SGLANG_RECORD"):
        RECORD.write_text(json.dumps(said, indent=1) + "\n")
    assert said == json.loads(RECORD.read_text())


async def test_other_users_of_the_machine_see_the_key_nowhere(kind: Kind, checkpoint: Path) -> None:
    log = server_log(kind, checkpoint)
    key = server_key(kind, checkpoint).encode()
    assert log.stat().st_mode & 0o077 == 0
    for command in await asyncio.to_thread(lambda: list(Path("/proc").glob("[0-9]*/cmdline"))):
        with contextlib.suppress(OSError):
            assert key not in command.read_bytes()


async def test_weights_that_do_not_fit_are_refused_before_any_call_to_the_server(
    engine: ServerEngine,
) -> None:
    await commit(engine, tied(), Version(1, 0))
    other = make_model("Qwen3", head_dim=16, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"weights 1\.1 .*misshapen .*q_norm"):
        await engine.stage_weights(*pack(other, Version(1, 1)))
    assert len((await sample(engine, request("a", [5], max_tokens=3))).tokens) == 3


async def test_tokens_of_weights_that_another_program_loaded_get_no_version(
    engine: ServerEngine, owner: ServerEngine
) -> None:
    await commit(engine, tied(), Version(1, 0))
    await commit(owner, tied(seed=7), Version(9, 9))
    with pytest.raises(InfraError, match=r"9\.9"):
        await sample(engine, request("a", [5, 6], max_tokens=8))
    # It suspects the server, finds it changed and gives it its own weights back.
    answer = await sample(engine, request("b", [5, 6], max_tokens=8))
    assert [span.version for span in answer.spans] == [Version(1, 0)]
    forced = forced_logprobs(tied(), [5, 6], answer.tokens.tolist())
    np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)


async def test_versions_arrive_in_memory_of_the_server_and_are_served_from_there(
    kind: Kind,
    owner: ServerEngine,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainer, a chain of sockets in NCCL's place, the receiver's process, the real loader; a stub of a device."""
    monkeypatch.setattr(lending, "HEADROOM", 0)
    options = {**attached_to(kind, owner, checkpoint), "staging": str(tmp_path)}
    engine = kind.build(options, model=checkpoint, slots=SLOTS, tokenizer=Words())
    await engine.start()
    prompt, seen = prompts(1)[0], []
    patient = {"base_s": 60.0, "silence_s": 60.0}
    try:
        async with weights_fleet.opened("nccl", tmp_path, **patient) as fleet:
            fleet.attach("server", engine)
            for step in range(1, 4):
                model, version = tied(seed=10 + step), Version(1, step)
                await fleet.coordinator.publish(weights_fleet.PackedSource(*pack(model, version)))
                await fleet.until_serving(engine, version)
                answer = await sample(
                    engine, request(f"d{step}", prompt, temperature=0.0, max_tokens=8)
                )
                expected = greedy(model, prompt, 8)
                assert answer.tokens.tolist()[: len(expected)] == expected
                seen.append(engine.stats().staging)
        assert seen == ["host", "device", "device"]
        last, buckets = pack(tied(), Version(1, 4))
        engine._lending._wanted = None  # by another carrier: the memory is given back
        held = engine._lending._lent[0].handle
        await engine.stage_weights(last, buckets)
        await engine.commit_weights(last.version, OnUpdate.DRAIN)
        assert not os.access(f"/dev/shm/{bytes.fromhex(held).decode()}", os.R_OK)
    finally:
        await engine.close()


async def lose_newest_file(staging: Path) -> None:
    """Delete the newest staged file behind the engine's back."""
    files = await asyncio.to_thread(lambda: list(staging.glob("*/*/model.safetensors")))
    max(files, key=lambda file: int(file.parent.name)).unlink()


async def test_a_server_that_allows_less_than_the_engine_promises_is_refused(
    kind: Kind, owner: ServerEngine, checkpoint: Path, tmp_path: Path
) -> None:
    longer = make_model("Qwen3", head_dim=32, max_position_embeddings=4 * LONG)
    longer.save_pretrained(tmp_path)
    options = attached_to(kind, owner, checkpoint)
    engine = kind.build(options, model=tmp_path, slots=SLOTS)
    with pytest.raises(UserError, match=f"allows {2 * LONG} tokens .* the engine {4 * LONG}"):
        await engine.start()


def server_pid(log: Path) -> int:
    """The child of the guard that keeps `log`."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(log) in command and any(part.endswith(b"guard.py") for part in command):
                return int((entry / "task" / entry.name / "children").read_text().split()[0])
        except (OSError, IndexError):
            continue
    raise AssertionError(f"no server writes {log}")


async def test_a_killed_server_fails_its_requests_and_returns_with_the_served_version(
    kind: Kind, owner: ServerEngine, checkpoint: Path
) -> None:
    model = tied(seed=4)
    await commit(owner, model, Version(10, 0))
    server = server_pid(
        server_log(kind, checkpoint)
    )  # looked for first: it takes as long as a response
    running = [
        asyncio.create_task(sample(owner, request(str(i), [5, 6], max_tokens=LONG)))
        for i in range(SLOTS)
    ]
    await until_running(owner, SLOTS)
    os.kill(server, signal.SIGKILL)
    failed = await asyncio.gather(*running, return_exceptions=True)
    assert {type(error) for error in failed} == {InfraError}
    # Waits for the new server; nobody has to send the weights again.
    answer = await sample(owner, request("after", [5, 6, 7], max_tokens=24))
    assert [span.version for span in answer.spans] == [Version(10, 0)]
    forced = forced_logprobs(model, [5, 6, 7], answer.tokens.tolist())
    np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)


async def test_a_server_whose_update_failed_is_replaced_and_serves_nothing_until_the_next_version(
    kind: Kind, owner: ServerEngine, checkpoint: Path, staging: Path
) -> None:
    await commit(owner, tied(), Version(11, 0))
    half_loaded = server_pid(server_log(kind, checkpoint))
    await owner.stage_weights(*pack(tied(seed=1), Version(11, 1)))
    await lose_newest_file(staging)
    with pytest.raises(
        InfraError, match=rf"loading weights 11\.1 failed in {kind.name}: {kind.lost_file}"
    ):
        await owner.commit_weights(Version(11, 1), OnUpdate.IN_FLIGHT)
    assert owner.version == Version(0, 0)
    waiting = asyncio.create_task(sample(owner, request("a", [5, 6], max_tokens=8)))
    await commit(owner, tied(seed=2), Version(11, 2))
    answer = await waiting
    assert server_pid(server_log(kind, checkpoint)) != half_loaded
    assert [span.version for span in answer.spans] == [Version(11, 2)]
    forced = forced_logprobs(tied(seed=2), [5, 6], answer.tokens.tolist())
    np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)


async def test_a_failed_update_poisons_a_server_that_cannot_be_replaced(
    kind: Kind, owner: ServerEngine, checkpoint: Path, tmp_path: Path
) -> None:
    options = {**attached_to(kind, owner, checkpoint), "staging": str(tmp_path)}
    engine = kind.build(options, model=checkpoint, slots=SLOTS)
    await engine.start()
    await commit(engine, tied(), Version(1, 0))
    await engine.stage_weights(*pack(tied(seed=1), Version(1, 1)))
    await lose_newest_file(tmp_path)
    with pytest.raises(InfraError, match=rf"loading weights 1\.1 failed in {kind.name}: "):
        await engine.commit_weights(Version(1, 1), OnUpdate.IN_FLIGHT)
    assert engine.version == Version(0, 0)
    with pytest.raises(MeshError, match="half loaded: restart it"):
        await sample(engine, request("a", [5], max_tokens=3))
    await engine.close()


MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


async def test_a_mixture_of_experts_serves_the_experts_that_were_published(
    kind: Kind, tmp_path: Path
) -> None:
    tied = kind.package != "sglang"  # which does not tie those of a mixture
    shape = {**TINY, **MIXTURE, "tie_word_embeddings": tied}
    first = make_model("Qwen3Moe", **shape)
    first.save_pretrained(tmp_path)
    options = kind.options(server_log(kind, tmp_path))
    engine = kind.build(options, model=tmp_path, slots=SLOTS, tokenizer=Words())
    await engine.start()
    try:
        for step in (1, 2):  # an update of an update, too
            model = make_model("Qwen3Moe", seed=step, **shape)
            await commit(engine, model, Version(1, step))
            asked = prompts(4, seed=step)
            answers = await all_of(
                engine, [request(f"{step} {i}", p, max_tokens=24) for i, p in enumerate(asked)]
            )
            for prompt, answer in zip(asked, answers, strict=True):
                assert [span.version for span in answer.spans] == [Version(1, step)]
                forced = forced_logprobs(model, prompt, answer.tokens.tolist())
                np.testing.assert_allclose(answer.logprobs, forced, atol=1e-4)
    finally:
        await engine.close()


async def test_logprobs_of_rows_with_pictures_are_the_trainers_also_after_an_update_of_the_tower(
    kind: Kind, tmp_path: Path, world: World
) -> None:
    vision.random_checkpoint("Qwen3VL", tmp_path)
    policy = build_policy(
        open_hf(tmp_path), world, ModelConfig(path=tmp_path, freeze_vision_tower=False)
    )
    reader, processor = VisionReader(tmp_path, policy.hf), ImageProcessor(tmp_path)
    engine = kind.build(kind.options(server_log(kind, tmp_path)), model=tmp_path, slots=SLOTS)
    await engine.start()
    try:
        for step in (0, 1):
            version = Version(1, step)
            if step:
                vision_rows.move_weights(policy, step)
            made = take_snapshot(
                policy, world, run="r", version=version, dtype="float32", bucket_bytes=1 << 20
            )
            assert made is not None
            await engine.stage_weights(made.manifest, made.buckets)
            await engine.commit_weights(version, OnUpdate.IN_FLIGHT)
            # The pictures are those of the version before: what its tower made of them must not be used.
            rows = await vision_rows.sampled(engine, processor, f"step {step}", 4)
            assert float(vision_rows.apart(policy, reader, rows).max()) < 1e-3
    finally:
        await engine.close()


async def test_adapters_are_served_beside_the_base_without_a_merge_and_a_response_keeps_its_own(
    kind: Kind, tmp_path: Path, world: World
) -> None:
    if kind.package == "sglang" and not torch.cuda.is_available():
        pytest.skip("SGLang's adapters want pinned memory, which torch has beside a GPU only")
    model = tmp_path / "model"
    tied().save_pretrained(model)
    config = ModelConfig(path=model, lora_rank=4, lora_alpha=16)
    policy = build_policy(open_hf(model), world, config)
    log = model / f"{kind.package}.log"
    options = {**kind.options(log), "max_lora_rank": 4}
    engine = kind.build(options, model=model, slots=SLOTS, tokenizer=Words())
    await engine.start()
    sent = {}
    try:
        for step in (1, 2):
            for name, weight in policy.named_adapters():
                torch.manual_seed(step)
                torch.nn.init.normal_(weight.parameter.to_local(), std=0.3 if "_B" in name else 0.1)  # type: ignore[attr-defined]
            version = Version(1, step)
            made = take_snapshot(
                policy, world, run="r", version=version, dtype="float32", bucket_bytes=1 << 16,
                adapters_only=True,
            )  # fmt: skip
            assert made is not None
            sent[version] = made
            if step == 2:  # while one runs
                long = asyncio.create_task(
                    sample(engine, request("long", prompts(1)[0], max_tokens=SWAPPED))
                )
                await until_running(engine, 1)
            await engine.stage_weights(made.manifest, made.buckets)
            await engine.commit_weights(version, OnUpdate.IN_FLIGHT)
            assert engine.version == version
            answer = await sample(engine, request(f"r{step}", prompts(1)[0], max_tokens=24))
            assert [span.version for span in answer.spans] == [version]
            text = np.concatenate([prompts(1)[0], answer.tokens]).astype(np.int32)
            forced, _ = policy(pack_rows([text], [len(prompts(1)[0])]), 1.0)
            np.testing.assert_allclose(answer.logprobs, forced.detach().numpy(), atol=1e-4)
        slow = await long
        assert len(slow.tokens) == SWAPPED
        assert [span.version for span in slow.spans] == [Version(1, 1)]
        whole = pack(tied(), Version(1, 3))
        with pytest.raises(UserError, match="max_lora_rank wants adapters"):
            await engine.stage_weights(*whole)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"url": "http://127.0.0.1:9", "start_s": 0.1},
            "no {name} server answers at http://127.0.0.1:9",
        ),
        ({"url": "localhost:8000"}, "rollout.engine.url is 'localhost:8000'"),
        ({"python": "/no/such/python"}, "rollout.engine.python: /no/such/python is not a program"),
        ({"python": sys.executable}, "No module named .?{package}"),
        (
            {"command": ["sh", "-c", "echo ValueError: no such model >&2; exit 3"]},
            "exit code 3 .*ValueError: no such model",
        ),
        ({"command": ["no-such-server"]}, "there is no program 'no-such-server'"),
        ({"url": "http://a", "python": "b"}, "one of url and python"),
        ({"pyton": "b"}, "did you mean 'python'"),
    ],
    ids=str,
)
async def test_an_unsuitable_server_is_one_clear_message(
    kind: Kind, options: dict[str, Any], said: str, checkpoint: Path
) -> None:
    expected = said.format(name=kind.name, package=kind.package)
    with pytest.raises(UserError, match=expected) as raised:
        engine = kind.build(options, model=checkpoint, slots=SLOTS, tokenizer=None)
        try:
            await engine.start()
        finally:
            await engine.close()
    assert "\n" not in str(raised.value)
