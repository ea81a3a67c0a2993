"""Unmodified agents that use the official client are trained on exactly what the engine sampled for them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from meshrl.contract.errors import ConfigError
from meshrl.contract.nouns import OnUpdate, Outcome, Version
from meshrl.rollout.engines.echo import Behaviour
from meshrl.rollout.engines.echo import build as build_echo

from ..talking import write_talking_model
from ..unit.rollout.checkpoints import pack
from .gateway_mesh import FIRST, RUN, Mesh, agents_mesh, check_exact

ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
AGENT = Path(__file__).parent / "command_agent.py"
leaders: list[Callable[..., Awaitable[Any]]] = []
"""What the agent below does: the last of them."""


async def agent(base_url: str, api_key: str, task: Any) -> Any:
    """Named by its dotted path in the tests."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await leaders[-1](client, task)


def blocking_agent(base_url: str, api_key: str, task: Any) -> float:
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        said = client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": task["prompt"]}], max_tokens=5
        )
    assert said.usage is not None and said.usage.completion_tokens <= 5
    return 0.25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talking")
    write_talking_model(path)
    return path


def leading(what: Callable[..., Awaitable[Any]]) -> dict[str, Any]:
    """Options for an agent that does `what`."""
    leaders.append(what)
    return {"function": f"{__name__}.agent"}


