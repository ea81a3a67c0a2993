"""Rows of the queue that are trained as several, and SPIN's pairs of what the policy and what the data say."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from meshrl.config import load_recipe, train_spec
from meshrl.contract.errors import ConfigError
from meshrl.contract.rows import parts_column, rollout_write, text_column
from meshrl.contract.types import PARTS, Outcome, RowPart, Trajectory, Uid, Version
from meshrl.launcher.learner import build_learner
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch
from meshrl.trainer.algorithms.advantages.data_answer import compute
from meshrl.trainer.algorithms.needs import rollout_is_old
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.config import AlgorithmConfig
from meshrl.trainer.learner.experience import assemble, schedule
from meshrl.trainer.learner.learner import Learned
from meshrl.trainer.learner.unfolding import TrainedPart, Unfolded, branches, unfolded
from meshrl.trainer.loop.batch_source import UntrainableError, trainable
from meshrl.trainer.ranks.world import World

from . import named_algorithms, rank_work

SPIN = "algorithm={name: spin, adv_estimator: data_answer}"


@pytest.fixture(scope="module")
def world() -> World:
    return World.start("cpu")


class TwoRanks:
    """One of two ranks in threads, as far as rows are exchanged."""

    data_size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, shares: list[Any]) -> None:
        self.data_rank, self._barrier, self._shares = rank, barrier, shares

    def gather_shares(self, own: Any) -> list[Any]:
        self._shares[self.data_rank] = own
        self._barrier.wait(timeout=30)
        found = list(self._shares)
        self._barrier.wait(timeout=30)
        return found


def halves(row: Trajectory) -> list[TrainedPart]:
    """A row as two: the second begins at the middle of the response and keeps two tokens before it."""
    middle = (row.prompt_length + len(row.tokens)) // 2
    cutting = [(0, middle), (middle - 2, len(row.tokens))]
    parts = []
    for start, end in cutting:
        mask = row.loss_mask[start:end].copy()
        mask[: 2 if start else 0] = 0
        parts.append(
            TrainedPart(
                row=replace(
                    row,
                    tokens=row.tokens[start:end],
                    loss_mask=mask,
                    rollout_logprobs=row.rollout_logprobs[start:end],
                    spans=(),
                ),
                start=start,
            )
        )
    return parts


@pytest.mark.parametrize("together", [True, False])
def test_every_part_is_on_one_rank_once_and_ranks_agree(together: bool) -> None:
    rows = {row.uid: row for row in rank_work.trajectories()}
    made = schedule(
        rank_work.batch(list(rows.values())), ranks=2, max_tokens=48, mini_batch_groups=3
    )
    barrier, shares = threading.Barrier(2), [None, None]

    def of_rank(rank: int) -> Unfolded:
        return unfolded(
            made,
            [halves(rows[uid]) for uid in made.uids(rank)],
            cast(World, TwoRanks(rank, barrier, shares)),
            max_tokens=48,
            together=together,
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(of_rank, range(2))
    assert first.schedule == second.schedule and first.offsets == second.offsets
    assert first.origin.tolist() == sorted([*range(10), *range(10)])
    placed = sorted([*first.schedule.own(0), *first.schedule.own(1)])
    assert placed == list(range(20))
    for rank, found in enumerate((first, second)):
        own = found.schedule.own(rank)
        for place, part in zip(own, found.own, strict=True):
            row = found.schedule.rows[place]
            assert row.uid == part.uid and row.num_tokens == len(part.tokens)
    for mini in first.schedule.mini_batches:
        assert len(mini.ranks[0]) == len(mini.ranks[1])
        for micro in (micro for rank in mini.ranks for micro in rank):
            tokens = [first.schedule.rows[place].num_tokens for place in micro]
            assert len(micro) <= 2 or sum(tokens) <= 48
            if together:
                assert sorted(micro) == [
                    p for at in sorted(set(micro)) if at % 2 == 0 for p in (at, at + 1)
                ]


def test_columns_of_parts_lie_where_their_tokens_are_in_the_row(world: World) -> None:
    rows = rank_work.trajectories()
    made = schedule(rank_work.batch(rows), ranks=1, max_tokens=4096, mini_batch_groups=None)
    own = rank_work.own_rows(made, rows)
    whole = assemble(made, own, world)
    parts = unfolded(made, [halves(r) for r in own], world, max_tokens=4096, together=False)
    experience = assemble(parts.schedule, parts.own, world)
    # What each part was sampled with is what its row was: as a column of tokens, there and back.
    tokens = torch.cat(
        [
            torch.from_numpy(part.tokens[part.prompt_length :].astype(np.float32))
            for part in ordered(parts.schedule.own(0), parts.own)
        ]
    )
    back = parts.folded(tokens, experience, whole, -1)
    want = torch.cat(
        [
            torch.from_numpy(row.tokens[row.prompt_length :].astype(np.float32))
            for row in ordered(made.own(0), own)
        ]
    )
    mask = whole.ragged.mask
    assert torch.equal(back[mask], want[mask])


def ordered(places: Sequence[int], rows: Sequence[Trajectory]) -> list[Trajectory]:
    return [row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])]


def test_branches_are_trained_as_rows_of_their_own_and_judged_as_one_episode(
    tiny_path: Path, world: World
) -> None:
    # Two episodes of one prompt earn 1 and 0; the second step of each sees another history than its first.
    draw = np.random.default_rng(2)
    row = named_algorithms.trajectory_of
    steps = [
        [row("t", draw.integers(0, 37, 3 + n), draw.integers(0, 37, 4 + n)) for n in range(2)]
        for _ in range(2)
    ]
    grpo = ("algorithm={adv_estimator: dr_grpo}", "actor.loss_agg_mode=token-mean")
    found = []
    for parts in (True, False):
        recipe = named_algorithms.recipe_of(
            "grpo", tiny_path, *grpo, "actor.use_kl_loss=false", "actor.policy_loss.loss_mode=vanilla",
            *named_algorithms.GRADIENTS, "queue.max_staleness=0",
            f"rollout.n={2 if parts else 4}",
            *(("rollout.program_options={branch: each}",) if parts else ()),
        )  # fmt: skip
        learner = named_algorithms.learner_of(recipe, world)
        rows = (
            [episode(of, index) for index, of in enumerate(steps)]
            if parts
            else [
                replace(step, uid=Uid("r", "t", 2 * index + n), reward=1.0 - index)
                for index, of in enumerate(steps)
                for n, step in enumerate(of)
            ]
        )
        shown: list[Learned] = []
        start = named_algorithms.weights(learner)
        metrics = named_algorithms.learn(learner, recipe, rows, 0, shown.append)
        found.append((named_algorithms.weights(learner), start, metrics, shown[0]))
    (ours, start, metrics, shown_parts), (theirs, _, _, _) = found
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=2e-5)
    assert any(not torch.equal(ours[key], start[key]) for key in ours)
    assert metrics["batch/rows"] == 4
    # What is logged are two rows: the advantage of the episode at each sampled token, none at what it was shown.
    whole = shown_parts.experience
    assert whole.ragged.num_rows == 2
    expected = torch.where(whole.ragged.mask, torch.tensor([0.5, -0.5])[whole.ragged.rows], 0.0)
    torch.testing.assert_close(shown_parts.targets.advantages, expected)
    assert torch.equal(~shown_parts.logprobs.isnan(), whole.ragged.mask)


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm={adv_estimator: grpo}", "actor.use_kl_loss=true"),
        ("algorithm={adv_estimator: grpo, use_kl_in_reward: true}",),
        ("algorithm={adv_estimator: gae, lam: 0.7, gamma: 0.9}",),
        ("algorithm={adv_estimator: gae, lam: 0.7, gamma: 0.9}", "critic.pretrain_steps=1"),
    ],
    ids=["kl-loss", "kl-in-reward", "critic", "critic-pretrained"],
)
def test_a_conversation_in_branches_is_trained_as_in_one_sequence(
    settings: tuple[str, ...], tiny_path: Path, world: World
) -> None:
    # The second branch repeats the first, with what was observed after it, and adds a turn: as one sequence would.
    draw = np.random.default_rng(4)
    rows, in_branches = [], []
    for index in range(2):
        row = two_turns(draw, index)
        rows.append(row)
        in_branches.append(repeated(row))
    found = []
    for given, branched in ((rows, False), (in_branches, True)):
        recipe = named_algorithms.recipe_of(
            "grpo", tiny_path, *named_algorithms.GRADIENTS, *settings,
            "actor.policy_loss.loss_mode=vanilla", "actor.loss_agg_mode=token-mean",
            "queue.max_staleness=0", "rollout.n=2",
            *(("rollout.program_options={branch: each}",) if branched else ()),
        )  # fmt: skip
        learner = named_algorithms.learner_of(recipe, world)
        start = named_algorithms.weights(learner)
        named_algorithms.learn(learner, recipe, given)
        found.append((start, named_algorithms.weights(learner)))
    (start, ours), (_, theirs) = found
    assert any(not torch.equal(ours[key], start[key]) for key in ours)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=2e-5)


def two_turns(draw: np.random.Generator, index: int) -> Trajectory:
    """One sequence of two turns with an observation between them, with the log-probs of a reference."""
    row = named_algorithms.trajectory_of("t", [1, 2, 3], draw.integers(0, 37, 9))
    mask = row.loss_mask.copy()
    mask[6:8] = 0
    return replace(
        row,
        uid=Uid("r", "t", index),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, row.rollout_logprobs, 0).astype(np.float32),
        ref_logprobs=-draw.uniform(1, 4, 12).astype(np.float32),
        reward=float(index),
    )


def repeated(row: Trajectory) -> Trajectory:
    """The same conversation as two branches: the first turn, then all of it with the first turn as context."""
    first = slice(0, 6)
    known = row.loss_mask.copy()
    known[first] = 0

    def both(column: np.ndarray[Any, Any], again: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([column[first], again])

    assert row.ref_logprobs is not None
    return replace(
        row,
        tokens=both(row.tokens, row.tokens),
        loss_mask=both(row.loss_mask, known),
        rollout_logprobs=both(
            row.rollout_logprobs, np.where(known, row.rollout_logprobs, 0).astype(np.float32)
        ),
        ref_logprobs=both(row.ref_logprobs, row.ref_logprobs),
        spans=(
            replace(row.spans[0], end=6),
            replace(row.spans[0], start=6 + 8, end=6 + 12),
        ),
        parts=(RowPart(start=0, anchors=("a",)), RowPart(start=6, anchors=("b",))),
    )


def episode(steps: Sequence[Trajectory], index: int) -> Trajectory:
    """One row of the queue: its steps, end to end."""
    starts = np.cumsum([0, *(len(step.tokens) for step in steps)]).tolist()
    return Trajectory(
        uid=Uid("r", "t", index),
        tokens=np.concatenate([step.tokens for step in steps]),
        loss_mask=np.concatenate([step.loss_mask for step in steps]),
        rollout_logprobs=np.concatenate([step.rollout_logprobs for step in steps]),
        spans=tuple(
            replace(span, start=span.start + start, end=span.end + start)
            for step, start in zip(steps, starts, strict=False)
            for span in step.spans
        ),
        parts=tuple(RowPart(start=start, anchors=(f"o{start}",)) for start in starts[:-1]),
        reward=1.0 - index,
    )


def test_parts_of_a_row_whose_first_says_nothing_lie_where_they_are(world: World) -> None:
    silent = named_algorithms.trajectory_of("t0", [1, 2, 3], [])
    speaks = named_algorithms.trajectory_of("t0", [4, 5], [6, 7])
    row = replace(episode([silent, speaks], 0), uid=Uid("r", "t0", 0))
    made = schedule(rank_work.batch([row]), ranks=1, max_tokens=99, mini_batch_groups=None)
    found = unfolded(made, [branches(row)], world, max_tokens=99, together=False)
    whole = assemble(made, [row], world)
    parts = assemble(found.schedule, found.own, world)
    assert found.folded(torch.tensor([8.0, 9.0]), parts, whole, 0).tolist() == [8, 9]
    assert found.spread(torch.tensor([8.0, 9.0]), parts, whole).tolist() == [8, 9]


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm={adv_estimator: dr_grpo}",),
        ("algorithm={adv_estimator: gigpo}",),
        ("algorithm={adv_estimator: gae, lam: 0.7, gamma: 0.9}",),
        ("algorithm={adv_estimator: dr_grpo, group_by_seat: false}",),
    ],
    ids=["dr-grpo", "gigpo", "critic", "one-score"],
)
def test_each_seat_of_an_episode_has_its_own_reward_and_baseline(
    settings: tuple[str, ...], tiny_path: Path, world: World, tmp_path: Path
) -> None:
    # Games that x wins and loses; in a third one o never had a turn.
    draw = np.random.default_rng(5)
    earned = [{"x": 1.0, "o": 0.0}, {"x": 0.0, "o": 0.75}, {"x": 0.25, "o": 9.0}]
    games: list[Trajectory] = []
    plain: list[Trajectory] = []
    together = "false" in settings[0]
    for index, rewards in enumerate(earned):
        seats = [
            named_algorithms.trajectory_of("t", [1, 2, n], draw.integers(0, 37, 4 + n))
            for n in range(2 if index < 2 else 1)
        ]
        row = episode(seats, index)
        parts = [replace(part, seat=name) for part, name in zip(row.parts, "xo", strict=False)]
        row = replace(row, reward=0.5 * index, parts=tuple(parts), reward_components=rewards)
        games.append(row)
        plain += [
            replace(
                seat,
                uid=Uid("r", "t" if together else f"t{name}", 2 * index + number),
                reward=row.reward if together else rewards[name],
            )
            for number, (seat, name) in enumerate(zip(seats, "xo", strict=False))
        ]
    (tmp_path / "game.py").write_text("async def play(episode): ...\n")
    options = f"{{function: '{tmp_path / 'game.py'}:play', seats: {{x: {{}}, o: {{}}}}}}"
    found = []
    for rows, program in ((games, "seats"), (plain, "single_turn")):
        recipe = named_algorithms.recipe_of(
            "grpo", tiny_path, *named_algorithms.GRADIENTS, "actor.use_kl_loss=false", *settings,
            "actor.policy_loss.loss_mode=vanilla", "actor.loss_agg_mode=token-mean",
            "queue.max_staleness=0", f"rollout.program={program}",
            f"rollout.n={3 if program == 'seats' else 6}",
            *((f"rollout.program_options={options}",) if program == "seats" else ()),
        )  # fmt: skip
        learner = named_algorithms.learner_of(recipe, world)
        shown: list[Learned] = []
        start = named_algorithms.weights(learner)
        named_algorithms.learn(learner, recipe, rows, 0, shown.append)
        found.append((named_algorithms.weights(learner), start, shown[0]))
    (ours, start, whole), (theirs, _, _) = found
    assert any(not torch.equal(ours[key], start[key]) for key in ours)
    if not together:
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=2e-5)
    # Logged are the queue's rows, with what each token was trained with.
    assert whole.experience.ragged.num_rows == 3
    if "dr_grpo" in settings[0]:
        x = torch.tensor([1.0, 0.0, 0.25]) - 1.25 / 3
        o = torch.tensor([-0.375, 0.375])
        if together:
            x = torch.tensor([-0.5, 0.0, 0.5])
            o = x[:2]
        want = [x[0]] * 4 + [o[0]] * 5 + [x[1]] * 4 + [o[1]] * 5 + [x[2]] * 4
        mask = whole.experience.ragged.mask
        torch.testing.assert_close(whole.targets.advantages[mask], torch.stack(want))


def test_a_row_without_the_reward_of_its_seat_is_not_trained() -> None:
    row = episode([named_algorithms.trajectory_of("t", [1, 2], [3, 4])], 0)
    row = replace(row, parts=(RowPart(start=0, anchors=("a",), seat="x"),))
    written = rollout_write(row, Outcome.OK, "stop", Version(1, 0)).columns
    reward = {"reward": np.ones(1, dtype=np.float32), "reward_hash": text_column("h")}
    columns = {**written, **reward, PARTS: parts_column(row.parts)}
    for components, said in (("{}", "no reward component 'x'"), ('{"x": 1}', "")):
        given = columns | {"reward_components": text_column(components)}
        if said:
            with pytest.raises(UntrainableError, match=said):
                trainable(row.uid, given, vocabulary=0)
        else:
            assert trainable(row.uid, given, vocabulary=0).parts == row.parts


def check_refused(
    rollout: str, code: str, wrong: list[str], line: str, model: Path, folder: Path
) -> None:
    """A recipe whose rows have parts is good, and with `wrong` refused in `line`."""
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "mine.py").write_text(code)
    path = folder / "my.yaml"
    path.write_text(
        f"model: {{path: {model}}}\ndata: {{train_files: [{folder / 'rows.jsonl'}],"
        " max_prompt_length: 8, max_response_length: 8}\n"
        f"rollout: {{name: torch, n: 2, {rollout}, function: '{folder / 'mine.py'}:f'}}}}\n"
    )
    (rows,) = [s for s in train_spec(load_recipe(path, [])).stages if s.name == "rollout"]
    assert PARTS in rows.writes
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, wrong)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("algorithm.adv_estimator=prime", "each, and the reward model of algorithm.prime"),
        ("actor.policy_loss.loss_mode=spin", "each, and the loss spin"),
    ],
)
def test_what_reads_a_row_as_one_sequence_is_refused(
    wrong: str, line: str, text_model: Path, tmp_path: Path
) -> None:
    each = "program: openai, program_options: {branch: each"
    check_refused(
        each, "def f(base_url, api_key, task): ...\n", [wrong], line, text_model, tmp_path
    )


def test_a_baseline_of_greedy_rows_is_refused_of_seats(text_model: Path, tmp_path: Path) -> None:
    seats = "program: seats, program_options: {seats: {x: {}}"
    wrong = ["algorithm.adv_estimator=remax", "queue.group_policy=all"]
    line = "rollout.program: seats, and algorithm.adv_estimator remax"
    check_refused(seats, "async def f(episode): ...\n", wrong, line, text_model, tmp_path)


class TestSpin:
    """A model of letters that is shown what to answer."""

    @pytest.fixture
    def recipe_file(self, text_model: Path, tmp_path: Path) -> Path:
        lines = [
            {
                "prompt": f"ask{letter}",
                "answer": "x",
                "data_source": "openai/gsm8k",
                "text": f"say{letter}{letter}",
            }
            for letter in "abcdefgh"
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        path = tmp_path / "spin.yaml"
        path.write_text(
            f"model: {{path: {text_model}}}\n"
            f"data: {{train_files: [{tmp_path / 'rows.jsonl'}], response_key: text, train_batch_size: 8,"
            " max_prompt_length: 8, max_response_length: 8}\n"
            "actor: {optim: {lr: 3.0e-3, lr_warmup_steps: 0, weight_decay: 0.0}, ppo_mini_batch_size: 4}\n"
            "rollout: {name: torch, n: 1}\n"
        )
        return path

    def test_the_datas_answers_become_likelier_and_the_policys_own_less(
        self, recipe_file: Path, world: World
    ) -> None:
        recipe = load_recipe(recipe_file, [SPIN])
        learner = build_learner(recipe, None, world)
        rows = said(recipe_file)
        shown: list[Learned] = []
        before = named_algorithms.row_logprobs(learner, recipe, rows)
        answers = [replace(row, **answered(row)) for row in rows]
        chosen = named_algorithms.row_logprobs(learner, recipe, answers)
        for step in range(4):
            metrics = named_algorithms.learn(learner, recipe, rows, step, shown.append)
        assert (named_algorithms.row_logprobs(learner, recipe, rows) < before).all()
        assert (named_algorithms.row_logprobs(learner, recipe, answers) > chosen).all()
        # Of two updates the first begins at the opponent, with a margin of 0; the second is right about every pair.
        assert metrics["actor/dpo_accuracy"] == 0.5
        # What is logged are the queue's rows, with their signs.
        assert shown[0].experience.ragged.num_rows == 8
        assert (shown[0].targets.advantages == -1).all()
        assert shown[0].logprobs.shape == (32,) and torch.isfinite(shown[0].logprobs).all()

    def test_log_probs_of_the_opponent_are_computed(self, recipe_file: Path) -> None:
        recipe = load_recipe(recipe_file, [SPIN, "queue.max_staleness=4"])
        assert not rollout_is_old(recipe.algorithm, recipe.actor, on_policy=False)

    @pytest.mark.parametrize(
        ("wrong", "line"),
        [
            ("rollout.n=2", "rollout.n: 2: algorithm.adv_estimator data_answer pairs one answer"),
            ("data.response_key=textt", "textt is None, want the text of the data's own"),
            ("actor.policy_loss.loss_mode=vanilla", "actor.policy_loss.loss_mode: algorithm.adv"),
            ("actor.use_kl_loss=true", "want no reference"),
            ("algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction: "),
            ("actor.recompute_old_log_probs=false", "actor.recompute_old_log_probs: "),
            ("algorithm.use_pf_ppo=true", "algorithm.use_pf_ppo: "),
            ("rollout.program=tools", "rollout.program"),
        ],
    )
    def test_what_pairs_cannot_have_is_refused(
        self, recipe_file: Path, wrong: str, line: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            load_recipe(recipe_file, [SPIN, wrong])
        assert line in str(caught.value)


def said(recipe_file: Path) -> list[Trajectory]:
    """Four letters of the policy's own to each prompt."""
    draw = np.random.default_rng(1)
    row = named_algorithms.trajectory_of
    return [
        row(f"0-{n}", letters("ask" + "abcdefgh"[n]), draw.integers(0, 36, 4)) for n in range(8)
    ]


def letters(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def answered(row: Trajectory) -> dict[str, Any]:
    """The columns of the data's answer to `row`'s prompt."""
    letter = int(row.tokens[row.prompt_length - 1])
    answer = [*letters("say"), letter, letter, 36]
    tokens = np.array([*row.tokens[: row.prompt_length], *answer], dtype=np.int32)
    mask = np.array([0] * row.prompt_length + [1] * len(answer), dtype=np.uint8)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "rollout_logprobs": np.zeros(len(tokens), np.float32),
    }


def test_a_pair_of_which_one_side_says_nothing_has_no_sign() -> None:
    ragged = Ragged.from_lengths(
        torch.tensor([2, 1, 0, 1]), torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    )
    batch = AdvantageBatch(
        ragged=ragged,
        token_rewards=torch.zeros(4),
        data_answers=torch.tensor([False, True, False, True]),
    )
    assert compute(batch, AlgorithmConfig()).advantages.tolist() == [-1, -1, 1, 0]
