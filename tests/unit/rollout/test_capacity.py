"""How many requests a cache holds: never more than fit by what is asked and seen, never fewer than one."""

from __future__ import annotations

import random

from meshrl.rollout.capacity import Room, Running
from meshrl.rollout.engines._vllm.client import cache_tokens


def test_slots_are_the_only_bound_where_the_cache_is_unknown() -> None:
    assert Room(slots=64, longest=4096).capacity(0) == 64


def test_before_anything_is_asked_every_request_may_be_as_long_as_any() -> None:
    assert Room(slots=64, longest=100).capacity(1000) == 10
    assert Room(slots=4, longest=100).capacity(1000) == 4
    assert Room(slots=4, longest=5000).capacity(1000) == 1


def test_what_is_asked_for_is_reckoned_with_until_something_has_ended() -> None:
    room = Room(slots=64, longest=1000)
    first = room.begin(prompt=20, longest=100)
    assert (room.expected, room.capacity(1000)) == (100, 10)
    first.now = 50
    room.end(first, whole=True)
    assert (room.expected, room.capacity(1000)) == (50, 20)


def test_an_aborted_request_says_nothing_of_lengths() -> None:
    room = Room(slots=64, longest=1000)
    room.end(room.begin(prompt=20, longest=100), whole=False)
    assert room.expected == 100


def test_those_that_outgrow_what_was_reckoned_leave_less_room() -> None:
    room = Room(slots=64, longest=1000)
    short = room.begin(prompt=10, longest=500)
    short.now = 100
    room.end(short, whole=True)
    long = room.begin(prompt=10, longest=500)
    assert room.capacity(1000) == 1 + 9
    long.now = 450
    assert room.capacity(1000) == 1 + 5


def test_requests_that_keep_to_the_capacity_fit() -> None:
    """Whatever their lengths, once the longest of them has been seen."""
    dice = random.Random(7)
    room, cache, running = Room(slots=256, longest=400), 4_000, list[Running]()
    longest = room.begin(prompt=100, longest=400)
    longest.now = 400
    room.end(longest, whole=True)
    for _ in range(2_000):
        while len(running) < room.capacity(cache):
            prompt = dice.randint(1, 100)
            running.append(room.begin(prompt=prompt, longest=prompt + dice.randint(1, 300)))
        for each in running:
            each.now = min(each.longest, each.now + dice.randint(0, 20))
        assert sum(each.now for each in running) <= cache
        ended = [each for each in running if each.now == each.longest]
        running = [each for each in running if each.now < each.longest]
        for each in ended:
            room.end(each, whole=False)


def test_a_vllm_server_tells_its_cache_by_the_labels_of_its_metrics() -> None:
    head = "# HELP vllm:cache_config_info Information\n# TYPE vllm:cache_config_info gauge\n"
    one = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0\n'
    two = 'vllm:cache_config_info{block_size="32",engine="1",kv_cache_size_tokens="640",num_gpu_blocks="9"} 1.0\n'
    none = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="None"} 1.0\n'
    assert cache_tokens(head + one) == 3200
    assert cache_tokens(head + one + two) == 3840
    assert cache_tokens(head + none) == cache_tokens("") == 0
