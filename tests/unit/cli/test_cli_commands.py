"""Every mistake at the command line is one line on stderr and exit code 2; nothing heavy is imported for it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from meshrl.cli import main
from meshrl.cli.commands.fleet import fleet
from meshrl.cli.commands.reward import reward
from meshrl.cli.commands.status import _ask as ask_status
from meshrl.cli.find_mesh import Mesh, find_mesh
from meshrl.cli.options import RUN, NamedRun, RunGroup
from meshrl.cli.root import cli
from meshrl.config import load_recipe, train_spec
from meshrl.contract.errors import UnavailableError
from meshrl.contract.types import Task
from meshrl.launcher.address_book import ADDRESS_BOOK_NAME, AddressBook, ServiceAddress
from meshrl.rpc.queue_connection import open_stored_queue
from meshrl.rpc.runtime import GrpcServer, ServerSettings
from meshrl.rpc.servicers import QueueServicer
from meshrl.testing.contract.queue_actors import spec
from meshrl.transferqueue.queue import TransferQueue
from tests.doubles.gated_store import GatedStore

from ...small_checkpoint import write_tokenizer, write_weights


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run


def recipe(text: str = "model: {path: model}\n") -> str:
    Path("my.yaml").write_text(text)
    return "my.yaml"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["config", "check", "no.yaml"], "error: no.yaml: no such recipe (there are: my.yaml)"),
        (["up", "no.yaml"], "error: no.yaml: no such recipe (there are: my.yaml)"),
        (["serve", "queue", "no.yaml"], "error: no.yaml: no such recipe (there are: my.yaml)"),
        (
            ["config", "show", "my.yaml", "rolout.n=1"],
            "error: command line: rolout.n=1: no such key 'rolout.n'; did you mean 'rollout.n'?",
        ),
        (
            ["config", "explain", "actor.lr"],
            "error: no such key 'actor.lr'; did you mean 'actor.optim.lr'?",
        ),
        (
            ["ledger", "--queue", "127.0.0.1:1"],
            "error: --queue needs the run's name: a queue may serve several runs",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Run, arguments: Sequence[str], line: str
) -> None:
    recipe()
    ended = run(*arguments)
    assert (ended.code, ended.err.splitlines(), ended.out) == (2, [line], "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("demo run.dir=afile", "error: run.dir: afile: File exists"),
        ("queue restore backup my.yaml run.dir=afile", "error: run.dir: afile: File exists"),
        ("data show my.yaml --limit -1", "-1 is not in the range"),
        ("rows --limit 99999999999999999999", "99999999999999999999 is not in the range"),
    ],
)
def test_a_file_for_a_directory_and_a_number_out_of_range_are_said(
    run: Run, command: str, said: str
) -> None:
    recipe()
    Path("afile").touch()
    ended = run(*command.split())
    assert ended.code == 2 and said in ended.err


def test_the_trainer_of_a_mesh_in_containers_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mesh(NamedRun(queue="queue:7001", name="mesh")).trainer is None
    monkeypatch.setenv("MESHRL_TRAINER", "trainer:7001")
    assert find_mesh(NamedRun(queue="queue:7001", name="mesh")).trainer == "trainer:7001"


def test_every_problem_of_a_recipe_is_a_line(run: Run) -> None:
    ended = run("config", "check", recipe("model: {}\nrollout: {m: 1}\n"))
    assert ended.code == 2
    assert [line.split(": ")[:2] for line in ended.err.splitlines()] == [
        ["error", "my.yaml:1"],
        ["error", "my.yaml:2"],
    ]


def test_an_unknown_command_or_service_is_answered_by_usage(run: Run) -> None:
    assert run("trian").code == 2
    ended = run("serve", "kitchen", recipe())
    assert ended.code == 2
    assert "queue" in ended.err


def test_show_prints_what_a_run_would_use(run: Run) -> None:
    as_yaml = run("config", "show", recipe(), "rollout.n=3")
    as_json = run("config", "show", recipe(), "rollout.n=3", "--json")
    assert yaml.safe_load(as_yaml.out)["rollout"]["n"] == 3
    assert json.loads(as_json.out) == yaml.safe_load(as_yaml.out)


def test_explain_says_meaning_type_default_and_place(run: Run) -> None:
    lines = run("config", "explain", "rollout.n").out.splitlines()
    assert lines[0] == "rollout.n"
    assert "  type: a positive integer" in lines
    assert "  default: 8" in lines
    assert lines[-1].startswith("  defined in: meshrl.rollout.config.RolloutConfig (")
    facts = json.loads(run("config", "explain", "rollout.n", "--json").out)
    assert [fact["key"] for fact in facts] == ["rollout.n"]


def test_explain_of_a_word_finds_the_keys_that_speak_of_it(run: Run) -> None:
    found = run("config", "explain", "staleness").out.splitlines()
    assert found[0].startswith("queue.max_staleness = 1")
    assert any(line.startswith("actor.recompute_old_log_probs") for line in found[1:])
    listed = json.loads(run("config", "explain", "epochs", "--json").out)
    assert "trainer.total_epochs" in [fact["key"] for fact in listed]
    named = run("config", "explain", "stalness").err
    assert named == "error: no such key 'stalness'; did you mean 'queue.max_staleness'?\n"
    elsewhere = run("config", "explain", "rollout.tensor_parallel_size").out
    assert elsewhere.startswith("placement.rollout = 'auto'")
    ended = run("config", "explain", "zzzz")
    assert ended.code == 2 and ended.err.startswith("error: no such key 'zzzz'; known: ")


def test_explain_lists_the_names_that_a_key_may_have(run: Run) -> None:
    lines = run("config", "explain", "algorithm.adv_estimator").out.splitlines()
    (names,) = [line for line in lines if line.startswith("  names: ")]
    assert {"gae", "grpo", "rloo"} <= set(names.removeprefix("  names: ").split(", "))
    assert "  names: " not in run("config", "explain", "rollout.n").out


def test_explain_of_a_section_lists_its_keys_and_of_nothing_all_keys(run: Run) -> None:
    assert "actor.optim.lr = 1e-06" in run("config", "explain", "actor.optim").out
    everything = run("config", "explain").out
    assert "queue.max_staleness = 1" in everything and "weights.carrier" in everything


@pytest.mark.parametrize("command", ["status", "ledger", "why-waiting", "dead-letters"])
def test_a_mesh_that_is_not_there_is_said_to_be_not_there(run: Run, command: str) -> None:
    ended = run(command)
    assert ended.code == 1
    assert ended.err == (
        "error: no mesh was ever started here: no runs/*/mesh.json; want a run by its name or directory\n"
    )


@pytest.mark.parametrize("command", ["status", "why-waiting"])
def test_a_mesh_that_does_not_run_is_said_not_to_run(run: Run, command: str) -> None:
    directory = Path("runs/demo")
    directory.mkdir(parents=True)
    entry = ServiceAddress(kind="queue", host="127.0.0.1", port=1, metrics_port=2)
    address_book = AddressBook(
        run="demo", recipe=Path("runs/demo/recipe.yaml"), services={"queue": entry}
    )
    address_book.save(directory / ADDRESS_BOOK_NAME)
    ended = run(command)
    assert ended.code == 1
    assert ended.err == (
        "error: the mesh in runs/demo is not running; "
        "start it with: meshrl up runs/demo/recipe.yaml\n"
    )


def test_the_ledger_of_a_run_that_has_ended_is_read_from_its_queue(run: Run) -> None:
    Path("model").mkdir()
    directory = Path("runs/demo")
    directory.mkdir(parents=True)
    recipe = directory / "recipe.yaml"
    recipe.write_text("run: {name: demo}\nmodel: {path: model}\n")
    AddressBook(run="demo", recipe=recipe, services={}).save(directory / ADDRESS_BOOK_NAME)

    async def leave_a_row() -> None:
        loaded = load_recipe(recipe, check=False)
        async with open_stored_queue(loaded) as queue:
            await queue.open_run(train_spec(loaded))
            prompt = np.array([1, 2], dtype=np.int32)
            task = Task(run="demo", task_id="0-0", prompt_ids=prompt, group_size=8)
            await queue.admit("demo", [task], cursor="1", wait_s=1)

    (directory / "queue").mkdir()
    asyncio.run(leave_a_row())
    ledger = json.loads(run("ledger", "--json").out)["demo"]
    assert (ledger["admitted"], ledger["resident"]["queued"], ledger["balanced"]) == (8, 8, True)
    assert run("dead-letters").out == "no row was given up\n"


def test_a_malformed_address_book_is_named(run: Run) -> None:
    Path("mesh.json").write_text("{}")
    ended = run("ledger", "--run-dir", ".")
    assert (ended.code, ended.err) == (
        2,
        "error: mesh.json is not an address book of meshrl up: 'services'\n",
    )


def test_a_port_option_that_is_none_is_refused(run: Run) -> None:
    ended = run("up", recipe(), "--port", "queue")
    assert ended.code == 2
    assert "want SERVICE=PORT, as in queue=7001" in ended.err


@pytest.mark.parametrize(
    ("command", "package", "key"),
    [
        ("check", "ran_a", "stages={x: {kind: ran_a.stage}}"),
        ("check", "ran_b", "algorithm.name=ran_b.stage"),
        ("show", "ran_c", "algorithm.name=ran_c.stage"),
        ("check", "ran_d", "algorithm.adv_estimator=ran_d.stage"),
        ("check", "ran_e", "actor.policy_loss.loss_mode=ran_e.stage"),
    ],
)
def test_what_is_imported_is_named_before_it_is(
    command: str, package: str, key: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Path("elsewhere", package, "stage.py").absolute()
    stage.parent.mkdir(parents=True)
    stage.with_name("__init__.py").touch()
    stage.write_text("import sys; print('it runs', file=sys.stderr); 1 / 0\nclass Options: ...")
    stage.parent.with_name("read.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(stage.parent.parent)
    others = ["queue.sampler=read.it", "rollout.name=read.it", "trainer.logger=[read.it]"]
    ended = run("config", command, recipe(), key, *others)
    first, *rest = ended.err.splitlines()
    assert first == f"this imports {package}.stage ({stage})"
    assert "it runs" in rest and "read.it (" not in ended.err and ended.code == 2


def test_nothing_is_imported_from_the_working_directory(run: Run) -> None:
    Path("here").mkdir()
    Path("here/stage.py").write_text("raise SystemExit(99)")
    ended = run("config", "check", recipe(), "stages={x: {kind: here.stage}}")
    assert ended.code == 2 and "this imports here.stage (not found)" in ended.err
    assert "is in the working directory, which is not searched" in ended.err


@click.group(cls=RunGroup)
@click.option("--where", default="here")
@click.option("--loud", is_flag=True)
@click.pass_context
def group(context: click.Context, where: str, loud: bool) -> None:
    """A group."""
    context.obj = where


@group.command()
@click.argument("words", nargs=-1)
@click.option("--much", default="")
@click.pass_obj
def say(where: str, words: tuple[str, ...], much: str) -> None:
    """Say where."""
    click.echo(f"{where} {' '.join(words)} {much}".strip())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--where there say a", "there a"),
        ("say a --where there", "there a"),
        ("say --where=there a --much b", "there a b"),
        ("say a --much --where", None),
        ("say a -- --where there", "here a --where there"),
        ("say a --where", None),
    ],
)
def test_an_option_of_the_group_may_stand_behind(typed: str, said: str | None) -> None:
    done = CliRunner().invoke(group, typed.split())
    assert (done.output.strip() if not done.exit_code else None) == said


def every_command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from every_command(found, click.Context(found, context, name))


def test_no_help_shows_a_limit_that_there_is_not() -> None:
    shown = list(every_command(cli, click.Context(cli)))
    assert len(shown) > 50
    assert [text for text in shown if "None" in text] == []


def test_the_groups_of_a_running_mesh_are_such() -> None:
    assert isinstance(reward, RunGroup) and isinstance(fleet, RunGroup)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("mine", "runs/mine"), ("here", "here"), ("none", "none"), ("both", "runs/both")],
)
def test_a_run_is_its_directory_or_its_name_in_runs(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine", "runs/here", "here", "runs/both"):
        Path(folder).mkdir(parents=True)
        Path(folder, "mesh.json").touch()
    Path("both").mkdir()  # no run's
    assert RUN.convert(typed, None, None) == Path(meant)


def test_every_command_that_asks_for_a_run_takes_its_name() -> None:
    asked, found = {"run", "other", "others", "run_dir"}, 0
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        inner = list(command.commands.values()) if isinstance(command, click.Group) else []
        for each in (command, *inner):
            for one in each.params:
                if one.name in asked and isinstance(one.type, click.Path):
                    assert one.type is RUN, (name, one.name)
                    found += 1
    assert found >= 12


async def test_status_names_what_a_queue_waits_for_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshrl.cli.commands.status.ANSWER_S", 0.1)
    monkeypatch.setattr("meshrl.transferqueue.store.SLOW_S", 0.0)
    store = GatedStore()
    queue = await TransferQueue.open(store)
    await queue.open_run(spec())
    store.gate.clear()
    settings = ServerSettings(port=0, metrics_port=None)
    async with GrpcServer(settings, [QueueServicer(queue)]) as server:
        await server.ready()
        waiting = asyncio.create_task(queue.acquire(spec().run, "trainer"))
        mesh = Mesh(run=spec().run, queue=f"127.0.0.1:{server.port}")
        with pytest.raises(UnavailableError, match="the queue waits for queue store in memory"):
            await ask_status(mesh)
        store.gate.set()
        await waiting
    await queue.close()


RECIPE = """
model: {path: model}
data: {train_files: [train.jsonl]}
reward: {custom_reward_function: {path: mine.py}}
"""
SHOW = """
import sys
from meshrl.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as ended:
        code = ended.code
    print("\\nHEAVY", line, code, sorted({"torch", "transformers", "pyarrow"} & sys.modules.keys()))
