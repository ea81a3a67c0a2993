"""A script of somebody else's writes no YAML but values and comments, and sees no secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from meshrl.cli.commands.config import config
from meshrl.config.loading import in_yaml, read_yaml, recipe_yaml
from meshrl.contract.errors import ConfigError, UserError
from meshrl.verl import migrate, scripts
from meshrl.verl.scripts import started
from meshrl.verl.written import recipe_text, report

TEXTS = [
    *("true", "1", "1e-6", "no", "1:30", "null", "", "~", "<<", "=", "2020-01-01", "0x10", "1_0"),
    *("a: b", "a, b", "[a", "{a", "# a", "a # b", "- a", "? a", "*a", "&a", "!a", "|", "%a", "---", "..."),
    *("a\nstages: {x: {kind: evil.stage}}", "\n# b", "a\r\nb", "a\x85b", "a\u2028b", "'a'", '"a"', "\\", "\ta "),
    *("\x1b[2J", "\x9b31m", "\x7f", "\u202ea", "\ufeffa", "é", "\U0001f600\n"),
]  # fmt: skip
"""What a key or a value may be called."""
KWARGS = "custom_reward_function.reward_kwargs"


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_read_back_as_itself_as_a_key_and_as_a_value(
    text: str, tmp_path: Path
) -> None:
    value = {text: {text: text, "list": [text, {text: [text, 1, True, None, 1e-6]}]}}
    shown = in_yaml(value)
    assert shown.isprintable()
    path = tmp_path / "a.yaml"
    for document in (f"a:\n- {shown}  # b", f"a: [{shown}]", recipe_yaml({"a": [value]})):
        assert yaml.safe_load(document) == {"a": [value]}
        path.write_text(document)
        assert read_yaml(path)[0] == {"a": [value]}


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_of_a_dictionary_and_its_value_become_nothing_else(text: str, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    given: dict[str, Any] = {"path": "/r.py", "reward_kwargs": {text: text, "b": [text]}}
    file.write_text(recipe_yaml({"custom_reward_function": given}))
    if not text or "." in text:  # a dot makes a key of a key
        return
    made = migrate((), [file])
    path = tmp_path / "made.yaml"
    path.write_text(recipe_text(made))
    tree = read_yaml(path)[0]
    assert tree == made.tree and "stages" not in tree
    assert tree["reward"]["custom_reward_function"]["reward_kwargs"] == {text: text, "b": [text]}


@pytest.mark.parametrize("text", TEXTS)
def test_a_comment_and_a_line_of_the_report_stay_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(recipe_yaml({"nonsense": {f"k{text}": text}, f"x{text}": 1}))
    made = migrate((), [file])
    shown = recipe_text(made)
    assert all(line.isprintable() for line in shown.split("\n"))
    path = tmp_path / "made.yaml"
    path.write_text(shown)
    assert read_yaml(path)[0] == made.tree
    assert shown.count("# REFUSED") == 2
    done = CliRunner().invoke(config, ["from-verl", "--yaml", str(file)])
    lines = done.stderr.split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == len([*report(made), "after the last"])


SECRET = {"HF_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret", "HOME": "/h", "USER": "me", "PATH": "/p"}


def test_a_script_sees_a_bare_environment_and_what_is_passed() -> None:
    assert scripts.seen(SECRET, ()) == {"HOME": "/h", "USER": "me"}
    assert scripts.seen(SECRET, ("HF_TOKEN", "N=a=b", "HOME=/x")) == {
        "HOME": "/x", "USER": "me", "HF_TOKEN": "s3cret", "N": "a=b",
    }  # fmt: skip
    with pytest.raises(UserError, match="--env MODEL: it is not set; set it, or give --env MODEL="):
        scripts.seen(SECRET, ("MODEL",))


@pytest.mark.parametrize("sandboxed", [True, False])
def test_no_token_reaches_the_script_or_the_recipe(
    sandboxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def launched(script: str, environment: Mapping[str, str], *_: object) -> list[list[str]]:
        given.update(environment)
        return [["python3", "-m", "verl.trainer.main_ppo", "a=1"]]

    monkeypatch.setattr(scripts, "no_bubblewrap", lambda: None if sandboxed else "none")
    monkeypatch.setattr(scripts, "launched", launched)
    script = "python3 -m verl.trainer.main_ppo trainer.experiment_name=${HF_TOKEN:-none}"
    done = CliRunner().invoke(config, ["from-verl", "--script", "-"], input=script, env=SECRET)
    assert done.exit_code == 0 and "s3cret" not in done.output
    assert sandboxed == bool(given) and "HF_TOKEN" not in given
    passed = ["from-verl", "--env", "HF_TOKEN", "--script", "-"]
    done = CliRunner().invoke(config, passed, input=script, env=SECRET)
    assert "s3cret" in (given.values() if sandboxed else done.output)


def test_an_interpolation_sees_no_more_than_the_script(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("trainer: {experiment_name: '${oc.env:HF_TOKEN,none}'}")
    arguments = ["from-verl", "--yaml", str(file)]
    done = CliRunner().invoke(config, arguments, env=SECRET)
    assert done.exit_code == 0 and "s3cret" not in done.output and "name: none" in done.output
    file.write_text("trainer: {experiment_name: '${oc.env:HF_TOKEN}'}")
    done = CliRunner().invoke(config, arguments, env=SECRET)
    assert isinstance(done.exception, ConfigError)
    assert "experiment_name: HF_TOKEN is not given; give it with --env" in str(done.exception)
    done = CliRunner().invoke(config, [*arguments, "--env", "HF_TOKEN=run"], env=SECRET)
    assert done.exit_code == 0 and "name: run" in done.output


def test_a_variable_that_is_missing_is_named_with_the_option_that_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scripts, "no_bubblewrap", lambda: "none")
    with pytest.raises(ConfigError, match=r"\$N is not set; set it above the command, or give it"):
        started("python3 -m verl.trainer.main_ppo a=$N", {})
