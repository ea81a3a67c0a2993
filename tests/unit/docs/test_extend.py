"""The how-to of extensions: each X of its table is one file from outside of the tree, found by its name and used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from meshrl.common import plugins
from meshrl.common.config import read_options
from meshrl.config.loading import load_recipe
from meshrl.config.recipe import Recipe
from meshrl.config.stages import service_kind, stage_options
from meshrl.contract.types import OnUpdate, Outcome, Sample, Uid, Version, WeightManifest
from meshrl.rewardd.judge import build_judge
from meshrl.rewardd.pool.rule import REWARDS, read_rule
from meshrl.rollout.engines import build_engine
from meshrl.rollout.programs import ProgramCache
from meshrl.rollout.streams import sample
from meshrl.rollout.tools.ports import Caller, ToolCall, ToolsConfig
from meshrl.rollout.tools.toolbox import ToolBuilder
from meshrl.trainer.algorithms.advantages._types import AdvantageBatch, outcome_rewards
from meshrl.trainer.algorithms.aggregation import Aggregator
from meshrl.trainer.algorithms.losses._types import LossInputs
from meshrl.trainer.algorithms.options import ADVANTAGES
from meshrl.trainer.algorithms.ragged import Ragged
from meshrl.trainer.data.feeder import CURRICULA
from meshrl.trainer.data.files import file_rows
from meshrl.trainer.learner.policy_gradient import actor_loss
from meshrl.trainer.loggers._types import LoggedRun
from meshrl.trainer.metrics.log import open_loggers
from meshrl.transferqueue import sampling, stores
from meshrl.transferqueue.sampling import CompleteGroup
from meshrl.transferqueue.store import Operation, Table
from meshrl.weights.carrier import RunPaths
from meshrl.weights.transport import load_transport
from tests.doubles.scripted import END, Scripted, task

from ..rollout.chats import chat_tokenizer
from ..rollout.checkpoints import request

PAGE = (Path(__file__).parents[3] / "docs/how-to/extend.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
ADDED = re.findall(r"^\| ([a-z ]+) \| (\d+) \|", PAGE, re.MULTILINE)
"""Pairs of an X and how many files are touched for it."""
NAME = "my_package.added"
UID = Uid("run", "t0", 0)
TWO = Ragged.from_lengths(
    torch.tensor([1, 1]), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
)
"""Two rows of a token each, siblings."""
Use: TypeAlias = Callable[[Recipe, Path], Awaitable[None] | None]


def advantage(recipe: Recipe, folder: Path) -> None:
    compute = plugins.load(ADVANTAGES, recipe.algorithm.adv_estimator, "compute")
    rewards = outcome_rewards(TWO, torch.tensor([0.0, 9.0]))
    found = compute(AdvantageBatch(ragged=TWO, token_rewards=rewards), recipe.algorithm)
    assert found.advantages.tolist() == [-0.5, 0.5]


def loss(recipe: Recipe, folder: Path) -> None:
    zeros = torch.zeros(2)
    inputs = LossInputs(
        ragged=TWO, logprobs=zeros, old_logprobs=zeros, advantages=torch.tensor([1.0, 2.0])
    )
    assert actor_loss(inputs, recipe.actor, Aggregator()).loss == -1.5


def named_algorithm(recipe: Recipe, folder: Path) -> None:
    assert recipe.algorithm.adv_estimator == "rloo" and recipe.rollout.n == 3


def reader(recipe: Recipe, folder: Path) -> None:
    (folder / "a.tsv").write_text("prompt\tanswer\n1+1?\t2\n")
    (row,) = file_rows([folder / "a.tsv"], recipe.data.reader)
    assert row.values == {"prompt": "1+1?", "answer": "2"}


def order(recipe: Recipe, folder: Path) -> None:
    assert recipe.data.curriculum is not None
    assert plugins.load(CURRICULA, recipe.data.curriculum, "order")("abc", 0, 0) == [2, 1, 0]


def logger(recipe: Recipe, folder: Path) -> None:
    *_, sink = open_loggers(
        recipe.trainer.logger, LoggedRun(directory=folder, project="p", name="n")
    )
    sink.write(3, {"reward/mean": 0.5})
    assert (folder / "added.txt").read_text() == "3 0.5"


def sampler(recipe: Recipe, folder: Path) -> None:
    loaded = sampling.build(recipe.queue.sampler, [recipe.queue.sampler])
    group = CompleteGroup(
        number=0, task_id="t", priority=0, num_tokens=(9,), oldest=Version(1, 0), newest=Version(1, 0)
    )  # fmt: skip
    for each in (group, group._replace(number=1, num_tokens=(2, 3))):
        loaded.add(each)
    assert loaded.first(2) == [1, 0]


async def store(recipe: Recipe, folder: Path) -> None:
    built = stores.build(recipe.queue, folder)
    await built.apply([Operation(Table.PAYLOAD, b"a", b"1"), Operation(Table.PAYLOAD, b"b", b"2")])
    assert await built.read([b"b", b"c"]) == [b"2", None] and built.size_bytes() == 7


async def engine(recipe: Recipe, folder: Path) -> None:
    built = build_engine(recipe.rollout, model=folder, tokenizer=None)
    await built.start()
    version = Version(1, 0)
    manifest = WeightManifest(
        run="r", version=version, tensors=(), bucket_bytes=(), bucket_hashes=()
    )
    await built.stage_weights(manifest, [])
    await built.commit_weights(version, OnUpdate.DRAIN)
    assert (await sample(built, request("a", [7, 8], max_tokens=9))).tokens.tolist() == [7, 8]
    await built.close()


async def program(recipe: Recipe, folder: Path) -> None:
    tokenizer = chat_tokenizer()
    async with ProgramCache(recipe.rollout.program) as programs:
        await programs.start()
        run, asked = programs.get(recipe.rollout.program), task(tokenizer)
        row = await run(asked, UID, Scripted(tokenizer, ["42" + END]), tokenizer)
    assert (row.outcome, row.finish_reason) == (Outcome.TRUNCATED, "max_turns")


async def tool(recipe: Recipe, folder: Path) -> None:
    tokenizer = chat_tokenizer()
    config = read_options(ToolsConfig, recipe.rollout.program_options, where="o")
    asked = task(tokenizer)
    tools = (await ToolBuilder(config).toolbox()).of(asked)
    call = ToolCall(name="double", arguments={"number": 21})
    assert await tools.call(call, Caller(task=asked, uid=UID), tokenizer) == "42"


def carrier(recipe: Recipe, folder: Path) -> None:
    transport = load_transport(recipe.weights, RunPaths(directory=folder))
    assert transport.where == folder  # type: ignore[attr-defined]
    assert transport.names == (NAME,)


def stage(recipe: Recipe, folder: Path) -> None:
    rules = service_kind(recipe, "added")
    assert rules.columns_of(recipe, evaluation=False).writes == ("repeats",)  # type: ignore[union-attr]
    options = plugins.load(ADVANTAGES, NAME, "Config")
    assert stage_options(recipe, "added", options).letters == 4


def reward(recipe: Recipe, folder: Path) -> None:
    (function,) = read_rule(recipe.reward).functions
    assert function.module == NAME
    assert plugins.load(REWARDS, NAME, function.name)("", "abc", None) == 3.0


async def judge(recipe: Recipe, folder: Path) -> None:
    built = build_judge(recipe.reward)
    await built.start()
    asked = Sample(uid=UID, data_source="", solution="abc",
                   ground_truth=None, extra_info={})  # fmt: skip
    (score,) = await built.score([asked])
    await built.close()
    assert score.score == 6.0


CASES: Mapping[str, tuple[str, str, Use]] = {
    "advantage estimator": (
        EXAMPLES["estimators_bounded.py"],
        "algorithm={adv_estimator: NAME, options: {bound: 0.5}}",
        advantage,
    ),
    "policy loss": (EXAMPLES["losses_plain.py"], "actor.policy_loss.loss_mode=NAME", loss),
    "named algorithm": (
        'DEFAULTS = {"algorithm": {"adv_estimator": "rloo"}, "rollout": {"n": 3}}',
        "algorithm.name=NAME",
        named_algorithm,
    ),
    "data reader": (EXAMPLES["readers/tsv.py"], "data.reader=NAME", reader),
    "order of prompts": (
        "def order(prompts, epoch, seed):\n    return list(reversed(range(len(prompts))))",
        "data.curriculum=NAME",
        order,
    ),
    "logger": (
        """
