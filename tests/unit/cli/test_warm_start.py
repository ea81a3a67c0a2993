"""A warm start: one stage after the other, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Stage, warm_start
from meshrl.trainer.offline.sft import SftProgress

PAIRS = [(f"{n}+{n}=", f"#{n + n}") for n in range(8)]
STAGES = [
    Stage(name="big steps", rows=PAIRS, steps=4, lr=3e-3, seed=0, enough=1.0),
    Stage(name="tiny ones", rows=PAIRS, steps=1, lr=1e-9, seed=0),
]


def start(directory: Path) -> dict[str, SftProgress]:
    """The last report of each stage."""
    directory.mkdir(exist_ok=True)
    seen: dict[str, SftProgress] = {}
    warm_start(directory, STAGES, PAIRS[:1], seed=0, report=lambda n, p: seen.update({n: p}))
    return seen


def test_each_stage_begins_with_what_the_one_before_it_wrote_and_only_the_first_is_measured(
    tmp_path: Path,
) -> None:
    seen = start(tmp_path)
    assert list(seen) == ["big steps", "tiny ones"]
    assert seen["big steps"].exact_match is not None and seen["tiny ones"].exact_match is None
    random, first, last = (
        load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"]
        for name in ("random", "big_steps", "model")
    )
    assert abs(last - first).max() < 1e-6 < 1e-3 < abs(last - random).max()


@pytest.mark.parametrize(("variable", "threads"), [(None, 1), ("2,1", 2)])
def test_it_computes_on_one_thread_unless_told_and_leaves_torch_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    seen: set[int] = set()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        warm_start(
            tmp_path,
            STAGES[1:],
            [],
            seed=0,
            report=lambda _name, _now: seen.add(torch.get_num_threads()),
        )
        assert (seen, torch.get_num_threads()) == ({threads}, 2)
    finally:
        torch.set_num_threads(before)


def test_a_finished_warm_start_is_kept_and_one_that_was_interrupted_begins_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()  # without its config.json
    assert start(tmp_path)
    assert not start(tmp_path)


def test_rows_are_pairs_or_what_sft_reads(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    stage = Stage(name="talk", rows=[talk, ("a", "bc")], steps=1, lr=1e-3, seed=0, enough=1.0)
    seen: list[SftProgress] = []
    warm_start(
        tmp_path,
        [stage],
        [talk],
        seed=0,
        report=lambda _, now: seen.append(now),
        tokenizer=chat_tokenizer([]),
    )
    assert seen[-1].exact_match is not None and seen[-1].loss > 0


def test_a_chat_tokenizer_keeps_the_parts_of_a_chat_and_the_words_whole() -> None:
    tokenizer = chat_tokenizer(["<call>"])
    tokens = tokenizer.encode("<|user|>a b<|end|><call>")
    assert len(tokens) == 6 and tokenizer.decode(tokens) == "<|user|>a b<|end|><call>"
    turn = [{"role": "user", "content": "a b"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "<|user|>a b<|end|>"
