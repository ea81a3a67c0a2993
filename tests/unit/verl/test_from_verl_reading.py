"""Hydra's override grammar, and how far references are followed."""

from __future__ import annotations

import difflib
import math
from typing import Any

import pytest

from meshrl.contract.errors import ConfigError
from meshrl.verl import parse
from meshrl.verl.migrate import migrate

# What Hydra 1.3.8's own parser makes of each.
AS_HYDRA_READS: list[tuple[str, str, Any]] = [
    ("a.b=1", "a.b", 1),
    ("a.b=+1", "a.b", 1),
    ("a=-1", "a", -1),
    ("a=01", "a", "01"),
    ("a=1_000", "a", 1000),
    ("a=1.5", "a", 1.5),
    ("a=1e-6", "a", 1e-06),
    ("a=1.", "a", 1.0),
    ("a=.5", "a", 0.5),
    ("a=null", "a", None),
    ("a=NULL", "a", None),
    ("a=true", "a", True),
    ("a=False", "a", False),
    ("a=yes", "a", "yes"),
    ("a=", "a", ""),
    ("a=abc", "a", "abc"),
    ("a=hello world", "a", "hello world"),
    ("a=/x/y-z_1.parquet", "a", "/x/y-z_1.parquet"),
    ("a=$HOME/x", "a", "$HOME/x"),
    ("a=http://host:80/x", "a", "http://host:80/x"),
    ("a='quoted, text'", "a", "quoted, text"),
    ('a="it\'s"', "a", "it's"),
    ("a='it\\'s'", "a", "it's"),
    ("a='back\\\\'", "a", "back\\"),
    ("a='C:\\dir'", "a", "C:\\dir"),
    ("a=[1,2,3]", "a", [1, 2, 3]),
    ("a=[]", "a", []),
    ("a=['a','b c']", "a", ["a", "b c"]),
    ('a=["console","wandb"]', "a", ["console", "wandb"]),
    ("a=[a b,c]", "a", ["a b", "c"]),
    ("a=[[1,2],[x]]", "a", [[1, 2], ["x"]]),
    ("a={x:1,y:[1,2]}", "a", {"x": 1, "y": [1, 2]}),
    ("a={}", "a", {}),
    ('a={a: b, c : "d"}', "a", {"a": "b", "c": "d"}),
    ("a={a:{b:null}}", "a", {"a": {"b": None}}),
    ("a=[{name:x},1]", "a", [{"name": "x"}, 1]),
    ("a=a\\,b", "a", "a,b"),
    ("a=a\\=b", "a", "a=b"),
    ("a=x:y", "a", "x:y"),
    ("a=${x.y}", "a", "${x.y}"),
    ("a=${oc.env:HOME,none}", "a", "${oc.env:HOME,none}"),
    ("a=pre${x.y}post", "a", "pre${x.y}post"),
    ('a=int("3")', "a", 3),
    ("a=float(3)", "a", 3.0),
    ("a=str(1e3)", "a", "1000.0"),
    ("+a.b.c=3", "a.b.c", 3),
    ("++a.b=3", "a.b", 3),
    ("~a.b", "a.b", None),
    ("~a.b=3", "a.b", 3),
    ("a/b=c", "a/b", "c"),
    ("a@b.c=d", "a@b.c", "d"),
    ("a=0.5_5.0", "a", "0.5_5.0"),
    ("a='token_k1,seq_sum_k1'", "a", "token_k1,seq_sum_k1"),
    ("a=50%", "a", "50%"),
    ("a=a+b", "a", "a+b"),
    ("a=@x", "a", "@x"),
    ("a=*.parquet", "a", "*.parquet"),
    ("a=a?b", "a", "a?b"),
    ("a=x|y", "a", "x|y"),
    ("a=1:2", "a", "1:2"),
    ("a=12abc", "a", "12abc"),
    ("a=1e5x", "a", "1e5x"),
    ("a.0.b=2", "a.0.b", 2),
    ("a=[ ]", "a", []),
    ("a= 3", "a", 3),
    ("a=x y  z", "a", "x y  z"),
    ("a=[x y,  z ]", "a", ["x y", "z"]),
    ("a={1:2}", "a", {1: 2}),
]
NO_OVERRIDE = [
    "a=1,2",
    "a=choice(a,b)",
    "a=[1,2",
    "a={x:1",
    "a='x",
    "a=x]",
    "a.b",
    "+a",
    "a=[1,2,]",
    "a=token_k1,seq_sum_k1",
    "a={a=b}",
    "a=[a=b]",
    'a=a"b',
    "a={x:}",
    "a=[,]",
]


@pytest.mark.parametrize(("text", "key", "value"), AS_HYDRA_READS)
def test_overrides_are_read_as_hydra_reads_them(text: str, key: str, value: Any) -> None:
    read = parse(text)
    assert (read.key, read.value, type(read.value)) == (key, value, type(value))
    assert read.delete is text.startswith("~")


def test_numbers_without_end() -> None:
    assert parse("a=-inf").value == -math.inf
    assert math.isnan(parse("a=nan").value)


@pytest.mark.parametrize("text", NO_OVERRIDE)
def test_sweeps_and_broken_overrides_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^['\"]"):
        parse(text)


@pytest.mark.parametrize("path", ["~/data/x.parquet", "/data/é#1.parquet"])
def test_paths_that_hydra_wants_quoted_are_taken_as_they_are(path: str) -> None:
    assert parse(f"a={path}").value == path


def test_what_is_no_configuration_of_verl_is_refused_before_keys_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"^2001 keys, 2000 at most"):
        migrate([f"strange{n}=1" for n in range(2001)])
    with pytest.raises(ConfigError, match=r"^a key of 501 characters, of 500 at most: a"):
        migrate([f"{'a' * 501}=1"])


def test_a_likely_key_is_looked_for_a_hundred_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[str] = []

    def close(word: str, *_: object, **__: object) -> list[str]:
        looked_for.append(word)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", close)
    assert len(migrate([f"strange{n}=1" for n in range(300)]).findings) == 300
    assert len([word for word in looked_for if word.startswith("strange")]) == 100


LAUGHS = [f"a{n}=${{a{n + 1}}}${{a{n + 1}}}" for n in range(30)]


@pytest.mark.parametrize(
    "given",
    [
        [*LAUGHS, "a30=ha"],
        [*LAUGHS, "a30=''"],
        ["a=${b}", "b=${a}"],
        ["a=" + "x" * 200_000 + "${b}", "b=1"],
    ],
    ids=["laughs", "silent", "each other", "long"],
)
def test_references_are_followed_so_often_and_make_no_long_text(given: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"refers to itself, or to more than 200 values$"):
        migrate(given)
