from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from meshrl.contract.errors import UserError
from meshrl.trainer.reference import ReferenceModel

from . import tiny


@pytest.fixture
async def reference(tiny_path: Path) -> AsyncIterator[ReferenceModel]:
    model = ReferenceModel(tiny_path, device="cpu", max_tokens=100)
    yield model
    model.close()


async def test_logprobs_are_those_of_transformers(
    reference: ReferenceModel, tiny_path: Path
) -> None:
    rows = tiny.rows(9)
    found = await reference.logprobs(rows, temperature=0.7)
    hf = AutoModelForCausalLM.from_pretrained(tiny_path)
    for row, mine in zip(rows, found, strict=True):
        ids = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            log_p = (hf(ids[None]).logits[0] / 0.7).log_softmax(-1)
        expected = log_p[:-1].gather(1, ids[1:, None])[:, 0]
        assert mine.dtype == np.float32
        assert mine[0] == 0
        np.testing.assert_allclose(mine[1:], expected, rtol=1e-5, atol=1e-5)


async def test_a_deterministic_reference_answers_a_row_alike_in_any_company(
    tiny_path: Path,
) -> None:
    rows = tiny.rows(9)
    model = ReferenceModel(tiny_path, device="cpu", deterministic=True)
    together = await model.logprobs(rows)
    alone = [(await model.logprobs([row]))[0] for row in rows]
    model.close()
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


async def test_a_token_outside_the_vocabulary_is_named(reference: ReferenceModel) -> None:
    rows = [np.array([1, 2], np.int32), np.array([1, tiny.VOCABULARY], np.int32)]
    with pytest.raises(UserError, match=rf"row 1: token ids 1\.\.{tiny.VOCABULARY}"):
        await reference.logprobs(rows)


async def test_no_rows_give_no_logprobs(reference: ReferenceModel) -> None:
    assert list(await reference.logprobs([])) == []


async def test_the_likeliest_tokens_are_those_of_transformers(
    reference: ReferenceModel, tiny_path: Path
) -> None:
    rows = tiny.rows(5)
    found = await reference.judged(rows, temperature=0.7, top=4)
    for row, plain, mine in zip(rows, await reference.logprobs(rows), found, strict=True):
        assert mine["ref_logprobs"].shape == plain.shape
        assert mine["ref_top_ids"].dtype == np.int32
        assert mine["ref_top_ids"].shape == mine["ref_top_logprobs"].shape == (len(row), 4)
        hf = AutoModelForCausalLM.from_pretrained(tiny_path)
        with torch.no_grad():
            logits = hf(torch.from_numpy(row.astype(np.int64))[None]).logits[0, :-1]
        likeliest = (logits / 0.7).log_softmax(-1).topk(4)
        np.testing.assert_array_equal(mine["ref_top_ids"][1:], likeliest.indices)
        np.testing.assert_allclose(
            mine["ref_top_logprobs"][1:], likeliest.values, rtol=1e-5, atol=1e-5
        )


async def test_more_than_the_vocabulary_is_all_of_it(reference: ReferenceModel) -> None:
    (found,) = await reference.judged(tiny.rows(1), top=tiny.VOCABULARY + 5)
    assert found["ref_top_ids"].shape[1] == tiny.VOCABULARY
    np.testing.assert_allclose(np.exp(found["ref_top_logprobs"][1:]).sum(-1), 1, rtol=1e-5)
