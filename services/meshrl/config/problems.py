"""From what pydantic found to sentences: one line per key, with what was given and what is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshrl.common.config import Config, documentation
from meshrl.config.explain import Loc, config_of, has_names, locate, nearest, type_text, value_text

WRITTEN_BY_US = frozenset({"value_error", "assertion_error"})
"""Kinds of error whose message a validator of ours wrote."""


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
    """Where the nearest enclosing key that was written down stands."""
    for end in range(len(at), 0, -1):
        if at[:end] in origins:
            return origins[at[:end]]
    return origins[()]


def dotted(at: Loc) -> str:
    """As a person writes it."""
    return ".".join(map(str, at))


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
    """Places where `true` or `false` stands for a number: pydantic would read 1 and 0."""
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
