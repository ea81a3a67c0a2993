"""Loading by name: known modules, and of others those that the service's own recipe names."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrl.common import plugins
from meshrl.common.plugins import check_admitted, load
from meshrl.common.python_process import PYTHON
from meshrl.common.user_functions import load_function
from meshrl.contract.errors import ConfigError

SAMPLERS = "meshrl.transferqueue.samplers"


@pytest.mark.parametrize("name", ["fifo", "my_package.my_order"])
def test_known_names_and_those_of_the_recipe_are_admitted(name: str) -> None:
    check_admitted(SAMPLERS, name, ["my_package.my_order"], "queue.sampler")


@pytest.mark.parametrize("name", ["os.path", "lib2to3.__main__", "..fifo", "a\0.b"])
def test_any_other_name_is_refused_with_the_key_that_admits_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"none of the samplers known here .* queue\.sampler$"):
        check_admitted(SAMPLERS, name, ["my_package.my_order"], "queue.sampler")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_module_that_stands_in_the_working_directory_is_told_about_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_folder: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if as_folder:
        Path("not_on_the_path").mkdir()
    else:
        Path("not_on_the_path.py").touch()
    with pytest.raises(ConfigError, match=f"not searched: set PYTHONPATH={tmp_path}"):
        load(SAMPLERS, "not_on_the_path.order", "Sampler")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(2)", "SystemExit: 2"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError: "),
    ],
)
def test_a_module_whose_import_fails_or_exits_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ends_at_import", raising=False)
    (tmp_path / "ends_at_import").mkdir()
    (tmp_path / "ends_at_import" / "order.py").write_text(source)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=f"its import ended with {said}"):
        load(SAMPLERS, "ends_at_import.order", "Sampler")
    with pytest.raises(ConfigError, match=f"key: cannot import .*{said}"):
        load_function("ends_at_import.order.agent", "key")


def test_a_service_imports_nothing_from_its_working_directory(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('planted')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*PYTHON, "meshrl.cli", "--help"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_chat_template_reaches_nothing_but_its_messages() -> None:
    pytest.importorskip("jinja2")
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for escape in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__self__.__class__ }}",
        "{% for n in range(10**9) %}x{% endfor %}",
    ):
        with pytest.raises(Exception, match=r"unsafe|Range too big"):
            utils.render_jinja_template(
                conversations=[[{"role": "user", "content": "x"}]], chat_template=escape
            )


def test_a_literal_is_read_while_another_thread_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, failures = ast.parse, ["AST constructor recursion depth mismatch"]

    def fails_once(text: str) -> ast.Module:
        if failures:
            raise SystemError(failures.pop())
        return parse(text)

    monkeypatch.setattr(ast, "parse", fails_once)
    plugins._parsed.cache_clear()
    assert plugins.constant("meshrl.weights.carriers", "shm", "PATTERN", "") == "meshrl-*.weights"
    assert not failures


@pytest.mark.parametrize("initialised", [True, False])
def test_a_module_is_found_without_running_it_or_the_packages_that_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initialised: bool
) -> None:
    inner = tmp_path / "held" / "in_turn"
    inner.mkdir(parents=True)
    (inner / "order.py").write_text("raise SystemExit")
    if initialised:
        for folder in (inner, inner.parent):
            (folder / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    spec = plugins.find("held.in_turn.order")
    assert spec is not None and spec.origin == str(inner / "order.py")
    assert plugins.find("held.in_turn") is not None and "held" not in sys.modules
    for name in ("held.other", "held.in_turn.order.more", "nowhere.at", "", "held..order", "a\0.b"):
        assert plugins.find(name) is None, name
    assert plugins.constant(SAMPLERS, "held.in_turn.order", "REQUIRES", None) is None


def test_a_folder_without_init_has_parts_in_several_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "spread" / "out").mkdir(parents=True)
        (tmp_path / place / "spread" / "out" / f"in_{place}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / place)
    for place in ("a", "b"):
        assert plugins.find(f"spread.out.in_{place}") is not None


def test_loaded_modules_and_those_of_the_mesh_are_found() -> None:
    for name in ("os.path", "meshrl.rollout.engines.vllm", "meshrl.contract", "xml.etree"):
        assert plugins.find(name) == importlib.util.find_spec(name)
