"""Options that only one estimator or loss reads: a class in a file beside the algorithm, which imports no torch.

    advantages/gdpo.py            the estimator
    advantages/_options/gdpo.py   its options: `class Options(Config)`

Options of this tree are keys of the section itself (`algorithm.gdpo_reward_keys`), which is put together from all
files of the folder. Those of a module named by a dotted path, `a.b`, are the class `Options` in `a._options.b`; a
recipe writes them under `algorithm.options` or `actor.policy_loss.options`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import create_model

from meshrl.common import plugins
from meshrl.common.config import Config, read_options
from meshrl.contract.errors import ConfigError

FOLDER = "_options"
C = TypeVar("C", bound=Config)


class Section(Protocol):
    """A section of a recipe that names a module and holds its options."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of a module named by a dotted path."""
        ...


def with_options(package: str) -> Callable[[type[C]], type[C]]:
    """Decorates a section: adds the keys of every `Options` class in `package`.

    Raises:
        TypeError: two classes define the same key.
    """

    def compose(section: type[C]) -> type[C]:
        folder = f"{package}.{FOLDER}"
        parts = [plugins.load(folder, name, "Options") for name in plugins.known(folder)]
        owners: dict[str, type] = {}
        for part in (section, *parts):
            for key in part.model_fields:
                if key in owners:
                    raise TypeError(f"{part.__module__} and {owners[key].__module__} define {key}")
                owners[key] = part
        # pydantic lists the keys of the last base first.
        return create_model(
            section.__name__,
            __base__=(*reversed(parts), section),
            __doc__=section.__doc__,
            __module__=section.__module__,
        )

    return compose


def options(section: Section, kind: type[C]) -> C:
    """The values that `section` gives to the options of class `kind`: its own keys, or what is under `options`.

    Raises:
        ConfigError: wrong values under `options`.
    """
    composed: object = section
    if isinstance(composed, kind):
        return composed
    return read_options(kind, section.options, where="options")


def check_options(name: str, values: Mapping[str, Any], *, where: str) -> None:
    """Check the options that a recipe gives to the module `name` under the key `where`.

    Raises:
        ConfigError: wrong values, or options for a module that takes none there.
    """
    parent, _, module = name.rpartition(".")
    if not parent:
        if values:
            raise ConfigError(
                f"{where}: only for a module named by a dotted path, {name!r} is none", key=where
            )
        return
    folder = f"{parent}.{FOLDER}"
    try:
        defined = importlib.util.find_spec(f"{folder}.{module}") is not None
    except ModuleNotFoundError:
        defined = False
    if defined:
        read_options(plugins.load(folder, f"{folder}.{module}", "Options"), values, where=where)
    elif values:
        raise ConfigError(
            f"{where}: {name} takes none (there is no module {folder}.{module})", key=where
        )
