"""Preference rows: a prompt, a chosen and a rejected response, as text or as chat messages.

    {"prompt": text or messages, "chosen": text or messages, "rejected": text or messages}

Of messages the last one is the response. Without a `prompt`, the messages before it are the prompt, and must be the
same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.contract.errors import UserError
from meshrl.trainer.data.files import FileRow, file_rows
from meshrl.trainer.data.messages import (
    as_dicts,
    read_messages,
    read_prompt,
    read_text,
    refuse_unusable,
)
from meshrl.trainer.offline.config import PreferenceConfig

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One preference."""

    where: str
    """`file:row`."""
    prompt: str | Messages
    chosen: str
    rejected: str


def read_pairs(config: PreferenceConfig, files: Sequence[Path]) -> list[Pair]:
    """Every row of `files`.

    Raises:
        UserError: a row lacks a key, or holds no prompt or response; names file and row.
    """
    pairs = [_pair(row, config) for row in file_rows(files, config.reader)]
    if files and not pairs:
        raise UserError(f"no rows in {', '.join(map(str, files))}")
    return pairs


def _pair(source: FileRow, config: PreferenceConfig) -> Pair:
    row, where = source.values, source.where
    refuse_unusable(row, where)
    for key in (config.chosen_key, config.rejected_key):
        if row.get(key) is None:
            raise UserError(f"{where}: no {key!r} (the row has {', '.join(map(str, row))})")
    before_chosen, chosen = _split(row[config.chosen_key], where, config.chosen_key)
    before_rejected, rejected = _split(row[config.rejected_key], where, config.rejected_key)
    prompt: Any = row.get(config.prompt_key)
    if prompt is None:
        if not before_chosen or before_chosen != before_rejected:
            raise UserError(
                f"{where}: no {config.prompt_key!r}, and {config.chosen_key!r} and {config.rejected_key!r} do not"
                " begin with the same messages"
            )
        prompt = before_chosen
    else:
        read = read_prompt(prompt, where, config.prompt_key)
        prompt = read if isinstance(read, str) else as_dicts(read)
    return Pair(where=where, prompt=prompt, chosen=chosen, rejected=rejected)


def _split(value: Any, where: str, key: str) -> tuple[Messages, str]:
    """The messages before the response, and the response."""
    if isinstance(value, str):
        return [], read_text(value, where, key)
    messages = as_dicts(read_messages(value, where, key))
    return messages[:-1], messages[-1]["content"]
