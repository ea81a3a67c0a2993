"""Options that only one estimator or loss reads: the class `Options` in the file of the formula.

    advantages/gdpo.py       class Options(Config): gdpo_reward_keys, …      compute(batch, config)

Options of this tree are keys of the section itself (`algorithm.gdpo_reward_keys`), which is put together from all
files of the folder, so that these import torch only when they compute (`lazy_torch`). Those of a module named by a
dotted path are written under `algorithm.options` or `actor.policy_loss.options`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import create_model

from meshrl.common import plugins
from meshrl.common.config import Config, read_options
from meshrl.contract.errors import ConfigError
from meshrl.trainer.algorithms.lazy_torch import Tensor

ADVANTAGES = "meshrl.trainer.algorithms.advantages"
LOSSES = "meshrl.trainer.algorithms.losses"
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
        modules = [importlib.import_module(module) for module in plugins.modules(package).values()]
        parts = dict.fromkeys(module.Options for module in modules if hasattr(module, "Options"))
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


def need(value: Tensor | None, name: str, asker: str) -> Tensor:
    """`value`, a column `name` that `asker` reads (`algorithm.adv_estimator gae`).

    Raises:
        ConfigError: it was not given.
    """
    if value is None:
        raise ConfigError(f"{asker} needs {name}, the batch has none")
    return value


def check_options(package: str, name: str, values: Mapping[str, Any], *, where: str) -> None:
    """Check the options that a recipe gives to the module `name` under the key `where`.

    Raises:
        ConfigError: wrong values, or options for a module that takes none there.
    """
    kind = None
    if "." in name:
        kind = plugins.config_class(package, name, "Options")
    elif values:
        raise ConfigError(
            f"{where}: only for a module named by a dotted path, {name!r} is none", key=where
        )
    if kind is not None:
        read_options(kind, values, where=where)
    elif values:
        raise ConfigError(f"{where}: {name} takes none (it has no class Options)", key=where)
