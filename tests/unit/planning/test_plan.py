"""A fleet in virtual time, and the command that divides GPUs: deterministic, and as anybody would expect."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.cli.root import main
from meshrl.config.loading import load_recipe
from meshrl.contract.errors import UserError
from meshrl.contract.types import OnUpdate
from meshrl.planning.planner import PlanQuestion, plan
from meshrl.planning.scale import StuckError, VirtualLoop, run_setting
from meshrl.planning.setting import Lengths, Seats, Setting

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes/gsm8k/recipe.yaml"
SMALL = Setting(
    workers=2,
    slots=8,
    tokens_per_s=800.0,
    lengths=Lengths(mean=200, p99=1000, most=1500),
    group=4,
    batch_groups=4,
    step_s=4.0,
    transfer_s=0.5,
    most_rows=400,
)


def test_equal_settings_have_equal_outlooks() -> None:
    assert run_setting(SMALL) == run_setting(SMALL)
    assert run_setting(SMALL) != run_setting(replace(SMALL, seed=1))


def test_twice_the_trainer_never_gives_fewer_samples() -> None:
    slow = run_setting(replace(SMALL, step_s=16.0))
    fast = run_setting(replace(SMALL, step_s=8.0))
    assert slow.samples_per_h <= fast.samples_per_h
    assert slow.trainer_idle < fast.trainer_idle


def test_twice_the_workers_never_give_fewer_samples() -> None:
    few = run_setting(replace(SMALL, workers=1, step_s=0.5))
    many = run_setting(replace(SMALL, workers=2, step_s=0.5))
    assert few.samples_per_h < many.samples_per_h


def test_a_trainer_that_never_waits_makes_a_step_in_every_step() -> None:
    seen = run_setting(replace(SMALL, step_s=60.0, call_s=0.0, row_s=0.0))
    assert seen.samples_per_h == pytest.approx(3600 / 60 * 16)
    assert seen.trainer_idle == pytest.approx(0, abs=1e-9)


def test_rows_of_equal_length_take_what_arithmetic_says() -> None:
    alike = Lengths(mean=200, p99=200, most=200)
    seen = run_setting(
        replace(
            SMALL,
            lengths=alike,
            max_staleness=0,
            on_update=OnUpdate.DRAIN,
            call_s=0.0,
            row_s=0.0,
        )
    )
    # 16 rows in 16 slots at 100 tokens/s: 2 s; a step of 4 s; a transfer of 0.5 s.
    assert seen.samples_per_h == pytest.approx(3600 / 6.5 * 16, rel=0.1)
    assert seen.staleness == {0: 1.0}


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_row_is_older_than_the_bound(bound: int) -> None:
    seen = run_setting(replace(SMALL, max_staleness=bound, step_s=2.0))
    assert max(seen.staleness) <= bound


def test_rows_that_end_while_others_are_written_are_written_too() -> None:
    short = Lengths(mean=16, p99=32, most=32)
    fast = replace(SMALL, workers=1, slots=64, tokens_per_s=1e8, lengths=short, step_s=1e-6)
    assert run_setting(replace(fast, transfer_s=0.0)).samples_per_h > 0


def test_looser_bounds_give_more() -> None:
    tight, loose = (run_setting(replace(SMALL, max_staleness=bound)) for bound in (0.0, math.inf))
    assert tight.samples_per_h < loose.samples_per_h


def test_a_tool_that_works_keeps_its_slot() -> None:
    alike = Lengths(mean=200, p99=200, most=200)
    calls = replace(SMALL, lengths=alike, step_s=0.1, tool_calls=20, tool_s=1.0)
    seen = run_setting(replace(calls, max_staleness=math.inf))
    # 200 tokens at 100 a second, and 20 s in tools: 16 slots.
    assert seen.samples_per_h == pytest.approx(3600 * 16 / 22, rel=0.1)
    assert seen.slots_held > 0.95
    assert seen.rollout_idle > 0.85


@pytest.mark.parametrize("at_once", [1, 4])
def test_samples_queue_for_the_places_of_a_reward(at_once: int) -> None:
    scored = Seats(count=at_once, seconds=2.0, every_s=2.0)
    asynchronous = replace(SMALL, step_s=0.1, max_staleness=math.inf)
    seen = run_setting(replace(asynchronous, reward=(scored,)))
    assert seen.samples_per_h == pytest.approx(3600 * at_once / 2, rel=0.05)
    assert seen.reward_load > 0.95


def test_a_sample_waits_for_the_slowest_part_of_its_reward() -> None:
    fast, slow = Seats(count=9, seconds=1, every_s=1), Seats(count=1, seconds=4, every_s=4)
    asynchronous = replace(SMALL, step_s=0.1, max_staleness=math.inf)
    seen = run_setting(replace(asynchronous, reward=(fast, slow)))
    assert seen.samples_per_h == pytest.approx(3600 / 4, rel=0.05)


def test_sync_batches_begin_and_end_together() -> None:
    lengths = Lengths(mean=200, p99=1000, most=1500)
    synchronous = replace(SMALL, lengths=lengths, max_staleness=0, on_update=OnUpdate.DRAIN)
    apart = run_setting(replace(synchronous, batch_groups=8, step_s=0.1))
    together = run_setting(replace(synchronous, batch_groups=8, step_s=0.1, sync_batches=True))
    assert together.samples_per_h < apart.samples_per_h


def test_a_mesh_that_waits_for_itself_is_told() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(StuckError):
        runner.run(waits())


def test_the_queue_also_renews_the_leases_of_those_who_hold_rows() -> None:
    long = Lengths(mean=60_000, p99=60_000, most=60_000)  # 600 s a row: nothing else costs calls
    fleet = replace(SMALL, workers=50, slots=1, tokens_per_s=100.0, lengths=long)
    fleet = replace(fleet, step_s=0.1, max_staleness=math.inf)
    often, seldom = (run_setting(replace(fleet, renewals_per_s=3 / ttl)) for ttl in (5.0, 30.0))
    assert often.queue_load == pytest.approx(50 * 0.6 * fleet.call_s, rel=0.1)
    assert seldom.queue_load == pytest.approx(often.queue_load / 6, rel=0.2)


def test_a_plan_renews_as_often_as_the_recipe_says() -> None:
    asked = PlanQuestion(
        gpus=8, rollout_gpus=4, params=1e9, tokens_per_s=4.0, train_tokens_per_s=1e6
    )
    words = ["data.train_batch_size=8", "rollout.slots=4"]
    loads = [
        plan(load_recipe(RECIPE, [*words, *more], check=False), asked).best.outlook.queue_load
        for more in ((), ("queue.lease_ttl_s=50",))
    ]
    assert loads[1] < loads[0] / 3


def test_lengths_have_the_mean_and_the_percentile_that_were_asked_for() -> None:
    lengths = Lengths(mean=1000, p99=5000, most=1 << 20)
    drawn = sorted(lengths.draw(0, task, 0) for task in range(20_000))
    assert sum(drawn) / len(drawn) == pytest.approx(1000, rel=0.05)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(5000, rel=0.1)


def test_the_best_split_leaves_no_better_one_among_those_tried() -> None:
    answer = plan(
        load_recipe(RECIPE, ["data.train_batch_size=8"], check=False),
        PlanQuestion(gpus=8, params=1e9, tokens_per_s=4000.0, train_tokens_per_s=2000.0),
    )
    assert answer.best.outlook.samples_per_h == max(
        split.outlook.samples_per_h for split in answer.tried
    )
    assert all(split.rollout_gpus + split.trainer_gpus == 8 for split in answer.tried)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (PlanQuestion(gpus=1), "--gpus 1: want at least 2"),
        (PlanQuestion(gpus=4, rollout_gpus=4), "--rollout-gpus 4: want a multiple"),
        (PlanQuestion(gpus=4, length_mean=1e6), "--length-mean 1e+06: no response is longer"),
        (
            PlanQuestion(gpus=4, length_mean=100, length_p99=50),
            "--length-p99 50: want 1 to 15 times",
        ),
    ],
)
def test_a_question_without_an_answer_is_named(asked: PlanQuestion, problem: str) -> None:
    with pytest.raises(UserError, match=problem.replace("+", r"\+")):
        plan(load_recipe(RECIPE, check=False), asked)


FUNCTIONS = {
    "plain": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n",
    "async": "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n",
}


@pytest.mark.parametrize(
    ("function", "changes", "asked", "says"),
    [
        ("plain", [], {"reward_s": 0.5}, "one at a time in each of reward.workers 1"),
        ("plain", ["reward.workers=3"], {"reward_s": 0.5}, "in each of reward.workers 3"),
        ("async", [], {"reward_s": 0.5}, "32 at once (`async def`) in each of reward.workers 1"),
        ("gone", [], {"reward_s": 0.5}, "one at a time"),
        (
            "plain",
            ["reward.judges=[{kind: http, options: {url: 'http://judge', concurrency: 4}}]"],
            {"judge_s": 2.0},
            "judge http of 2 s, 4 at once",
        ),
        (
            "plain",
            ["reward.judges=[{kind: generative, options: {url: 'http://judge', model: m}}]"],
            {"judge_s": 2.0},
            "judge generative of 2 s, 32 at once",
        ),
        (
            "plain",
            ["reward.judges=[{kind: model, options: {path: rm, batch_size: 4}}]"],
            {"judge_s": 2.0},
            "judge model of 2 s, 1 at once, each of 4 samples",
        ),
        ("plain", [], {"judge_s": 2.0}, "takes no time"),
    ],
)
def test_a_plan_says_how_many_samples_the_reward_scores_at_once(
    function: str, changes: list[str], asked: dict[str, float], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "reward.py"
    if function in FUNCTIONS:
        path.write_text(FUNCTIONS[function])
    words = [f"reward.custom_reward_function.path={path}", "data.train_batch_size=2", *changes]
    question = PlanQuestion(gpus=2, params=1e9, step_s=1.0, **asked)
    answer = plan(load_recipe(RECIPE, words, check=False), question)
    assert any(says in each for each in answer.assumptions if each.startswith("reward: "))


def test_a_reward_that_is_scored_one_by_one_bounds_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTIONS["plain"])
    words = [f"reward.custom_reward_function.path={path}", "data.train_batch_size=128"]
    question = PlanQuestion(gpus=8, rollout_gpus=4, params=1e9, reward_s=0.5)
    answer = plan(load_recipe(RECIPE, words, check=False), question)
    assert answer.scale > 1
    assert answer.best.outlook.samples_per_h == pytest.approx(7200, rel=0.05)
    assert answer.best.bottleneck == "reward"


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ([], {"gpus": 1_000_000}),
        (["rollout.n=2048", "data.train_batch_size=512"], {"gpus": 8}),
        (["rollout.n=2", "data.train_batch_size=2", "queue.max_staleness=500"], {"gpus": 8}),
        (["data.max_response_length=1000000"], {"gpus": 64, "params": 4e12}),
        ([], {"gpus": 8, "tool_calls": 100_000, "tool_s": 3.0}),
        ([], {"gpus": 8, "reward_s": 1e6}),
        ([], {"gpus": 8, "tokens_per_s": 1e12, "train_tokens_per_s": 1e15}),
    ],
    ids=["fleet", "groups", "staleness", "lengths", "tools", "reward", "speed"],
)
def test_a_plan_of_any_size_simulates_about_as_many_rows(
    changes: list[str], asked: dict[str, float]
) -> None:
    recipe = load_recipe(RECIPE, changes, check=False)
    tried: list[int] = []
    gpus = int(asked["gpus"])
    question = PlanQuestion(**{"params": 1e9, **asked, "gpus": gpus, "rollout_gpus": gpus // 2})
    answer = plan(recipe, question, tried.append)
    assert tried == [gpus // 2]
    rows = recipe.data.train_batch_size * recipe.rollout.n / answer.scale
    assert answer.best.outlook.steps * rows <= 3000


def test_the_command_prints_json_and_wrong_input_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = ("data.train_batch_size=8", "weights.carrier=auto")
    asked = ["plan", str(RECIPE), *changes, "--gpus", "2", "--params", "1e9"]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--json"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert said.err == "simulating 1 GPU of rollout and 1 of the trainer\n"
    answer = json.loads(said.out)
    assert answer["best"]["rollout_gpus"] == 1
    assert answer["bottleneck"]
    assert any(each.startswith("weights.carrier auto: shm") for each in answer["assumptions"])
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--rollout-gpus", "7"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_row_that_is_issued_again_has_another_length_of_the_same_prompt() -> None:
    lengths = Lengths(mean=150, p99=400, most=480)
    first, again = lengths.draw(0, 7, 1), lengths.draw(0, 7, 1, attempt=1)
    assert first == lengths.draw(0, 7, 1)
    assert first != again
    alike = Lengths(mean=150, p99=400, most=480, alike=1.0)
    assert alike.draw(0, 7, 1) == alike.draw(0, 7, 1, attempt=1)
