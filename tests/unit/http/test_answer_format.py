"""The body of a gateway's answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshrl.http.gateway.answers import AnswerFormat
from meshrl.rollout.agents.requests import SessionAnswer


class Measured(str):
    """Counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        Measured.asked += 1
        return super().__len__()


class Stars:
    """A tokenizer whose token n is n stars."""

    def decode(self, ids: Sequence[int]) -> str:
        return Measured("*" * sum(ids))


def test_each_token_of_a_completion_says_where_its_text_begins() -> None:
    lengths = [2, 1, 0, 3] * 1000
    answer = SessionAnswer(
        text="",
        tail="",
        tool_calls=(),
        finish_reason="stop",
        prompt_tokens=1,
        tokens=np.array(lengths, dtype=np.int32),
        logprobs=np.zeros(len(lengths), dtype=np.float32),
    )
    form = AnswerFormat(chat=False, model="m", tokenizer=Stars(), logprobs=True)
    offsets = form.complete(answer)["choices"][0]["logprobs"]["text_offset"]
    assert offsets[:5] == [0, 2, 3, 3, 6] and len(offsets) == len(lengths)
    assert Measured.asked == len(lengths), "once for each token, however many there are"
