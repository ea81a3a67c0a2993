"""YAML of strangers, bounded before it is expanded."""

from __future__ import annotations

from typing import Any, Final

import yaml

MOST_VALUES: Final = 20_000
"""Keys and values of one document, each alias counted as what it repeats. A recipe has some hundred."""
TEXT_OF_A_VALUE: Final = 64
"""Characters of a text that count as one more value."""
MOST_DEPTH: Final = 100
"""Levels of sections and lists."""
MOST_DIGITS: Final = 1000
"""Characters of a whole number: 1:1:1… takes long to work out, and 0xff… has more digits than Python prints."""


class BoundedLoader(yaml.SafeLoader):
    """Refuses a document whose aliases repeat too much, or contain themselves, with a `yaml.YAMLError`."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node of the document; their number is bounded."""
        self._composed = getattr(self, "_composed", 0) + 1
        if self._composed > MOST_VALUES:
            raise self._refused(parent, f"more than {MOST_VALUES:,} keys and values")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The document's root, or None of an empty document."""
        try:
            node: yaml.Node | None = super().get_single_node()
        except RecursionError:
            raise self._refused(None, f"more than {MOST_DEPTH} levels") from None
        if node is not None:
            self._check(node, {}, 0)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of `node`; one that its tag cannot be, such as `!!int x`, is a `yaml.YAMLError`, too."""
        try:
            if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
                raise ValueError
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = (
                f"{str(getattr(node, 'value', ''))[:40]!r} is no {node.tag.rpartition(':')[2]}"
            )
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def _check(self, node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
        """Count the values of `node` with its aliases expanded; `sizes` has those of nodes counted before."""
        known = sizes.get(id(node))
        if known == 0:
            raise self._refused(node, "an alias that contains itself")
        if known:
            return known
        if depth > MOST_DEPTH:
            raise self._refused(node, f"more than {MOST_DEPTH} levels")
        sizes[id(node)] = 0
        size = 1 + (len(node.value) // TEXT_OF_A_VALUE if isinstance(node, yaml.ScalarNode) else 0)
        for child in _children(node):
            size += self._check(child, sizes, depth + 1)
        if size > MOST_VALUES:
            raise self._refused(node, f"aliases repeat more than {MOST_VALUES:,} values")
        sizes[id(node)] = size
        return size

    @staticmethod
    def _refused(node: yaml.Node | None, problem: str) -> yaml.YAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark if node else None)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []


def load(text: str) -> Any:
    """The value of a document. Raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=BoundedLoader)
