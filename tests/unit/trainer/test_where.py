from __future__ import annotations

import pytest

from meshrl.contract.errors import UserError
from meshrl.trainer.trajectories.where import NUMBERS, TEXTS, condition

ROW = {
    "reward": 0.25, "staleness": 2, "length": 10, "advantage": None, "task": "7", "response": "It is 42.",
    "prompt": "What?", "data_source": None, "reward_components": {"acc": 0.0, "a/b": 3.0},
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "reward < 0.5 and staleness > 1",
        "0.2 <= reward < 0.3",
        "not (reward > 1 or length != 10)",
        "'42' in response and \"43\" not in response",
        "lower(response) == 'it is 42.'",
        "len(response) * 2 > length + 1",
        "length / 4 - 1 == 1.5",
        "-abs(reward - 1) == -0.75",
        "components.acc == 0 and components['a/b'] >= 3",
        "advantage == None and reward != None",
        "task == '7'",
        "  reward<.5  ",
    ],
)
def test_a_condition_holds(text: str) -> None:
    assert condition(text)(ROW)


@pytest.mark.parametrize(
    "text",
    [
        "reward > 0.5",
        "advantage > 0", "advantage <= 0", "not advantage == None",
        "components.missing < 9", "data_source == 'x'", "'x' in data_source",
        "reward / 0 > 1", "reward / (length - 10) < 1",
        "len(data_source) > 0",
    ],
)  # fmt: skip
def test_what_is_missing_fulfils_no_comparison(text: str) -> None:
    assert not condition(text)(ROW)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rewrad < 1", "no column 'rewrad' to ask for; did you mean reward?"),
        ("zzz < 1", "no column 'zzz' to ask for; there are index, attempt,"),
        ("advantages < 1", "did you mean advantage?"),
        ("reward = 1", "is not a condition; equal is == (want, for example, reward < 0.5"),
        ("reward <", "'reward <' is not a condition (want"),
        ("", "'' is not a condition"),
        ("reward", "'reward' is a number, no condition: compare it, as in reward < 0.5"),
        ("reward and length", "'reward' is a number, want a condition"),
        ("reward < '1'", "compares a number with a text by <"),
        ("response > 1", "compares a text with a number by >"),
        ("reward < None", "compares a number with a nothing by <"),
        ("1 in response", "by in; want a text on both sides"),
        ("reward is 1", "'1' is compared by a word that is not known here"),
        ("len(reward) > 1", "'reward' is a number, want a text"),
        ("components > 1", "components: name one, as in components.acc > 0"),
        ("components[0] > 1", "'components[0]' is not known here"),
        ("__import__('os').system('touch pwned')", "is not known here; functions are abs, len"),
        ("response.__class__ == 1", "'response.__class__' is not known here"),
        ("(lambda: 1)() == 1", "is not known here"),
        ("[r for r in response] == 1", "is not known here"),
        ("(x := 1) == 1", "is not known here"),
        ("9 ** 9 ** 9 > 1", "'9 ** 9 ** 9' is not known here"),
        ("'a' * 1000000000 == 'b'", "'a'\" is a text, want a number"),
        ("f'{reward}' == '1'", "is not known here"),
        ("True", "'True' is not known here"),
        ("(" * 400 + "1" + ")" * 400, "is not a condition"),
        ("not " * 240 + "reward", "a number"),
        ("reward < 1 or " * 100 + "reward < 1", "characters; at most 1000 are read"),
        ("reward < \x00", "is not a condition"),
        ("reward < 1" + "0" * 900 + "\n; x", "is not a condition"),
    ],
)
def test_anything_else_is_one_line_and_no_code(text: str, line: str) -> None:
    with pytest.raises(UserError) as refused:
        condition(text)
    assert line in str(refused.value)


def test_each_plain_column_can_be_asked_for() -> None:
    for name in NUMBERS:
        assert not condition(f"{name} > 1e9")({name: 1, "reward_components": {}})
    for name in TEXTS:
        assert condition(f"{name} == 'x'")({name: "x", "reward_components": {}})
