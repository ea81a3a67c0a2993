"""How many requests a KV cache holds: never more than the estimate says fit, never fewer than one."""

from __future__ import annotations

import random

from meshrl.rollout.engines.vllm import cache_tokens
from meshrl.rollout.server_engine.capacity import CacheCapacity, RunningRequest


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
