"""Options of a group of commands are understood before and behind the name of the command."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from meshrl.cli.commands.fleet import fleet
from meshrl.cli.commands.reward import reward
from meshrl.cli.options import RUN, OptionsAnywhere
from meshrl.cli.root import cli


@click.group(cls=OptionsAnywhere)
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


def test_the_groups_of_a_running_mesh_are_such() -> None:
    assert isinstance(reward, OptionsAnywhere) and isinstance(fleet, OptionsAnywhere)


@pytest.mark.parametrize(
    ("typed", "meant"), [("mine", "runs/mine"), ("here", "here"), ("none", "none")]
)
def test_a_run_is_its_directory_or_its_name_in_runs(
    typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mine", "runs/here", "here"):
        Path(folder).mkdir(parents=True)
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
