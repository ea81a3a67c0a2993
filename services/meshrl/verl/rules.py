"""Rules for verl keys: settings of a recipe, nothing to say because the mesh does it anyway, or a refusal.

A rule is a key and a function from its value (and all that was given) to an `Conversion`. The table is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from meshrl.verl.programs import VerlProgram

UNSET: Any = object()
"""No value."""
ENGINE_ARGUMENTS = "rollout.engine.extra_args"
"""Several verl keys add to this one."""
ANY_NAME = "<name>"
"""One word of a key that the user chose."""
KEYWORD = "--*"
"""An argument that is named as the rest of the key is."""


class KeyStatus(StrEnum):
    """The result of a key."""

    MAPPED = "mapped"
    """The recipe says the same, or the mesh does so by default."""
    IGNORED = "ignored"
    """The key has no meaning here, or changes only speed and memory."""
    REFUSED = "refused"
    """The key would change the run, and nothing here does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The conversion of one key."""

    status: KeyStatus = KeyStatus.MAPPED
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe."""
    note: str = ""
    """How the value was converted, why the key is ignored, or what to do instead."""
    engine_arguments: Sequence[str] = ()
    """Arguments of the vLLM server."""


class Given:
    """The values of a command line or a YAML, by dotted key."""

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        program: VerlProgram = VerlProgram(),  # noqa: B008 - frozen
    ) -> None:
        self.values = {**program.defaults, **values}
        self.program = program
        self._defaults = defaults

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = UNSET) -> Any:
        """The given value; else `default`; else verl's default."""
        value = self.values.get(key)
        if value is not None:
            return value
        return self._defaults.get(key) if default is UNSET else default

    @property
    def batch_prompts(self) -> int:
        """Prompts of one training step."""
        if not self.program.asynchronous:
            return int(self.get("data.train_batch_size"))
        batches = int(self.get("async_training.require_batches"))
        return batches * int(self.get("actor_rollout_ref.actor.ppo_mini_batch_size"))

    @property
    def row_tokens(self) -> int:
        """The longest row that may be."""
        return int(self.get("data.max_prompt_length")) + int(self.get("data.max_response_length"))


Convert = Callable[[Any, Given], Conversion]


def configured(convert: Callable[..., Conversion]) -> Callable[..., Convert]:
    """A function of a conversion's own arguments, which precede value and given in it: `path_to("model.path")`."""

    def made(*own: Any, **more: Any) -> Convert:
        return partial(convert, *own, **more)

    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """The rule of a key; one that ends in `.*` stands for everything below it."""

    key: str
    convert: Convert
    default: Any = None
    """verl's: taken where the key is not given."""
    take_default: bool = False
    """Write the default down where a recipe's own is another."""
    unnamed: bool = False
    """Whether it stands for keys that were never examined."""

    def fits(self, key: str) -> bool:
        """Whether it is the rule of `key`, or stands for what is below a section or a user's name."""
        if self.key.endswith(".*"):
            return key.startswith(self.key[:-1])
        if ANY_NAME not in self.key:
            return self.key == key
        before, _, after = self.key.partition(ANY_NAME)
        name = key.removeprefix(before).removesuffix(after)
        return key == f"{before}{name}{after}" and "." not in name


def same(key: str, ours: str, default: Any = UNSET, *, note: str = "") -> KeyRule:
    """The same number under another name; `default` is verl's where a recipe's may differ."""

    def convert(value: Any, given: Given) -> Conversion:
        return Conversion(settings={ours: value}, note=note)

    return rule(key, convert, default)


def rule(key: str, convert: Convert, default: Any = UNSET) -> KeyRule:
    """Any conversion; with a `default` also where the key is not given."""
    known = None if default is UNSET else default
    return KeyRule(key=key, convert=convert, default=known, take_default=default is not UNSET)


def within(key: str, why: str, default: Any = None) -> KeyRule:
    """The mesh does so by default."""
    return KeyRule(key=key, convert=lambda value, given: Conversion(note=why), default=default)


def ignored(key: str, why: str) -> KeyRule:
    """A key without consequence here."""
    return KeyRule(
        key=key, convert=lambda value, given: Conversion(status=KeyStatus.IGNORED, note=why)
    )


def ignored_below(section: str, names: Iterable[str], why: str) -> Iterator[KeyRule]:
    """Ignore these keys of a section, each named."""
    for name in names:
        yield ignored(f"{section}.{name}", why)


def unnamed(section: str) -> KeyRule:
    """Every other key of a section: refused unless it is switched off, because nobody here knows what it changes."""
    instead = "not known here: it may change the run; leave it out if it changes speed, memory or logging only"
    return replace(refused(f"{section}.*", instead), unnamed=True)


def unless(switch: str, section: str, why: str, instead: str) -> KeyRule:
    """A whole section that counts only while its key `switch` is on."""

    def convert(value: Any, given: Given) -> Conversion:
        on = given.get(f"{section}.{switch}", None) not in (None, False, "")
        return no(instead) if on else Conversion(status=KeyStatus.IGNORED, note=why)

    return KeyRule(key=f"{section}.*", convert=convert)


def refused(
    key: str, instead: str, off: Sequence[Any] = (None, False, "", [], {}), default: Any = None
) -> KeyRule:
    """Refused unless it is switched off."""

    def convert(value: Any, given: Given) -> Conversion:
        if value in off or value == default:
            return Conversion(status=KeyStatus.IGNORED, note="switched off")
        return Conversion(status=KeyStatus.REFUSED, note=instead)

    return KeyRule(key=key, convert=convert, default=default)


def no(instead: str) -> Conversion:
    """A refusal."""
    return Conversion(status=KeyStatus.REFUSED, note=instead)


def expanded(path: Any) -> str:
    """A path as verl opens it, `~` replaced."""
    return str(Path(str(path)).expanduser())


def as_list(value: Any) -> list[Any]:
    """One value in place of a list is a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]
