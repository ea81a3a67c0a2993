"""Is the documentation true: links, names, generated pages; does a page or a recipe explain each key?"""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshrl.cli import main
from meshrl.cli.root import KNOWN
from meshrl.config import Recipe, load_recipe
from meshrl.config.explain import walk
from meshrl.contract.errors import ConfigError
from meshrl.trainer.metrics.learning_signs import SIGNS, Sign
from meshrl.verl.rules import Given
from meshrl.verl.table import rules

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


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return frozenset(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_a_heading_find_it(page: Path) -> None:
    for _, target in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if not anchor or re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / path).resolve() if path else page
        if file.suffix == ".md":
            assert anchor in anchors(file), f"{name_of(page)}: {target} finds no heading"


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


def test_the_website_has_each_page_once_and_links_out_of_it_lead_to_the_repository() -> None:
    website = runpy.run_path(str(DOCS / "website.py"))
    map_of_pages = (DOCS / "README.md").read_text()
    sections = website["navigation"](map_of_pages)[1:]
    listed = [
        path
        for section in sections
        for pages in section.values()
        for each in pages
        for path in each.values()
    ]
    pages = [str(page.relative_to(DOCS)) for page in DOCS.glob("*/*.md")]
    assert sorted(path for path in listed if path.endswith(".md")) == sorted(pages)
    outward = website["outward"]
    assert "](../" not in outward(DOCS / "README.md", "https://host/blob/main")
    assert "](https://host/blob/main/proto/README.md)" in outward(
        DOCS / "README.md", "https://host/blob/main"
    )
    assert "README.md)" not in outward(DOCS / "README.md", "")


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


LEARNING = ("algorithm", "actor", "critic")
"""Sections of verl's: options of its optimizers, estimators and losses, and of those beside them, by their papers."""
TRIED = (1, "cosine", True, 0.5, "R3", "mlflow", "cpu", "disable", ["x"])
"""Values of all kinds that verl's keys take: one of them is a setting for each key that is translated."""
EXPLAIN = re.compile(r"docs/(how-to|reference)/(?!config|cli|errors|identity)[^/]+|.+/README.md")
"""Pages that a person wrote for who sets up a run, and READMEs of rooms and recipes."""
OVERRIDE = re.compile(r"`([\w.]+)='([^'`]+)'`")
YAML_FENCE = re.compile(r"^ *```ya?ml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def written(pattern: str) -> dict[str, str]:
    """The text of files that git has outside the tests, by path."""
    done = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in done.stdout.splitlines() if not name.startswith("tests/")]
    return {name: (ROOT / name).read_text() for name in names}


def dotted(tree: Any, at: str = "") -> Iterator[str]:
    """Every key in a tree of YAML; items of lists have no names."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{at}.{key}" if at else str(key)
            yield name
            yield from dotted(value, name)
    elif isinstance(tree, list):
        for item in tree:
            yield from dotted(item, at)


def in_yaml(texts: list[str]) -> str:
    """The keys that YAML documents set, one a line; what is no YAML by itself has none."""
    found: list[str] = []
    for text in texts:
        with suppress(yaml.YAMLError):
            found += [key for tree in yaml.safe_load_all(text) for key in dotted(tree)]
    return "\n".join(found)


def in_overrides(text: str) -> str:
    """The keys that a page sets as `a.b='{c: 1}'`, one a line."""
    return "\n".join(
        name
        for key, value in OVERRIDE.findall(text)
        for name in (key, *dotted(yaml.safe_load(value), key))
    )


def keys_with_values() -> set[str]:
    """Keys of a recipe that take a value themselves."""
    keys = [key.dotted for key in walk(Recipe)]
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def from_verl() -> set[str]:
    """Keys that a command of verl's may set."""
    table, found = rules(), set[str]()
    given = Given({}, {rule.key: rule.default for rule in table})
    for rule in table:
        for value in (rule.default, *TRIED):
            with suppress(ConfigError, TypeError, ValueError, KeyError, AttributeError):
                settings = rule.convert(value, given).settings
                found |= {key.removesuffix(".*") for key in settings}
    return found


def test_each_key_is_verls_or_set_by_a_shipped_recipe_or_explained_on_a_page() -> None:
    pages = {name: page for name, page in written("*.md").items() if EXPLAIN.fullmatch(name)}
    set_there = in_yaml(list(written("*.yaml").values()))
    said = "\n".join(pages.values())
    shown = "\n".join((in_yaml(YAML_FENCE.findall(said)), in_overrides(said)))
    verls = from_verl()
    unexplained = []
    for key in sorted(keys_with_values() - verls):
        if key.startswith(tuple(f"{section}." for section in LEARNING)):
            continue
        name = re.escape(key).replace("<name>", r"[\w<>-]+")
        line = re.compile(rf"^{name}(\.|$)", re.MULTILINE)
        text = re.compile(rf"(?<![\w.]){name}(?![\w])")
        if not (line.search(set_there) or line.search(shown) or text.search(said)):
            unexplained.append(key)
    assert not unexplained, (
        "say on a page of docs/how-to or docs/reference when to change it, or make it a constant"
    )
