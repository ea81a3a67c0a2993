"""Options of a group of commands are understood before and behind the name of the command."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from meshrl.cli.commands.fleet import fleet
from meshrl.cli.commands.reward import reward
from meshrl.cli.options import OptionsAnywhere


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
