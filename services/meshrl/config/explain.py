"""The meaning of a key of a recipe, its type in words and its default; and pydantic's errors as sentences."""

from __future__ import annotations

import difflib
import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from meshrl.common.checks import Loc, dotted
from meshrl.common.config import Config, documentation

SIMPLE: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One documented key."""

    path: tuple[str, ...]
    field: FieldInfo
    owner: type[Config]

    @property
    def dotted(self) -> str:
        """The key with dots, as in an override."""
        return ".".join(self.path)

    @property
    def doc(self) -> str:
        """Its docstring."""
        return documentation(self.owner, self.path[-1])

    @property
    def type_text(self) -> str:
        """The allowed values in words."""
        return type_text(self.field.annotation, self.field.metadata)

    @property
    def default_text(self) -> str:
        """The default as YAML would show it; `required` when there is none."""
        default = self.field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            return "required"
        return value_text(default)


def config_of(annotation: Any) -> type[Config] | None:
    """The Config class inside `annotation` (also in `X | None`, `list[X]`), if there is one."""
    if inspect.isclass(annotation) and issubclass(annotation, Config):
        return annotation
    for part in get_args(annotation):
        found = config_of(part)
        if found is not None:
            return found
    return None


def has_names(annotation: Any) -> bool:
    """True for a mapping of sections, whose keys are names that the recipe chooses."""
    origin = get_origin(annotation)
    return origin in (dict, get_origin(Mapping[str, int])) and config_of(annotation) is not None


def walk(model: type[Config], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key under `model`, sections before what they hold. Items of lists have no keys of their own.

    A name that a recipe chooses is `<name>` in the path. A field that pydantic leaves out of what it writes
    (`Field(exclude=True)`) is no key of a recipe.
    """
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        key = Key(path=(*prefix, name), field=field, owner=model)
        yield key
        section = config_of(field.annotation)
        if section is not None:
            inner = (*key.path, "<name>") if has_names(field.annotation) else key.path
            yield from walk(section, inner)


def locate(model: type[Config], loc: Loc) -> tuple[Loc, type[Config], FieldInfo | None]:
    """Follow `loc` through `model` as far as it names fields and list items.

    Returns:
        The part of `loc` that names something in a recipe (pydantic appends branches of unions), the
        class that holds the last name, and its field; None where the class has no such field.
    """
    owner, field = model, None
    named = False
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue
        if field is not None and has_names(field.annotation) and not named:
            named = True
            continue
        named = False
        if field is not None:
            section = config_of(field.annotation)
            if section is None:
                return loc[:index], owner, field
            if part not in section.model_fields and part == section.__name__:
                continue
            owner = section
        field = owner.model_fields.get(part)
        if field is None:
            return loc[: index + 1], owner, None
    return loc, owner, field


LONGEST_MEANT: Final = 200
"""Characters of a key that may be one of ours, spelt wrongly."""


def nearest(model: type[Config], loc: Loc) -> str | None:
    """The key that is most likely meant by `loc`.

    A key that ends in the same words first (`actor_rollout_ref.rollout.n` is `rollout.n`, `actor.lr` is
    `actor.optim.lr`), then a similar word in the same section, then a similar key anywhere.
    """
    words = [str(part) for part in loc if not isinstance(part, int)]
    dotted = ".".join(words)
    keys = [key.path for key in walk(model)]

    def shared(path: tuple[str, ...]) -> int:
        pairs = zip(reversed(path), reversed(words), strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(path), len(words)))

    def likeness(path: tuple[str, ...]) -> float:
        return difflib.SequenceMatcher(None, ".".join(path), dotted).ratio()

    if len(dotted) > LONGEST_MEANT:
        return None
    if longest := max(map(shared, keys)):
        alike = [path for path in keys if shared(path) == longest]
        best: tuple[str, ...] = max(alike, key=likeness)
        return ".".join(best)
    owner = locate(model, loc)[1]
    siblings = difflib.get_close_matches(words[-1], list(owner.model_fields), n=1)
    if siblings:
        return ".".join([*map(str, loc[:-1]), siblings[0]])
    anywhere = difflib.get_close_matches(dotted, [".".join(path) for path in keys], n=1, cutoff=0.7)
    return anywhere[0] if anywhere else None


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words: `a positive integer`, `one of a, b, c`, `a list of paths`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0], [*args[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part, metadata) for part in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in annotation)}"
    if inspect.isclass(annotation) and issubclass(annotation, Config):
        return f"a section with {', '.join(annotation.model_fields)}"
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(type_text(part) for part in args)}"
    if origin in (list, tuple, set, frozenset) or origin is typing.get_origin(Sequence[int]):
        return f"a list, each {type_text(args[0])}"
    if has_names(annotation):
        return f"names, each with {type_text(args[1])}"
    if annotation is dict or origin in (dict, typing.get_origin(Mapping[str, int])):
        return "a mapping"
    return _bounded(
        SIMPLE.get(annotation, getattr(annotation, "__name__", str(annotation))), metadata
    )


def _bounded(text: str, metadata: Sequence[Any]) -> str:
    if text not in ("an integer", "a number"):
        return text
    bounds = []
    for bound in metadata:
        match bound:
            case annotated_types.Gt(gt=0):
                text = text.replace("a number", "a positive number")
                text = text.replace("an integer", "a positive integer")
            case annotated_types.Gt(gt=low):
                bounds.append(f"> {low}")
            case annotated_types.Ge(ge=low):
                bounds.append(f">= {low}")
            case annotated_types.Lt(lt=high):
                bounds.append(f"< {high}")
            case annotated_types.Le(le=high):
                bounds.append(f"<= {high}")
    return " ".join([text, " and ".join(bounds)]).strip()