async def test_turns_streams_and_tool_results_are_one_row_of_what_was_sampled(model: Path) -> None:
    async def three_turns(client: AsyncOpenAI, task: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
        options: Any = {"model": "any", "max_tokens": 12, "tools": [ADD]}
        first = await client.chat.completions.create(messages=messages, **options)
        messages.append(first.choices[0].message.model_dump())
        messages.append({"role": "tool", "tool_call_id": "x", "content": "3"})
        text, reasons = "", []
        stream = await client.chat.completions.create(messages=messages, stream=True, **options)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
        assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
        await client.chat.completions.create(messages=messages, **options)

    options = leading(three_turns)
    async with agents_mesh(model, options, tasks=3, group_size=2) as mesh:
        rows = await mesh.rows(3)
        assert len(rows) == 6
        for uid, row in rows.items():
            check_exact(mesh, uid, row)
            assert len([n for n in mesh.engine.deltas if n.startswith(str(uid))]) == 3
            said = mesh.tokenizer.decode_all(row.tokens.tolist())
            assert said.startswith("[add]U:") and "T:3<eos>A:" in said and "U:sure?<eos>A:" in said
            assert mesh.posted(uid) is None
        # Siblings draw for themselves.
        assert len({row.tokens.tobytes() for row in rows.values()}) == 6


async def test_log_probs_and_usage_are_those_of_the_row(model: Path) -> None:
    heard: list[float] = []
    texts: list[str] = []

    async def ask(client: AsyncOpenAI, task: Any) -> None:
        said = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], logprobs=True, max_tokens=9
        )
        assert said.choices[0].logprobs and said.choices[0].logprobs.content and said.usage
        heard.extend(token.logprob for token in said.choices[0].logprobs.content)
        assert said.usage.completion_tokens == len(heard)
        texts.append(said.choices[0].message.content or "")
        stream = await client.completions.create(
            model="m",
            prompt="y",
            logprobs=1,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        counted = None
        values: list[float] = []
        async for chunk in stream:
            if chunk.usage:
                counted = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.logprobs:
                    values.extend(choice.logprobs.token_logprobs or [])
        assert counted == len(values)

    async with agents_mesh(model, {**leading(ask), "branch": "longest"}) as mesh:
        await mesh.rows(1)
        deltas = mesh.engine.deltas[f"{RUN}/t0/0.0"]
        assert heard == [float(value) for delta in deltas for value in delta.logprobs]
        assert texts == [mesh.tokenizer.decode([t for d in deltas for t in d.tokens.tolist()])]


async def test_a_weight_update_amid_a_conversation_labels_each_token_with_its_version(
    model: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    second = Version(1, 1)
    manifest, buckets = pack(AutoModelForCausalLM.from_pretrained(model), second)
    seen: list[Mesh] = []

    async def ask(client: AsyncOpenAI, task: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=100, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if seen[0].torch.version == FIRST:
                await seen[0].torch.stage_weights(manifest, buckets)
                await seen[0].torch.commit_weights(second, OnUpdate.IN_FLIGHT)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "y"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)

    async with agents_mesh(model, leading(ask)) as mesh:
        seen.append(mesh)
        for uid, row in (await mesh.rows(1)).items():
            check_exact(mesh, uid, row)
            assert row.spans[-1].version == second


async def test_a_blocking_agent_runs_in_a_thread_and_says_what_it_was_worth(model: Path) -> None:
    options = {"function": f"{__name__}.blocking_agent"}
    async with agents_mesh(model, options, tasks=2) as mesh:
        for uid, row in (await mesh.rows(2)).items():
            check_exact(mesh, uid, row)
            assert mesh.posted(uid).score == 0.25


async def test_a_command_finds_its_session_in_the_environment_and_its_task_on_stdin(
    model: Path,
) -> None:
    options = {"command": [sys.executable, str(AGENT)]}
    async with agents_mesh(model, options, tasks=2) as mesh:
        for uid, row in (await mesh.rows(2)).items():
            check_exact(mesh, uid, row)
            assert mesh.posted(uid).components == {"answers": 2.0}
            assert mesh.posted(uid).score == float(uid.task[1:]) + 1


async def test_on_policy_waves_wait_for_agents(model: Path) -> None:
    options = {"function": f"{__name__}.blocking_agent"}
    async with agents_mesh(model, options, tasks=4, slots=4, deterministic=True) as mesh:
        assert len(await mesh.rows(4)) == 4


async def test_an_agent_that_fails_is_a_fault_after_which_the_row_is_tried_again(
    model: Path,
) -> None:
    tries: list[int] = []

    async def fail_first(client: AsyncOpenAI, task: Any) -> None:
        tries.append(1)
        await client.completions.create(model="m", prompt="x", max_tokens=3)
        if len(tries) == 1:
            raise RuntimeError("no idea")

    async with agents_mesh(model, leading(fail_first)) as mesh:
        await mesh.rows(1)
        assert len(tries) == 2


async def test_an_agent_that_always_fails_is_given_up_with_its_reason(model: Path) -> None:
    async def fail(client: AsyncOpenAI, task: Any) -> None:
        raise RuntimeError("no idea")

    async with agents_mesh(model, leading(fail), max_attempts=2) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.INFRA_FAULT
        assert "agent: RuntimeError: no idea" in letter.reason


async def test_a_failing_agent_may_be_the_policy_s_fault(model: Path) -> None:
    async def fail(client: AsyncOpenAI, task: Any) -> None:
        await client.completions.create(model="m", prompt="x", max_tokens=3)
        raise RuntimeError("cannot read this")

    options = {**leading(fail), "on_agent_error": "policy_fault"}
    async with agents_mesh(model, options) as mesh:
        batch = await mesh.queue.take(RUN, epoch=1, step=0, groups=1, batch_id="b", wait_s=60)
        assert [row.outcome for row in batch.rows] == [Outcome.POLICY_FAULT]


async def test_an_agent_that_runs_out_of_room_leaves_a_truncated_row(model: Path) -> None:
    said: list[str | None] = []

    async def talk_on(client: AsyncOpenAI, task: Any) -> None:
        prompt = "x"
        while True:
            try:
                more = await client.completions.create(model="m", prompt=prompt, max_tokens=8)
            except openai.BadRequestError as error:
                said.append(error.code)
                raise
            prompt += more.choices[0].text + "and on and on"

    options = leading(talk_on)
    async with agents_mesh(model, options, sampling={"max_tokens": 60}) as mesh:
        batch = await mesh.queue.take(RUN, epoch=1, step=0, groups=1, batch_id="b", wait_s=60)
        assert [row.outcome for row in batch.rows] == [Outcome.TRUNCATED]
        assert said == ["context_length_exceeded"]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_an_agent_past_its_deadline_is_ended_with_all_that_it_started(
    model: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; sleep 1000 & echo $! >> {pids}; wait"
    options = {"command": ["/bin/sh", "-c", script]}
    async with agents_mesh(model, options, deadline_s=1.5, max_attempts=1) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.TIMEOUT
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    assert not [pid for pid in found if is_alive(pid)]


async def test_an_agent_that_is_killed_is_tried_again(model: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"
    script = f"if [ ! -e {once} ]; then touch {once}; kill -9 $$; fi; exec {sys.executable} {AGENT}"
    async with agents_mesh(model, {"command": ["/bin/sh", "-c", script]}) as mesh:
        for uid, row in (await mesh.rows(1)).items():
            check_exact(mesh, uid, row)
        assert mesh.worker.stats.failed == 1


async def test_the_engine_s_fault_is_the_row_s_whatever_the_agent_makes_of_it(
    model: Path, tmp_path: Path
) -> None:
    codes: list[int] = []

    async def shrug(client: AsyncOpenAI, task: Any) -> float:
        try:
            await client.completions.create(model="m", prompt="x")
        except openai.APIStatusError as error:
            codes.append(error.status_code)
        return 1.0

    engine = build_echo({"tokens_per_s": 10_000}, model=tmp_path, slots=8)
    await engine.start()
    manifest, _ = pack_nothing(FIRST)
    await engine.stage_weights(manifest, [])
    await engine.commit_weights(FIRST, OnUpdate.DRAIN)
    engine.behave(Behaviour.FAIL)
    options = leading(shrug)
    async with agents_mesh(model, options, engine=engine, max_attempts=1) as mesh:
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.INFRA_FAULT
        assert "told to fail" in letter.reason
    await engine.close()
    assert set(codes) <= {500}


def pack_nothing(version: Version) -> Any:
    from meshrl.contract.nouns import WeightManifest

    manifest = WeightManifest(
        run=RUN, version=version, tensors=(), bucket_bytes=(), bucket_hashes=()
    )
    return manifest, []


async def test_a_client_that_hangs_up_aborts_its_request(model: Path) -> None:
    async def hang_up(client: AsyncOpenAI, task: Any) -> None:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
            with pytest.raises(httpx.TimeoutException):
                async with httpx.AsyncClient(timeout=httpx.Timeout(0.3, connect=20)) as http:
                    await http.post(
                        f"{client.base_url}chat/completions",
                        json=body,
                        headers={"Authorization": f"Bearer {client.api_key}"},
                    )
        seen[0].engine._engine.behave(Behaviour.ANSWER)
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "y"}], max_tokens=4
        )

    engine = build_echo({"tokens_per_s": 10_000, "tokens_per_delta": 2}, model=model, slots=8)
    await engine.start()
    manifest, _ = pack_nothing(FIRST)
    await engine.stage_weights(manifest, [])
    await engine.commit_weights(FIRST, OnUpdate.DRAIN)
    engine.behave(Behaviour.STALL)
    seen: list[Any] = []
    async with agents_mesh(model, leading(hang_up), engine=engine) as mesh:
        seen.append(mesh)
        ((_, row),) = (await mesh.rows(1)).items()
        assert len(mesh.engine.left) == 2
        assert engine.stats().running == 0
        assert "U:y" in mesh.tokenizer.decode(row.tokens.tolist())
        assert row.loss_mask.sum() == 4
    await engine.close()


async def claim(mesh: Mesh, http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post(f"{mesh.url}/v1/sessions", json={"wait_s": 30}, headers=headers)


async def test_an_agent_from_outside_claims_a_row_and_ends_it_with_a_reward(model: Path) -> None:
    async with (
        agents_mesh(model, {"external": True}, tasks=2, slots=4) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        await asyncio.sleep(0.1)
        assert mesh.worker.held == 0  # nobody has asked, so no row's time runs
        for score in (1.0, None):
            made = await claim(mesh, http)
            assert made.status_code == 201
            session = made.json()
            assert session["task"]["ground_truth"] in ("1", "2")
            key = session["api_key"]
            auth = {"Authorization": f"Bearer {key}"}
            # The key alone says which session it is; so does the address with it.
            for base_url in (session["base_url"], f"{mesh.url}/v1"):
                async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
                    assert (await client.models.list()).data[0].id == "policy"
                    await client.completions.create(model="m", prompt="x", max_tokens=3)
            place = f"{mesh.url}/v1/sessions/{session['id']}"
            assert (await http.get(place, headers=auth)).json()["answers"] == 2
            if score is None:
                for _ in range(2):  # saying it twice is saying it once
                    assert (await http.post(f"{place}/finish", headers=auth)).status_code == 200
                continue
            reward = {"score": score, "components": {"steps": 2}}
            for _ in range(2):
                assert (
                    await http.post(f"{place}/reward", json=reward, headers=auth)
                ).status_code == 200
            await mesh.until("ready", 1)
            gone = await http.post(f"{place}/reward", json={"score": 9}, headers=auth)
            assert (gone.status_code, gone.json()["error"]["code"]) == (410, "session_ended")
        rows = await mesh.rows(2)
        rewards = [mesh.posted(uid) for uid in rows]
        assert sorted(r.score for r in rewards if r) == [1.0]
        assert None in rewards


async def test_claims_wait_for_rows_and_end_with_the_worker(model: Path) -> None:
    async with (
        agents_mesh(model, {"external": True}, tasks=1) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        assert (await claim(mesh, http)).status_code == 201
        none = await http.post(f"{mesh.url}/v1/sessions", json={"wait_s": 0.2})
        assert (none.status_code, none.json()["error"]["code"]) == (408, "no_row")
        waiting = asyncio.create_task(claim(mesh, http))
        async with asyncio.timeout(20):
            while not mesh.book.demand:  # noqa: ASYNC110 (nothing tells of a waiting claim)
                await asyncio.sleep(0.01)
        mesh.worker.drain()
        mesh.book.drain()
        assert (await waiting).status_code == 503
        # The claimed row goes back as it was: a drain is nobody's attempt.
        await mesh.until("queued", 1)
        assert (await mesh.queue.ledger(RUN)).dead_lettered == {}


async def test_a_session_past_its_deadline_cannot_be_ended_as_if_it_were_not(model: Path) -> None:
    async with (
        agents_mesh(model, {"external": True}, deadline_s=1.0, max_attempts=1) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        session = (await claim(mesh, http)).json()
        auth = {"Authorization": f"Bearer {session['api_key']}"}
        early = {"score": 1.0, "finish": False}
        answer = await http.post(f"{session['base_url']}/reward", json=early, headers=auth)
        assert answer.status_code == 200
        (letter,) = await mesh.dead()
        assert letter.outcome is Outcome.TIMEOUT
        place = f"{mesh.url}/v1/sessions/{session['id']}"
        for path, body in (("finish", {}), ("reward", {"score": 1.0})):
            late = await http.post(f"{place}/{path}", json=body, headers=auth)
            assert (late.status_code, late.json()["error"]["code"]) == (410, "session_ended")


async def test_a_session_that_was_never_asked_goes_back_as_it_came(model: Path) -> None:
    async with (
        agents_mesh(model, {"external": True}, max_attempts=1) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        for _ in range(2):
            session = (await claim(mesh, http)).json()
            auth = {"Authorization": f"Bearer {session['api_key']}"}
            place = f"{mesh.url}/v1/sessions/{session['id']}"
            assert (await http.post(f"{place}/finish", headers=auth)).status_code == 200
        await mesh.until("queued", 1)
        assert mesh.worker.stats.failed == 0


async def test_a_claim_whose_client_left_costs_no_attempt(model: Path) -> None:
    async with (
        agents_mesh(model, {"external": True}, max_attempts=1) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        leaver = asyncio.create_task(mesh.book.claim(30))
        handed = mesh.book.hand_over

        def leave_at_once(session: Any, address: Any) -> bool:
            found = handed(session, address)
            leaver.cancel()  # the very moment in which the row comes
            return found

        mesh.book.hand_over = leave_at_once  # type: ignore[method-assign]
        await asyncio.gather(leaver, return_exceptions=True)
        await mesh.until("queued", 1)
        assert (await claim(mesh, http)).status_code == 201


async def test_claims_want_a_token_where_tokens_are_asked_for(model: Path, tmp_path: Path) -> None:
    from meshrl.services.rewards.auth import new_token

    token, digest = new_token()
    other, other_digest = new_token()
    entries = [
        {"name": "a", "roles": ["claim"], "sha256": digest},
        {"name": "b", "roles": ["read"], "sha256": other_digest},
    ]
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(json.dumps({"tokens": entries}))
    async with (
        agents_mesh(model, {"external": True}, tokens=tokens) as mesh,
        httpx.AsyncClient(timeout=60) as http,
    ):
        assert (await claim(mesh, http)).status_code == 401
        assert (await claim(mesh, http, Authorization=f"Bearer {other}")).status_code == 403
        assert (await claim(mesh, http, Authorization=f"Bearer {token}")).status_code == 201


async def test_sessions_are_shut_to_others_and_errors_are_openai_s(model: Path) -> None:
    found: dict[str, tuple[int, Any]] = {}

    async def misuse(client: AsyncOpenAI, task: Any) -> None:
        base = str(client.base_url)
        chat: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(timeout=60) as http:
            key = {"Authorization": f"Bearer {client.api_key}"}

            async def post(
                name: str, body: Any, path: str = "chat/completions", **more: Any
            ) -> None:
                headers = more.pop("headers", key)
                url = more.pop("url", base + path)
                answer = await http.post(url, headers=headers, **({"json": body} | more))
                error = answer.json()["error"]
                assert error.keys() == {"message", "type", "param", "code"}
                found[name] = (answer.status_code, error["param"] or error["code"])

            await post("no key", chat, headers={})
            await post("wrong key", chat, headers={"Authorization": "Bearer mrs_guess"})
            place = base.rsplit("/", 3)[0]
            await post("other session", chat, url=f"{place}/other/v1/chat/completions")
            await post("claim", {}, url=f"{place.removesuffix('/sessions')}/v1/sessions")
            await post("n", {**chat, "n": 2})
            await post("bias", {**chat, "logit_bias": {"5": 1}})
            await post("penalty", {**chat, "frequency_penalty": 0.5})
            await post("top_logprobs", {**chat, "logprobs": True, "top_logprobs": 3})
            await post("json mode", {**chat, "response_format": {"type": "json_object"}})
            await post("tool_choice", {**chat, "tools": [ADD], "tool_choice": "required"})
            await post(
                "image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
            )
            await post("no messages", {"messages": []})
            await post("role", {"messages": [{"role": "king", "content": "x"}]})
            await post(
                "surrogate",
                None,
                content=b'{"messages":[{"role":"user","content":"\\ud800"}]}',
                headers={**key, "Content-Type": "application/json"},
                json=None,
            )
            await post(
                "not JSON",
                None,
                content=b"{",
                json=None,
                headers={**key, "Content-Type": "application/json"},
            )
            await post("large", {**chat, "user": "x" * 300_000})
            await post("long", {"prompt": "x" * 1000}, path="completions")
            await post("two prompts", {"prompt": ["x", "y"]}, path="completions")
            await post("echo", {"prompt": "x", "echo": True}, path="completions")
            await post("empty", {"prompt": ""}, path="completions")
            await post("token", {"prompt": [1 << 30]}, path="completions")
            await post("reward", {"score": "much"}, path="reward")
            await post("nowhere", {}, path="images/generations")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="mrs_other").models.list()
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            await client.chat.completions.create(**chat, n=3)
        await client.chat.completions.create(**chat, max_tokens=3, temperature=0.3, seed=4)

    async with agents_mesh(model, leading(misuse), max_attempts=1) as mesh:
        waiting = asyncio.create_task(mesh.rows(1))
        dead = asyncio.create_task(mesh.dead())
        done, _ = await asyncio.wait({waiting, dead}, return_when=asyncio.FIRST_COMPLETED)
        assert waiting in done, dead.result()
        dead.cancel()
    assert found == {
        "no key": (401, "invalid_api_key"),
        "wrong key": (401, "invalid_api_key"),
        "other session": (403, "wrong_session"),
        "claim": (403, "wrong_session"),
        "n": (400, "n"),
        "bias": (400, "logit_bias"),
        "penalty": (400, "frequency_penalty"),
        "top_logprobs": (400, "top_logprobs"),
        "json mode": (400, "response_format"),
        "tool_choice": (400, "tool_choice"),
        "image": (400, "messages.0.content.str"),
        "no messages": (400, "messages"),
        "role": (400, "messages.0.role"),
        "surrogate": (400, "messages"),
        "not JSON": (400, "1"),
        "large": (413, "too_large"),
        "long": (400, "context_length_exceeded"),
        "two prompts": (400, "prompt"),
        "echo": (400, "echo"),
        "empty": (400, None),
        "token": (400, None),
        "reward": (400, "score"),
        "nowhere": (404, "not_found"),
    }


async def test_an_evaluation_without_a_mesh_runs_agents_too(model: Path, tmp_path: Path) -> None:
    from meshrl.services.config.recipe import Recipe
    from meshrl.services.evaluation import evaluate
    from meshrl.services.prompts import eval_tasks

    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 3)
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r", "dir": tmp_path / "run"},
            "model": {"path": model},
            "data": {"val_files": [tmp_path / "held_out.jsonl"], "max_response_length": 40},
            "rollout": {
                "program": "openai",
                "program_options": {"function": f"{__name__}.blocking_agent"},
            },
        }
    )
    report = await evaluate(recipe, model, eval_tasks(recipe))
    assert (report.tasks, report.rows, report.score) == (3, 3, 0.25)


def test_options_that_make_no_sense_are_told_at_the_start() -> None:
    from meshrl.rollout.library import Programs

    def wrong(options: dict[str, Any], **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            Programs("openai", options, **more).get("openai")
        return str(caught.value)

    book: Any = object()
    assert "want exactly one of function, command and external, got none" in wrong({}, gateway=book)
    assert "got function and external" in wrong({"function": "a.b", "external": True}, gateway=book)
    assert "needs a gateway" in wrong({"external": True})
