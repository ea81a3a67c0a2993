"""A document of YAML is refused before its aliases are expanded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshrl.cli.root import main
from meshrl.common import bounded_yaml

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
DEEP = "run: " + "[" * 5000 + "]" * 5000
HOSTILE = {
    "laughs": (LAUGHS, "aliases repeat"),
    "merges": (MERGES, "aliases repeat"),
    "keys": (KEYS, "aliases repeat"),
    "itself": (ITSELF, "contains itself"),
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


def test_aliases_and_merges_of_an_honest_recipe_are_read() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n"
    assert bounded_yaml.load(text) == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }
    assert bounded_yaml.load("") is None
