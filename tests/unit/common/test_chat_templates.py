"""Chat templates that would take all memory or time, and ones that are as they should be."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import chat_template_utils

from meshrl.common import template_sandbox
from meshrl.common.chat_templates import rendered
from meshrl.contract.errors import UserError

DOUBLED = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}DOUBLE{% endfor %}"
LONG = "{% set a = 'a' * 10000000 %}"
BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    DOUBLED.replace("DOUBLE", "{% set n.s = n.s + n.s %}"),
    DOUBLED.replace("DOUBLE", "{% set n.s = n.s ~ n.s %}"),
    DOUBLED.replace("DOUBLE", "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"),
    "{% for i in range(99999) %}" + "x" * 9000 + "{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ ([1] * 10000000000) | length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ 'a' | center(10000000000) }}",
    "{% if 'a' | center(10000000000) %}{% endif %}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ [1] | slice(10000000000) | list }}",
    "{{ [1] | batch(10000000000, 1) | list }}",
    "{{ [[1]] | tojson(indent=10000000000) }}",
    "{{ lipsum(n=100000000) }}",
    "{{ (9 ** 9) ** (9 ** 9) }}",
    LONG + "{{ a.replace('a', a) }}",
    LONG + "{{ a | replace('a', a) }}",
    LONG + "{{ ([a] * 100000) | join }}",
    LONG + "{{ ([a] * 100000) | select | join }}",
    LONG + "{{ ''.join([a] * 100000) }}",
    LONG + "{{ a ~ a ~ a }}",
    LONG + "{% set f = '%(a)s' * 3000 %}{{ f % {'a': a} }}",
    LONG + "{{ ([{'a': a}] * 100000) | join(attribute='a') }}",
    LONG + "{{ ('a' * 10000).translate({97: a}) }}",
    LONG + "{{ ([a.encode()] * 100000) | first }}",
    LONG + "{{ ('\n' * 10000) | indent(a) }}",
    LONG + "{{ ('a ' * 10000) | wordwrap(1, wrapstring=a) }}",
    "{% set f = '%(a)9999d' * 9999 %}{{ (f % {'a': 1}) | length }}",
    "{% set f = '{0:>9999}' * 9999 %}{{ f.format(1) | length }}",
    "{{ (1).to_bytes(10000000000, 'big') | length }}",
    "{{ ([[1] * 9999] * 9999) | sum(start=[]) | length }}",
    *[
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
        "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}" + used
        for used in (
            "{{ n.a }}",
            "{{ n.a ~ '' }}",
            "{{ n.a | string }}",
            "{{ n.a | tojson }}",
            "{{ n.a | pprint | length }}",
            "{{ {'a': n.a}.items() }}",
            "{{ '%s' % n.a }}",
            "{{ '%s' | format(n.a) }}",
            "{{ '{}'.format(n.a) }}",
            "{{ n.a == n.b }}",
            "{{ n.a in [n.b] }}",
            "{{ n.a is eq n.b }}",
            "{{ [n.a] | select('eq', n.b) | list }}",
            "{{ [n.a, n.b] | sort | length }}",
            "{{ [n.a, n.b].index(n.b) }}",
        )
    ],
    "{% set n = namespace(a=(1,)) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}{{ {n.a: 1} }}",
    "{% set n = namespace(a=(1,)) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}{{ {}[n.a] }}",
    "{% set n = namespace(a=1) %}" + "{% set n = namespace(a=[n, n]) %}" * 60 + "{{ n }}",
    "{% set n = namespace(a=1) %}{% set n.a = [n] %}{{ n }}",
]
USUAL = """
{%- for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role | upper }}: {{ m['content'] | trim ~ '!' }}
{%- if not loop.last %}, {% endif %}{% endfor %}
{{- [{'at': 1700000000}] | tojson(indent=2) }} {{ '%05.1f' % 2.5 }} {{ '{}:{:>3}'.format(1700000000, 5) }}
{{- ' ' + messages | map(attribute='content') | join('-') }} {{ messages[::-1][0].content.split('>')[-1].lstrip() }}
{{- 3 * 4 + 2 ** 3 }} {{ 'ab' * 2 }} {{ 'x'.join(['a', 'b']) }} {{ messages | length }}
"""


class Templated:
    """A tokenizer that has a chat template, and renders as those of transformers do."""

    def __init__(self, template: str) -> None:
        self._template = template

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool) -> str:
        found: Any = chat_template_utils.render_jinja_template(
            conversations=[conversation], chat_template=self._template
        )
        return str(found[0][0])


MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "<a> you"}]


@pytest.fixture
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MOST", 24 << 20)
    # A billion characters at once would be made before a clock is looked at: only counting ends these.
    monkeypatch.setattr(template_sandbox, "MOST_S", 1e9)


@pytest.mark.parametrize("template", BOMBS)
@pytest.mark.usefixtures("_bounded")
def test_a_template_that_does_too_much_is_refused_in_one_line(template: str) -> None:
    with pytest.raises(UserError, match="the chat template refuses messages of user") as caught:
        rendered(Templated(template), MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_bounded")
def test_a_template_renders_as_it_does_without_bounds() -> None:
    wanted = (
        '1/2 USER: hi!, 2/2 ASSISTANT: <a> you![\n  {\n    "at": 1700000000\n  }\n] 002.5 1700000000:  5'
        "  hi -<a> you you20 abab axb 2"
    )
    assert rendered(Templated(USUAL), MESSAGES).strip() == wanted
