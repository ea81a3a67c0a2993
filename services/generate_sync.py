"""Writes `meshrl.client.sync` from the async client: `make sync`. A test fails when it is out of date.

Each async class becomes one of the same name that holds the async object and an EventLoopThread:

    async def f(...) -> T      def f(...) -> T: return self._portal.call(self._wrapped.f(...))
    __aenter__, __anext__ …    __enter__, __next__ …
    -> another of the classes  wrapped in turn
Signatures, annotations and docstrings are copied, so that type checkers and `help` see the same.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CLIENT = Path(__file__).parent / "meshrl" / "client"
TARGET = CLIENT / "sync.py"
CLASSES = {
    "batches": ("Checkpoint", "Batches"),
    "leases": ("HeldLease",),
    "queue": ("Run", "Queue"),
}
WRAPPED = {name for names in CLASSES.values() for name in names}
LEFT_OUT = {"port"}  # its methods are coroutines
SPECIAL = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
HEADER = '''"""The client without `await`: `with Queue.connect("127.0.0.1:7001") as queue`.

Written by services/generate_sync.py (`make sync`): change the async classes, not this file.

A connection runs an event loop in a thread of its own; any thread may call. Ctrl-C during a call cancels it and gives
back what it held. After a fork, calls raise UserError: connect in the process that uses the connection. A lease that
is lost while the block runs raises LeaseLostError at the next `write`, or at the end of the block.
"""
'''


def main() -> None:
    """Write the module."""
    TARGET.write_text(text())


def text() -> str:
    """The module, formatted."""
    trees = {name: ast.parse((CLIENT / f"{name}.py").read_text()) for name in CLASSES}
    classes = [
        _facade(node)
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES[module]
    ]
    body = "\n\n\n".join(classes)
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    lines = [HEADER, "from __future__ import annotations", *_imports(trees, used), body]
    return _ruff("\n".join(lines) + "\n")


def _imports(trees: dict[str, ast.Module], used: set[str]) -> Iterator[str]:
    for module, names in CLASSES.items():
        wanted = [f"{name} as Async{name}" for name in names]
        wanted += [
            node.name
            for node in trees[module].body
            if isinstance(node, ast.ClassDef) and node.name not in WRAPPED and node.name in used
        ]
        constants = [
            _target(node) for node in trees[module].body if isinstance(node, ast.AnnAssign)
        ]
        wanted += [name for name in constants if name in used]
        yield f"from meshrl.client.{module} import {', '.join(wanted)}"
    yield "from meshrl.client.portal import EventLoopThread"
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                kept = [a for a in node.names if (a.asname or a.name) in used - WRAPPED]
                if kept:
                    yield ast.unparse(
                        ast.ImportFrom(module=node.module, names=kept, level=node.level)
                    )


def _target(node: ast.AnnAssign) -> str:
    return node.target.id if isinstance(node.target, ast.Name) else ""


def _facade(node: ast.ClassDef) -> str:
    lines = [f"class {node.name}:", _docstring(node)]
    lines += [
        f"    def __init__(self, wrapped: Async{node.name}, portal: EventLoopThread) -> None:",
        "        self._wrapped = wrapped",
        "        self._portal = portal",
    ]
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            lines += _method(node.name, child)
    return "\n".join(lines)


def _method(owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    name = SPECIAL.get(node.name, node.name)
    if name in LEFT_OUT or (name.startswith("_") and node.name not in SPECIAL):
        return
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    returns = ast.unparse(node.returns) if node.returns else "None"
    yield ""
    yield from (f"    @{decorator}" for decorator in decorators)
    yield f"    def {name}({ast.unparse(node.args)}) -> {returns}:"
    if docstring := _docstring(node):
        yield f"    {docstring}"
    if "classmethod" in decorators:
        yield f"        return cls(Async{owner}.{name}({_passed(node.args)}), EventLoopThread())"
        return
    is_property = "property" in decorators
    call = f"self._wrapped.{node.name}" + ("" if is_property else f"({_passed(node.args)})")
    if isinstance(node, ast.AsyncFunctionDef):
        call = f"self._portal.call({call})"
    yield from _body(owner, name, call, returns)


def _body(owner: str, name: str, call: str, returns: str) -> Iterator[str]:
    if name == "__next__":
        yield "        try:"
        yield f"            return {call}"
        yield "        except StopAsyncIteration:"
        yield "            raise StopIteration from None"
    elif owner == "Queue" and name in ("close", "__exit__"):
        yield "        try:"
        yield f"            {call}"
        yield "        finally:"
        yield "            self._portal.close()"
    elif returns == "Self":
        yield f"        {call}"
        yield "        return self"
    elif returns in WRAPPED:
        yield f"        return {returns}({call}, self._portal)"
    elif returns == "None":
        yield f"        {call}"
    else:
        yield f"        return {call}"


def _docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    found = ast.get_docstring(node, clean=False)
    return f'    """{found.replace("async with", "with")}"""' if found else ""


def _passed(arguments: ast.arguments) -> str:
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]][1:]
    starred = [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    return ", ".join([*positional, *starred, *(f"{a.arg}={a.arg}" for a in arguments.kwonlyargs)])


def _ruff(source: str) -> str:
    for arguments in (["check", "--select", "I", "--fix"], ["format"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "-"]
        command += ["--stdin-filename", str(TARGET)]
        source = subprocess.run(
            command, input=source, capture_output=True, text=True, check=True
        ).stdout
    return source


if __name__ == "__main__":
    main()
