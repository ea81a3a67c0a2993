"""Models of servers: headers that somebody else has written, another model than is trained, what a cache holds."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from meshrl.contract.errors import InfraError, UserError
from meshrl.contract.types import Version
from meshrl.rollout.engines.vllm import cache_tokens
from meshrl.rollout.server_engine.capacity import CacheCapacity, RunningRequest
from meshrl.rollout.server_engine.checkpoint import ADAPTER_FILE, CheckpointFacts, read_checkpoint
from meshrl.rollout.server_engine.kind import ServedAdapters, check_same_model
from meshrl.rollout.server_engine.response import Chunk

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 99}


def model(path: Path, **changes: object) -> CheckpointFacts:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return CheckpointFacts(
        path=path, num_bytes=0, shapes={}, tied=False, vocab_size=99, max_length=8, eos_token_ids=()
    )


@pytest.mark.parametrize("key", ["root", "id"])  # vLLM's card has both, SGLang's path is its id
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "hidden_size is 128; model.path is .*ours, with 64"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures is \['Qwen2ForCausalLM'\]"),
        ({"text_config": CONFIG | {"vocab_size": 7}}, "vocab_size is 7"),
    ],
)
def test_another_model_is_one_line_that_names_both(
    tmp_path: Path, key: str, changes: dict[str, object], said: str
) -> None:
    ours, theirs = model(tmp_path / "ours"), model(tmp_path / "theirs", **changes)
    card = {"data": [{"id": "x", key: str(theirs.path)}]}
    with pytest.raises(
        UserError, match=f"vLLM server at http://a serves .*theirs, whose {said}"
    ) as raised:
        check_same_model("vLLM", "http://a", card, ours)
    assert "\n" not in str(raised.value)


def test_the_same_model_elsewhere_or_under_a_name_is_left_to_the_first_version(
    tmp_path: Path,
) -> None:
    ours = model(tmp_path / "ours")
    copy = model(tmp_path / "copy")
    for root in (str(copy.path), "Qwen/Qwen3-0.6B", "/models/on/another/machine"):
        check_same_model("SGLang", "http://a", {"data": [{"id": root}]}, ours)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes, where 0 is the most"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "where 2 is the most"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "nested too deeply"),
        ((2).to_bytes(8, "little") + b"[]", "not an object"),
        ((8).to_bytes(8, "little") + b'{"a":{}}', "'shape'"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "not subscriptable"),
        ((20).to_bytes(8, "little") + b'{"a":{"shape":"no"}}', "invalid literal"),
    ],
)
def test_weights_with_a_hostile_header_are_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    sizes = {"vocab_size": 9, "max_position_embeddings": 9}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: unreadable weights: ") as caught:
        read_checkpoint(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_slots_are_the_only_bound_where_the_cache_is_unknown() -> None:
    assert CacheCapacity(slots=64, longest=4096).capacity(0) == 64


def test_before_the_first_request_the_longest_length_is_expected() -> None:
    assert CacheCapacity(slots=64, longest=100).capacity(1000) == 10
    assert CacheCapacity(slots=4, longest=100).capacity(1000) == 4
    assert CacheCapacity(slots=4, longest=5000).capacity(1000) == 1


def test_the_limits_of_requests_are_expected_until_one_has_ended() -> None:
    estimate = CacheCapacity(slots=64, longest=1000)
    first = estimate.begin(prompt=20, longest=100)
    assert (estimate.expected, estimate.capacity(1000)) == (100, 10)
    first.length = 50
    estimate.end(first, finished=True)
    assert (estimate.expected, estimate.capacity(1000)) == (50, 20)


def test_an_aborted_request_does_not_change_the_expected_length() -> None:
    estimate = CacheCapacity(slots=64, longest=1000)
    estimate.end(estimate.begin(prompt=20, longest=100), finished=False)
    assert estimate.expected == 100


def test_requests_longer_than_expected_lower_the_capacity() -> None:
    estimate = CacheCapacity(slots=64, longest=1000)
    short = estimate.begin(prompt=10, longest=500)
    short.length = 100
    estimate.end(short, finished=True)
    long = estimate.begin(prompt=10, longest=500)
    assert estimate.capacity(1000) == 1 + 9
    long.length = 450
    assert estimate.capacity(1000) == 1 + 5


def test_requests_admitted_by_the_capacity_fit() -> None:
    """Whatever their lengths, once the longest of them has been seen."""
    dice = random.Random(7)
    estimate, cache, running = CacheCapacity(slots=256, longest=400), 4_000, list[RunningRequest]()
    longest = estimate.begin(prompt=100, longest=400)
    longest.length = 400
    estimate.end(longest, finished=True)
    for _ in range(2_000):
        while len(running) < estimate.capacity(cache):
            prompt = dice.randint(1, 100)
            running.append(estimate.begin(prompt=prompt, longest=prompt + dice.randint(1, 300)))
        for each in running:
            each.length = min(each.longest, each.length + dice.randint(0, 20))
        assert sum(each.length for each in running) <= cache
        ended = [each for each in running if each.length == each.longest]
        running = [each for each in running if each.length < each.longest]
        for each in ended:
            estimate.end(each, finished=False)


def test_the_cache_size_of_a_vllm_server_is_read_from_its_metrics() -> None:
    head = "# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n"
    one = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0\n'
    two = 'vllm:cache_config_info{block_size="32",engine="1",kv_cache_size_tokens="640",num_gpu_blocks="9"} 1.0\n'
    none = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="None"} 1.0\n'
    assert cache_tokens(head + one) == 3200
    assert cache_tokens(head + one + two) == 3840
    assert cache_tokens(head + none) == cache_tokens("") == 0


class Server:
    """State of a server with adapters."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.stamped = "default"

    async def load_adapter(self, name: str, directory: Path) -> None:
        assert name not in self.loaded
        self.loaded.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.loaded.remove(name)

    async def set_label(self, version: Version) -> None:
        self.stamped = str(version)

    async def label(self) -> str:
        return self.stamped

    async def answer(self, *tokens: int) -> AsyncGenerator[Chunk, None]:
        """A token a chunk; the last has a span for each label that was stamped meanwhile."""
        spans: list[tuple[str, int, int]] = []
        for number, token in enumerate(tokens):
            spans.append((self.stamped, number, number + 1))
            last = number == len(tokens) - 1
            yield Chunk(
                tokens=[token],
                logprobs=[-1.0],
                finish_reason="length" if last else "",
                spans=spans if last else None,
            )


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / ADAPTER_FILE).write_text("{}")
    return tmp_path