class Logger:
    def __init__(self, run):
        self.path = run.directory / "added.txt"
    def write(self, step, values):
        self.path.write_text(f"{step} {values['reward/mean']}")
    def close(self): ...
open_logger = Logger
""",
        "trainer.logger=[NAME]",
        logger,
    ),
    "sampler": (EXAMPLES["samplers_short_first.py"], "queue.sampler=NAME", sampler),
    "store": (
        """
from meshrl.transferqueue.stores.memory import MemoryStore
class Counted(MemoryStore):
    def size_bytes(self):
        return 7
def build(config, path):
    return Counted()
""",
        "queue.store=NAME",
        store,
    ),
    "engine": (
        "from meshrl.testing.engines.echo import Config, build",
        "rollout={name: NAME, engine: {tokens_per_s: 10000, response_tokens: 2}}",
        engine,
    ),
    "program": (
        """
from meshrl.rollout.conversation import Budget, Conversation
async def run(task, uid, engine, tokenizer):
    said = Conversation(uid, tokenizer, task.prompt_ids, budget=Budget.of(task))
    await said.sample(engine, task.sampling)
    return said.rollout("max_turns")
""",
        "rollout.program=NAME",
        program,
    ),
    "tool": (
        'def double(number: int) -> int:\n    """Twice a number."""\n    return 2 * number',
        "rollout={program: tools, program_options: {tools: [NAME.double]}}",
        tool,
    ),
    "weight carrier": (
        "from meshrl.weights.transport import Pairs\n"
        "class Carrier(Pairs):\n    def __init__(self, config, paths):\n"
        "        super().__init__(config)\n        self.where = paths.directory",
        "weights.carrier=NAME",
        carrier,
    ),
    "stage": (
        EXAMPLES["stages_repeats.py"],
        "stages={added: {kind: NAME, options: {letters: 4}}}",
        stage,
    ),
    "reward": (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str))",
        "reward.functions=[{name: NAME}]",
        reward,
    ),
    "judge": (
        """
