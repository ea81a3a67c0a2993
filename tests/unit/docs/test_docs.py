"""Is the documentation true: do its links lead somewhere, do the names exist, are generated pages up to date?"""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.cli.root import KNOWN
from meshrl.config import load_recipe
from meshrl.trainer.metrics.learning_signs import SIGNS, Sign

from ...run_directory import bounds, unnamed
from ...view_runs import add_rows

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"`([\w./-]+\.py)::([\w.]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
IDENTIFIER = re.compile(r"`([A-Za-z_][\w.]*)`")
METRIC = re.compile(r"^\| `([a-z_0-9/]+)`", re.MULTILINE)


def all_pages() -> list[Path]:
    """Every page that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PAGES = all_pages()


@functools.cache
def symbols(file: Path) -> frozenset[str]:
    """Dotted names of a module's functions, classes, their members and assigned names."""
    return frozenset(_symbols(ast.parse(file.read_text()), ""))


def _symbols(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from _symbols(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign):
            yield from (prefix + t.id for t in child.targets if isinstance(t, ast.Name))
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield prefix + child.target.id


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for label, target in LINK.findall(text):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        file = (page.parent / target.partition("#")[0]).resolve()
        assert file.exists(), f"{name_of(page)}: [{label}]({target}) leads nowhere"
        name = IDENTIFIER.fullmatch(label)
        if file.suffix == ".py" and name and "/" not in label and not label.endswith(".py`"):
            assert name[1] in symbols(file), f"{name_of(page)}: {target} defines no {name[1]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_symbols_that_a_page_names_exist(page: Path) -> None:
    for path, symbol in REFERENCE.findall(page.read_text()):
        assert (ROOT / path).is_file(), f"{name_of(page)}: no file {path}"
        assert symbol in symbols(ROOT / path), f"{name_of(page)}: {path} defines no {symbol}"


def test_the_map_leads_to_every_page_of_the_documentation() -> None:
    text = (DOCS / "README.md").read_text()
    linked = {(DOCS / target.partition("#")[0]).resolve() for _, target in LINK.findall(text)}
    missing = [name_of(page) for page in sorted(DOCS.glob("*/*.md")) if page not in linked]
    assert missing == []


@functools.cache
def generated() -> dict[str, str]:
    pages: dict[str, str] = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    return pages


@pytest.mark.parametrize("name", ["config.md", "cli.md", "errors.md", "algorithms.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / "reference" / name).read_text() == generated()[name], "run: make docs"


def test_the_reference_of_commands_has_them_all() -> None:
    text = (DOCS / "reference/cli.md").read_text()
    assert all(f"\n## `meshrl {name}`\n" in text for name in KNOWN)


def test_metrics_that_the_reference_names_are_written_by_the_code() -> None:
    named = [
        name for name in METRIC.findall((DOCS / "reference/metrics.md").read_text()) if "/" in name
    ]
    sources = [
        file.read_text()
        for room in ("trainer", "services", "rollout", "transferqueue")
        for file in sorted((ROOT / room).rglob("*.py"))
    ]
    assert len(named) > 20
    literal = '"{}"'
    unknown = [name for name in named if not any(literal.format(name) in s for s in sources)]
    assert unknown == []


def quoted_by(sign: Sign) -> list[str]:
    return re.findall(r"`([^`]+)`", " ".join((sign.means, *sign.change)))


def test_signs_of_a_run_that_does_not_learn_name_metrics_of_the_reference() -> None:
    text = (DOCS / "reference/metrics.md").read_text()
    named = [re.sub(r"<\w+>", "[^/]+", name) for name in re.findall(r"`([a-z_]+/[^`]+)`", text)]
    told = [name for sign in SIGNS for name in (*sign.metrics, *quoted_by(sign))]
    told = [name for name in told if re.match("[a-z_]+/", name)]
    assert [name for name in told if not any(re.fullmatch(one, name) for one in named)] == []


def test_signs_of_a_run_that_does_not_learn_name_keys_and_values_that_a_recipe_takes(
    tmp_path: Path,
) -> None:
    keys = (ROOT / "tests/fixtures/recipe_keys.txt").read_text().split()
    quoted = [name.partition(": ") for sign in SIGNS for name in quoted_by(sign)]
    named = [(key, value) for key, _, value in quoted if re.match(r"[a-z]+\.[a-z]", key)]
    assert len(named) > 20 and [key for key, _ in named if key not in keys] == []
    recipe = tmp_path / "my.yaml"
    recipe.write_text("model: {path: model}\ndata: {train_files: [train.jsonl]}\n")
    for key, value in named:
        load_recipe(recipe, [f"{key}={value}"] if value else [], check=False)


def test_signs_of_a_run_that_does_not_learn_name_commands_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_rows(tmp_path, 3)
    for line in {one for sign in SIGNS for one in (*sign.command.split("; "), *quoted_by(sign))}:
        program, *words = shlex.split(line.partition(" | ")[0])
        if program == "meshrl":
            given = [{"RUN": str(tmp_path), "N": "3"}.get(word, word) for word in words]
            # `rows` is run, with its conditions; the others are looked up.
            with pytest.raises(SystemExit) as ended:
                main(given if words[0] == "rows" else [*given, "--help"])
            assert not ended.value.code, (line, capsys.readouterr().err)


def test_every_file_of_a_run_is_named_with_what_bounds_it() -> None:
    """`tests/e2e/test_up.py` compares the directory of a run of today."""
    with tarfile.open(ROOT / "tests/fixtures/run-0.1.tar.gz") as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    run = [name.removeprefix("old-run/run/") for name in files if "/run/" in name]
    assert "metrics.jsonl" in run and "logs/queue.log" in run
    assert unnamed(run) == []
    assert unnamed(["logs/queue.log.1", "rewards/audit.jsonl.12", "queue-1/data.mdb"]) == []
    others = ["logs/core", "metrics.jsonl.1", "trace"]
    assert unnamed(others) == others
    assert all(bounds().values())