async def test_a_response_keeps_its_adapter_which_stays_loaded_as_long_as_it_runs(
    adapter: Path,
) -> None:
    server = Server()
    served = ServedAdapters(server)
    await served.load(adapter, Version(1, 1))
    first = served.newest
    running = served.labelled(first, server.answer(7, 8, 9))
    await anext(running)
    for step in (2, 3):  # the second is nobody's
        await served.load(adapter, Version(1, step))
        await anext(running) if step == 2 else None
    assert server.loaded == [first, served.newest]
    last = await anext(running)
    assert last.spans == [("1.1", 0, 3)]
    await running.aclose()
    assert server.loaded == [served.newest]


async def test_tokens_of_weights_that_others_labelled_keep_those_labels(adapter: Path) -> None:
    server = Server()
    served = ServedAdapters(server)
    await served.load(adapter, Version(1, 1))
    server.stamped = "theirs"
    chunks = [chunk async for chunk in served.labelled(served.newest, server.answer(7))]
    assert chunks[-1].spans == [("theirs", 0, 1)]


async def test_a_server_that_keeps_its_label_serves_no_adapter(adapter: Path) -> None:
    class Deaf(Server):
        async def set_label(self, version: Version) -> None: ...

    served = ServedAdapters(Deaf())
    with pytest.raises(InfraError, match=r"its weights are 'default', not 1\.1"):
        await served.load(adapter, Version(1, 1))
    assert served.newest == ""


async def test_without_an_adapter_the_base_model_answers(tmp_path: Path) -> None:
    server = Server()
    served = ServedAdapters(server)
    await served.load(tmp_path, Version(0, 0))
    assert (served.newest, server.loaded, server.stamped) == ("", [], "0.0")
