"""The tab key knows commands, keys of recipes, what may stand behind them, and the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete, ZshComplete

from meshrl.cli import main
from meshrl.cli.completion import VARIABLE
from meshrl.cli.root import cli

from ...view_runs import add_steps


def bash(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Completions offered for the last of some words, which bash splits at `=`."""
    monkeypatch.setenv("COMP_WORDS", "\n".join(("meshrl", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    return BashComplete(cli, {}, "meshrl", VARIABLE).complete().splitlines()


def test_commands_and_keys_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bash(monkeypatch, "why") == ["plain,why-waiting"]
    assert "plain,rollout.n=" in bash(monkeypatch, "up", "my.yaml", "rollout.n")
    assert "plain,rollout=" not in bash(monkeypatch, "up", "my.yaml", "rollout")
    assert bash(monkeypatch, "config", "explain", "rollout.na") == ["plain,rollout.name"]


def test_the_first_word_of_init_may_be_a_recipe_that_comes_with_meshrl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert bash(monkeypatch, "init", "gsm") == ["plain,gsm8k"]
    offered = bash(monkeypatch, "init", "")
    assert "plain,tools" in offered and "plain,rollout.n=" in offered
    assert bash(monkeypatch, "init", "rollout.n=2", "gsm") == []
    assert bash(monkeypatch, "init", "rollout.name", "=", "to") == ["plain,torch"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("rollout.name", "=", "to"), ["plain,torch"]),
        (("rollout.n=2", "rollout.name", "=", "vl"), ["plain,vllm"]),
        (("algorithm.name", "=", "dap"), ["plain,dapo"]),
        (("data.shuffle", "="), ["plain,true", "plain,false"]),
        (("rollout.on_update", "=", "dr"), ["plain,drain"]),
        (("model.path", "=", "/mo"), ["file,"]),
        (("nosuch", "=", "a"), []),
    ],
)
def test_what_may_stand_behind_a_key_is_completed(
    monkeypatch: pytest.MonkeyPatch, typed: tuple[str, ...], offered: list[str]
) -> None:
    assert bash(monkeypatch, "up", "my.yaml", *typed) == offered


def test_a_shell_that_gives_key_and_value_as_one_word_gets_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMP_WORDS", "meshrl up my.yaml rollout.name=to")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert ZshComplete(cli, {}, "meshrl", VARIABLE).complete() == "plain\nrollout.name=torch\n_"


def test_metrics_of_the_run_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_steps(tmp_path, 0, 1)
    assert bash(monkeypatch, "plot", str(tmp_path), "actor/ent") == ["plain,actor/entropy"]
    assert bash(monkeypatch, "plot", "nosuch", "actor/ent") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", shell])
    said = capsys.readouterr().out
    assert not ended.value.code and f"{VARIABLE}={shell}_complete" in said
    assert ("compopt -o nospace" in said) == (shell == "bash")
    assert said.count('-S "$suffix"') == (2 if shell == "zsh" else 0)
