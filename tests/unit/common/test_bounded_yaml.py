"""A document of YAML is refused before its aliases are expanded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshrl.cli.root import main
from meshrl.common import bounded_yaml
from meshrl.contract.errors import ConfigError
from meshrl.rpc.identity import TokenStore

LAUGHS = "run:\n  a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)
MERGES = "run:\n  a0: &a0 {k: v}\n" + "".join(
    f"  a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 8)}]}}\n" for n in range(1, 12)
)
KEYS = "run:\n  a0: &a0 [x]\n" + "".join(
    f"  a{n}: &a{n} {{? [{', '.join([f'*a{n - 1}'] * 8)}] : v}}\n" for n in range(1, 12)
)
ITSELF = "run: &run\n  inside: *run\n"
LONG = "".join(
    [
        f'run:\n  a0: &a0 "{"x" * 3000}"\n',
        f"  a1: &a1 [{', '.join(['*a0'] * 400)}]\n",
        f"  a2: [{', '.join(['*a1'] * 400)}]\n",
    ]
)
MANY = "run:\n" + "".join(f"  strange{n}: 1\n" for n in range(bounded_yaml.MOST_VALUES // 2))
DEEP = "run: " + "[" * 5000 + "]" * 5000
HOSTILE = {
    "laughs": (LAUGHS, "aliases repeat"),
    "merges": (MERGES, "aliases repeat"),
    "keys": (KEYS, "aliases repeat"),
    "long text": (LONG, "aliases repeat"),
    "an integer": ('run: !!int "abc"\n', "is no int"),
    "digits": ("run: " + "9" * 5000 + "\n", "is no int"),
    "sixties": ("run: !!int 1" + ":1" * 100_000 + "\n", "is no int"),
    "sixteens": ("run: !!int 0x" + "f" * 5000 + "\n", "is no int"),
    "a date": ("run: !!timestamp x\n", "is no timestamp"),
    "a truth": ("run: !!bool x\n", "is no bool"),
    "no integer": ('run: !!int ""\n', "is no int"),
    "itself": (ITSELF, "contains itself"),
    "many": (MANY, "more than 20,000 keys and values"),
    "deep": (DEEP, "more than 100 levels"),
}


@pytest.mark.parametrize(("text", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_document_is_refused_in_one_line_by_the_commands_that_read_it(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(yaml.YAMLError, match=said):
        bounded_yaml.load(text)
    for command in (
        ["config", "check", str(path)],
        ["config", "check", "recipes/demo/recipe.yaml", f"run={text[5:].strip()}"],
        ["config", "from-verl", "--yaml", str(path), "-o", str(tmp_path / "out.yaml")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert all(line.startswith("error: ") for line in lines)
        assert len(lines) <= 1 + command[-1].count("\n")


@pytest.mark.parametrize("text", ["tokens: !!int abc\n", LAUGHS.replace("run", "tokens")])
def test_a_hostile_tokens_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not valid YAML"):
        TokenStore(path)


def test_aliases_and_merges_of_an_honest_recipe_are_read() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n"
    assert bounded_yaml.load(text) == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }
    assert bounded_yaml.load("") is None


def test_a_file_of_strange_keys_is_told_a_hundred_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text("".join(f"strange{n}: 1\n" for n in range(2_000)))
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(path)])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 101
    assert any("and more like these" in line for line in lines)