"""
COMMANDS = (
    "--help",
    "up --help",
    "serve --help",
    "dpo --help",
    "data check --help",
    "config explain rollout.n",
    "config from-verl -- rollout.n=2",
    "config check my.yaml",
    "config show my.yaml",
)


def write_checked(tmp_path: Path) -> None:
    """A recipe that is good, with what it names."""
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def compute_score(**sample):\n    return 0.0\n")
    (tmp_path / "model").mkdir()
    config = '{"architectures": ["LlamaForCausalLM"]}'
    (tmp_path / "model" / "config.json").write_text(config)
    write_tokenizer(tmp_path / "model")
    write_weights(tmp_path / "model" / "model.safetensors")


def test_neither_help_nor_config_imports_torch(tmp_path: Path) -> None:
    """All in one process: the first that does is the first line that differs."""
    write_checked(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *COMMANDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("HEAVY")]
    assert said == [f"HEAVY {line} 0 []" for line in COMMANDS], done.stdout + done.stderr


WITHOUT = """
import sys
from importlib.machinery import PathFinder
gone = {"torch", "transformers", "tokenizers", "safetensors", "peft", "pyarrow", "matplotlib", "jinja2"}
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.partition(".")[0] in gone else find(name, *more)
)
from meshrl.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as ended:
        print("\\nCODE", ended.code, flush=True)
"""
INSTALL = "pip install 'meshrl[torch]'"
LACKING = {
    "data check my.yaml": f"error: this needs tokenizers, which is not installed: {INSTALL}",
    "data stats my.yaml": f"error: this needs tokenizers, which is not installed: {INSTALL}",
    "data show my.yaml": f"error: this needs tokenizers, which is not installed: {INSTALL}",
    "config check my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "up my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "eval my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "serve trainer my.yaml": f"error: my.yaml:2: model: this needs torch, transformers: {INSTALL}",
    "sft sft.yaml": f"error: this needs torch, which is not installed: {INSTALL}",
    "demo": f"error: this needs torch, which is not installed: {INSTALL}",
}
"""Commands that read or train a model, and what each says where the packages for it are not installed."""


def test_a_command_names_the_extra_that_it_lacks_in_one_line(tmp_path: Path) -> None:
    write_checked(tmp_path)
    (tmp_path / "sft.yaml").write_text(
        "model: {path: model}\ntrain_files: [train.jsonl]\nresponse_key: answer\noutput_dir: out\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *LACKING], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.splitlines() == list(LACKING.values())
    assert done.stdout.count("CODE 2") == len(LACKING)
