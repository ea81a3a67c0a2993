"""Keeps the house small: no circles, crowded folders or crumbs, a name for one thing, ceilings that only fall.

It also refuses a class that is based on a type alias, which a later numpy or Python may not permit.

`python .ci/architecture.py` prints each fault and ends with 1; `--table` prints the sizes. Part of `make check`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOMS = ("common", "proto", "transferqueue", "rollout", "rewardd", "trainer", "services")
MOST_MODULES = 25
"""In one folder, `__init__.py` left out."""
CRUMB_LINES = 60
"""A shorter module that one module of its package imports, and nobody else, joins it, unless it is a plug-in."""

PRODUCT_LINES = 119_177
"""The most lines of the product, generated code left out. It only falls, or the commit names what pays for more."""
TEST_LINES = 83_690
"""The most lines under tests/, without the simulation and the doubles."""

GENERATED = ("meshrl.client.sync",)
"""Modules that a script of this repository writes, and a test compares with what it writes."""

MOST_PARTS = 8
"""Parameters of a constructor. Plain data, dataclasses, may have more fields."""
MANY_PARTS = {"QueueDataset"}
"""Constructors that users call by keyword, with defaults."""
NAMES_TWICE = 20
"""The most names of classes that stand for several things; plug-ins have the same one by design."""

PLUGINS = (
    "meshrl.rewardd.judges",
    "meshrl.rewardd.rewards",
    "meshrl.rollout.engines",
    "meshrl.rollout.programs",
    "meshrl.trainer.algorithms",
    "meshrl.trainer.algorithms.advantages",
    "meshrl.trainer.algorithms.losses",
    "meshrl.trainer.algorithms.recipes",
    "meshrl.trainer.data.readers",
    "meshrl.trainer.loggers",
    "meshrl.transferqueue.samplers",
    "meshrl.transferqueue.stores",
    "meshrl.weights.carriers",
)
"""Packages whose modules are found by name, and `algorithms`: one file a formula. `_private` ones are neither."""


def modules() -> dict[str, Path]:
    """Name to file of every module of the product, generated protos left out."""
    found: dict[str, Path] = {}
    for room in ROOMS:
        for path in Path(room, "meshrl").rglob("*.py"):
            if "_pb2" in path.name or "plugin" in path.parts:
                continue
            parts = path.relative_to(room).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one import circle, each imported by the next; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def package_of(name: str) -> str:
    """`meshrl.rpc` of `meshrl.rpc.clients.queue`."""
    return ".".join(name.split(".")[:2])


def lines_of(files: Mapping[str, Path]) -> Counter[str]:
    """Package to lines, generated code left out."""
    counted: Counter[str] = Counter()
    for name, path in files.items():
        if name not in GENERATED:
            counted[package_of(name)] += _length(path)
    return counted


def tests() -> list[Path]:
    """The files under tests/, without the simulation and the doubles, which tests run on."""
    doubles = {Path("tests/doubles"), Path("tests/simulation")}
    kept = Path("tests/simulation/tests")
    return [
        path
        for path in Path("tests").rglob("*.py")
        if kept in path.parents or not doubles & {*path.parents}
    ]


def _length(path: Path) -> int:
    return len(path.read_text().splitlines())


def named_elsewhere(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Name to its module and the name there, for each import at any level; of a whole module, the name is empty."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                found[each.asname or each.name] = (node.module, each.name)
        elif isinstance(node, ast.Import):
            found |= {each.asname: (each.name, "") for each in node.names if each.asname}
    return found


def based_on_aliases(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, int, str]]:
    """Module, line and base of each class whose base is a type alias, numpy's included: by name, wherever it is from.

    An alias is for annotations. `class Shared(npt.NDArray[Any])` worked until numpy 2.5 made a `TypeAliasType` of it.
    """
    elsewhere = {name: named_elsewhere(tree) for name, tree in trees.items()}
    aliases = {
        name: {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and ast.unparse(node.annotation).endswith("TypeAlias")
        }
        for name, tree in trees.items()
    }

    def is_alias(module: str, name: str) -> bool:
        if module == "numpy.typing":
            return True
        if name in aliases.get(module, ()):
            return True
        there = elsewhere.get(module, {}).get(name)
        return there is not None and there != (module, name) and is_alias(*there)

    for module, tree in trees.items():
        for node in ast.walk(tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                named = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(named, ast.Attribute):
                    folder, first = elsewhere[module].get(ast.unparse(named.value), ("", ""))
                    place = (f"{folder}.{first}" if first else folder, named.attr)
                else:
                    place = (module, ast.unparse(named))
                if is_alias(*place):
                    yield module, node.lineno, ast.unparse(base)


def wide_constructors(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str, int]]:
    """Module, class and number of parameters of each `__init__` with more than MOST_PARTS, `self` left out."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    count = len([*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs])
                    if count - 1 > MOST_PARTS and node.name not in MANY_PARTS:
                        yield module, node.name, count - 1


def names_twice(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Names of top-level classes that several modules define."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: places for name, places in found.items() if len(places) > 1}


def faults() -> Iterator[str]:
    """One line per broken rule."""
    files = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    for name, owner, count in wide_constructors(trees):
        yield f"{files[name]}: {owner} takes {count} things, at most {MOST_PARTS}: group what belongs together"
    if len(twice := names_twice(trees)) > NAMES_TWICE:
        yield f"{len(twice)} names stand for several classes, at most {NAMES_TWICE}: {', '.join(sorted(twice))}"
    for name, line, base in based_on_aliases(trees):
        yield f"{files[name]}:{line}: a class based on {base}, a type alias: name the class itself"
    graph = grimp.build_graph("meshrl", cache_dir=None)
    imports = {
        name: sorted(graph.find_modules_directly_imported_by(name)) for name in graph.modules
    }
    if found := circle(imports):
        yield f"import circle: {' <- '.join(found)}"

    folders: defaultdict[Path, int] = defaultdict(int)
    for path in files.values():
        folders[path.parent] += path.name != "__init__.py"
    for folder, count in sorted(folders.items()):
        if count > MOST_MODULES:
            yield f"{folder}: {count} modules, at most {MOST_MODULES}"

    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, imported in imports.items():
        for other in imported:
            importers[other].add(name)
    for name, path in sorted(files.items()):
        count = _length(path)
        small = count <= CRUMB_LINES and path.name not in ("__init__.py", "__main__.py")
        package, _, leaf = name.rpartition(".")
        plugin = package in PLUGINS and leaf[0] != "_"
        users = {user for user in importers[name] if not user.startswith("meshrl.testing")}
        if small and not plugin and len(users) == 1:
            user = users.pop()
            if user != package and package_of(user) == package_of(name):
                yield f"{path}: {count} lines, imported by {user} alone: it belongs there"

    for what, lines, most in (
        ("the product", lines_of(files).total(), PRODUCT_LINES),
        ("tests/", sum(map(_length, tests())), TEST_LINES),
    ):
        if lines > most:
            yield f"{what}: {lines} lines, at most {most}: make it smaller first"


def main() -> int:
    """The exit code."""
    if "--table" in sys.argv:
        files = modules()
        counted = lines_of(files)
        for package, lines in sorted(counted.items(), key=lambda item: -item[1]):
            held = sum(package_of(name) == package for name in files)
            print(f"{package:24} {held:4} modules {lines:6} lines")
        print(f"{'all':24} {len(files):4} modules {sum(counted.values()):6} lines")
        return 0
    found = list(faults())
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