from meshrl.common import config
from meshrl.contract.types import Outcome, Score
class Config(config.Config):
    times: int = 1
class Judge:
    reward_hash = "0" * 32
    def __init__(self, times):
        self.times = times
    async def start(self): ...
    async def close(self): ...
    async def score(self, samples):
        return [Score(uid=s.uid, outcome=Outcome.OK, score=self.times * len(s.solution)) for s in samples]
def build(config):
    return Judge(config.times)
""",
        "reward={judges: [{kind: NAME, options: {times: 2}}]}",
        judge,
    ),
}


def test_the_table_says_how_many_files_are_touched_for_each() -> None:
    assert dict(ADDED) == dict.fromkeys(CASES, "1")


@pytest.mark.parametrize("added", CASES)
async def test_what_is_added_by_one_file_is_found_and_used(
    added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_package: None
) -> None:
    source, override, use = CASES[added]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "added.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my.yaml").write_text("model: {path: model}\n")
    recipe = load_recipe(tmp_path / "my.yaml", [override.replace("NAME", NAME)], check=False)
    used = use(recipe, tmp_path)
    if inspect.isawaitable(used):
        await used


@pytest.mark.parametrize("file", EXAMPLES)
def test_an_example_is_found_by_its_dotted_name(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_package: None
) -> None:
    target = tmp_path / "my_package" / file
    target.parent.mkdir(parents=True)
    target.write_text(EXAMPLES[file])
    monkeypatch.syspath_prepend(str(tmp_path))
    defines = {"estimators": "compute", "losses": "compute", "samplers": "Sampler"}
    defines |= {"stages": "run", "readers": "read"}
    kind = re.split("[_/]", file)[0]
    name = f"my_package.{file.removesuffix('.py').replace('/', '.')}"
    assert callable(plugins.load(ADVANTAGES, name, defines[kind]))