def value_text(value: Any) -> str:
    """A value as a recipe would show it, on one line."""
    if isinstance(value, Config):
        return "{}" if not value.model_fields_set else value_text(value.model_dump(mode="json"))
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in value)}]"
    return repr(value) if isinstance(value, str) else str(value)


def defined_at(key: Key) -> str:
    """`module.Class (file:line)` of the key's definition."""
    name = key.path[-1]
    for owner in key.owner.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            lines, start = inspect.getsourcelines(owner)
            offset = next(
                (n for n, line in enumerate(lines) if re.match(rf"\s+{name}\s*:", line)), 0
            )
            file = Path(inspect.getsourcefile(owner) or "?")
            here = Path.cwd()
            shown = file.relative_to(here) if file.is_relative_to(here) else file
            return f"{owner.__module__}.{owner.__qualname__} ({shown}:{start + offset})"
    return f"{key.owner.__module__}.{key.owner.__qualname__}"


WRITTEN_BY_US = frozenset({"value_error", "assertion_error"})
"""Kinds of error whose message a validator of ours wrote."""


MOST_TOLD: Final = 100
"""Problems of one file that are reported: each costs a search for the key that was meant."""


def problems(
    model: type[Config], error: ValidationError, origins: Mapping[Loc, str]
) -> dict[Loc, str]:
    """One sentence per wrong key. `origins` says which file and line, or which override, set a key."""
    found: dict[Loc, str] = {}
    for detail in error.errors(include_url=False):
        at, _, field = locate(model, detail["loc"])
        if field is not None and _plain_mapping(field.annotation):
            at = detail["loc"][: len(at) + 1]
        # An unknown section (verl's `actor_rollout_ref`) is answered key by key.
        leaves = _leaves(detail["input"], at) if field is None else [at]
        for leaf in leaves:
            if len(found) == MOST_TOLD:
                found[leaf] = f"{origin_of(origins, leaf)}: and more like these; mend them first"
                return found
            if leaf not in found:
                found[leaf] = f"{origin_of(origins, leaf)}: {_sentence(model, leaf, detail)}"
    return found


def in_order(found: Mapping[Loc, str], origins: Mapping[Loc, str]) -> list[str]:
    """Sentences in the order in which their keys were written down; those of absent keys last."""
    places = {at: index for index, at in enumerate(origins)}

    def place(at: Loc) -> int:
        return next(
            (places[at[:end]] for end in range(len(at), 0, -1) if at[:end] in places), 1 << 30
        )

    return [found[at] for at in sorted(found, key=place)]


def _leaves(value: Any, at: Loc) -> Iterator[Loc]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*at, key))
    else:
        yield at


def origin_of(origins: Mapping[Loc, str], at: Loc) -> str:
    """File and line of the nearest enclosing key that was written down."""
    for end in range(len(at), 0, -1):
        if at[:end] in origins:
            return origins[at[:end]]
    return origins[()]


def _sentence(model: type[Config], at: Loc, detail: ErrorDetails) -> str:
    named, owner, field = locate(model, at)
    if field is None:
        near = nearest(model, at)
        if near:
            return f"no such key {dotted(at)!r}; did you mean {near!r}?"
        return f"no such key {dotted(at)!r}; known here: {', '.join(owner.model_fields)}"
    chosen = has_names(field.annotation) or _plain_mapping(field.annotation)
    if chosen and locate(model, at[:-1])[2] is field:
        right = type_text(get_args(field.annotation)[1])
    elif isinstance(at[-1], int):
        right = type_text((get_args(field.annotation) or (field.annotation,))[0])
    else:
        right = type_text(field.annotation, field.metadata)
    name = next(part for part in reversed(named) if isinstance(part, str))
    meaning = documentation(owner, name)
    if detail["type"] == "missing":
        doc = f": {meaning}" if meaning else ""
        return f"{dotted(at)} is missing; want {right}{doc}".replace("\n", " ")
    given = _given(detail["input"])
    if detail["type"] in WRITTEN_BY_US:
        message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"{dotted(at)}: {message} (got {given})".replace("\n", " ")
    if detail["type"] == "string_pattern_mismatch":
        right += f" ({meaning})" if meaning else ""
    if detail["type"] == "list_type" and not isinstance(detail["input"], Mapping):
        right += f"; write [{given}]"
    return f"{dotted(at)}: got {given}, want {right}".replace("\n", " ")


def _plain_mapping(annotation: Any) -> bool:
    """True for a mapping of values, not of sections, whose keys the recipe chooses."""
    return get_origin(annotation) is dict and not has_names(annotation)


def _given(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a section ({', '.join(map(str, value))})"
    text = value_text(value)
    return text if len(text) <= 60 else text[:57] + "..."


def booleans_as_numbers(model: type[Config], tree: Any, at: Loc = ()) -> Iterator[tuple[Loc, str]]:
    """Places with `true` or `false` instead of a number: pydantic would read 1 and 0."""
    if isinstance(tree, Mapping):
        children: Sequence[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, list):
        children = list(enumerate(tree))
    else:
        children = []
    for part, value in children:
        where = (*at, part)
        named, _, field = locate(model, where)
        if field is None or named != where or isinstance(part, int):
            pass
        elif isinstance(value, bool) and not config_of(field.annotation):
            right = type_text(field.annotation, field.metadata)
            takes_bool = "true or false" in right or "anything" in right
            if not takes_bool and ("integer" in right or "number" in right):
                yield where, f"{dotted(where)}: got {value_text(value)}, want {right}"
        yield from booleans_as_numbers(model, value, where)
