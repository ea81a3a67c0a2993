"""How a Python process of the mesh starts: in one way, whatever the environment tells Python.

    python -E -P -u -X utf8 python_process.py MODULE|FILE.py ARGUMENT...

No variable of Python counts: PYTHONOPTIMIZE takes docstrings that libraries read, PYTHONWARNINGS makes errors of
their warnings. PYTHONPATH does, with its folders behind the standard library: a `types.py` there hides nothing.
The environment itself stays as it is, for what the mesh starts and has not written: agents, servers, tools.

Run as a file with the standard library only, also by the Python of another environment.
"""

from __future__ import annotations

import os
import sys

MODULES = "MESHRL_PYTHONPATH"
"""PYTHONPATH of a process that is started with some variables of Python."""
TERMINAL = "MESHRL_TERMINAL"
"""The encoding of the terminal of a process that has started itself again."""
CHANGING = ("PYTHONPATH", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONINSPECT", "PYTHONDEBUG")
"""Variables under which Python runs otherwise from its first line on."""


def start_words(python: str = sys.executable) -> tuple[str, ...]:
    """The words of a command before a module's name, or a file's, and its arguments."""
    words = [python, "-E", "-P", "-u", "-X", "utf8"]
    if sys.flags.dont_write_bytecode:
        words.append("-B")
    if sys.flags.no_user_site:
        words.append("-s")
    return (*words, __file__)


PYTHON = start_words()


def start_again(module: str) -> None:
    """Run `module` with this process's arguments in its place, if its Python was started otherwise; else return."""
    if sys.flags.ignore_environment or not sys.executable:
        return
    if not any(map(os.environ.get, CHANGING)) and _reads_utf8():
        return
    if sys.stdout is not None:
        os.environ[TERMINAL] = sys.stdout.encoding
    os.execv(sys.executable, [*PYTHON, module, *sys.argv[1:]])


def _reads_utf8() -> bool:
    """Whether files are read as UTF-8, in which all files of the mesh are written, where nothing else is said."""
    import locale

    return sys.flags.utf8_mode == 1 or locale.getencoding().upper() in ("UTF-8", "UTF8")


def start_with(variables: dict[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The start of a command as PYTHON has it, and the environment, with `variables` of Python in effect."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment[MODULES] = os.environ.get("PYTHONPATH", "")
    return tuple(word for word in PYTHON if word != "-E"), environment | variables


def spared(environment: dict[str, str], *given: str) -> tuple[dict[str, str], list[str]]:
    """`environment` for a Python program of others that must start, and what was left out: what would change Python.

    Variables that are `given` stay; of PYTHONPATH what hides no module of the standard library.
    """
    left_out = [name for name in CHANGING if environment.get(name) and name not in given]
    kept = {name: value for name, value in environment.items() if name not in left_out}
    if "PYTHONPATH" in left_out:
        left_out.remove("PYTHONPATH")
        folders = environment["PYTHONPATH"].split(os.pathsep)
        hiding = [f"{folder} of PYTHONPATH" for folder in folders if _hides(folder)]
        kept["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if not _hides(folder))
        left_out += hiding
    return kept, left_out


def _hides(folder: str) -> bool:
    """Whether a module in `folder` is named as one of the standard library."""
    try:
        names = set(os.listdir(folder or "."))  # noqa: PTH208
    except OSError:
        return False
    return any(
        f"{name}.py" in names
        or (name in names and os.path.exists(os.path.join(folder, name, "__init__.py")))  # noqa: PTH110, PTH118
        for name in sys.stdlib_module_names
    )


def main() -> None:
    """Run the module or the file that the arguments name, as Python would."""
    import runpy

    named = os.environ.pop(MODULES, None) or os.environ.get("PYTHONPATH", "")
    folders = [os.path.abspath(folder) for folder in named.split(os.pathsep) if folder]  # noqa: PTH100
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    own = (library, f"{library}/lib-dynload")
    behind = 1 + max((at for at, folder in enumerate(sys.path) if folder in own), default=-1)
    sys.path[behind:behind] = [folder for folder in folders if folder not in sys.path]
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
