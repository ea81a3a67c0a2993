"""Statistics of data files, found in one pass: tokens of each prompt, sources, rows that repeat, rows that are bad.

    rows ──read, template, tokens──▶ SplitStatistics: counters of lengths and sources, 16 bytes a row for what repeats

A prompt repeats another where role and text of each message, but for white space, and its pictures are the same.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshrl.contract.errors import UserError
from meshrl.contract.types import Json
from meshrl.images import ImageProcessor
from meshrl.trainer.config import DataConfig
from meshrl.trainer.data.files import FileRow, rows_of
from meshrl.trainer.data.prompt_streams import quotas, source_of
from meshrl.trainer.data.prompts import (
    Prompt,
    PromptTokenizer,
    fitted,
    no_prompts,
    read_prompt_row,
    tokenised,
)

MOST_SOURCES = 1000
"""Names of data sources that are counted; rows of further ones count as `others`."""
EXAMPLES = 5
"""Pairs of rows that are named for each kind of repetition."""
BUCKETS = 12
"""Most buckets of a histogram."""


@dataclass(slots=True)
class SplitStatistics:
    """Rows for training, or held-out ones."""

    name: str
    rows: int = 0
    """Rows that can be used, too long ones included."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a prompt to rows."""
    longest: tuple[int, str] = (0, "")
    """Tokens of the longest prompt, and its `file:row`."""
    too_long: int = 0
    first_too_long: str = ""
    sources: Counter[str] = field(default_factory=Counter)
    """`data_source` to rows that are not too long; "" for rows without one."""
    weighted: Counter[str] = field(default_factory=Counter)
    """Names of `data.weights` to such rows."""
    bad: int = 0
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of each prompt."""
    numbers: array[int] = field(default_factory=lambda: array("q"))
    """Each row's number in its file."""
    files: list[tuple[int, str]] = field(default_factory=list)
    """First place and name of each file, in order."""

    def where(self, place: int) -> str:
        """`file:row` of the row at `place`."""
        _, file = self.files[bisect_right(self.files, place, key=lambda begin: begin[0]) - 1]
        return f"{file}:{self.numbers[place]}"

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(length * rows for length, rows in self.lengths.items())

    def quantile(self, share: float) -> int:
        """The least length that `share` of the rows do not exceed."""
        seen = 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= share * self.rows:
                return length
        return 0

    def histogram(self) -> list[tuple[int, int, int]]:
        """Buckets of equal width: first and last length, and rows; a width is 1, 2 or 5 times a power of ten."""
        most = max(self.lengths, default=0)
        widths = (step * 10**power for power in range(12) for step in (1, 2, 5))
        width = next(width for width in widths if most // width < BUCKETS)
        rows = Counter[int]()
        for length, count in self.lengths.items():
            rows[length // width] += count
        return [(at * width, at * width + width - 1, rows[at]) for at in range(most // width + 1)]


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows whose prompts occur elsewhere, too."""

    rows: int
    examples: Sequence[tuple[str, str]]
    """Places `file:row` of some such rows, each with that of the other row with its prompt."""


def scan(
    name: str,
    files: Sequence[Path],
    made: Iterator[FileRow],
    config: DataConfig,
    tokenizer: PromptTokenizer,
    report: Callable[[str], None],
    images: ImageProcessor | None = None,
    vocabulary: int = 0,
    unusable: Callable[[str, Mapping[str, Json]], str] = lambda source, extra_info: "",
) -> SplitStatistics:
    """Read every row of `files`, then those that code has `made`.

    Args:
        name: Name of the split: `train` or `held out`.
        files: Data files.
        made: Rows of `data.reasoning_gym`.
        config: How rows are read.
        tokenizer: The policy's.
        images: Reads the pictures of rows, where the model does.
        vocabulary: Tokens that the model knows; 0: not known.
        unusable: Says why rows of a data_source with an `extra_info` have no task or no score; empty where they have.
        report: Gets one line for each bad row; a row that is too long is one with `data.truncation: error`.

    Raises:
        UserError: rows cannot be made.
    """
    split = SplitStatistics(name)
    weighted = bool(config.weights) and name == "train"
    for row in (*(_good_rows(path, config, split, report) for path in files), made):
        for one in row:
            try:
                read = read_prompt_row(one, config, pictures=images is not None)
                if why := unusable(read.data_source, read.extra_info):
                    raise UserError(f"{one.where}: {why}")
                at = len(split.hashes)
                _count(
                    tokenised(at, read, config, tokenizer, images, vocabulary),
                    split,
                    config,
                    weighted,
                )
            except UserError as error:
                split.bad += 1
                report(str(error))
    if not split.rows or (split.rows == split.too_long and config.filter_overlong_prompts):
        raise UserError(f"{name}: {no_prompts(files, split.lengths, config)}")
    if weighted:
        quotas(config.weights, split.weighted)
    return split


def _good_rows(
    path: Path, config: DataConfig, split: SplitStatistics, report: Callable[[str], None]
) -> Iterator[FileRow]:
    """The rows of a file; what is no row is reported, and the next one read where the reader can."""
    try:
        rows = rows_of(path, config.reader)
    except UserError as error:
        split.bad += 1
        report(str(error))
        return
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except UserError as error:
            split.bad += 1
            report(str(error))


def _count(prompt: Prompt, split: SplitStatistics, config: DataConfig, weighted: bool) -> None:
    """Take a row in. Raises UserError: it is bad."""
    where = prompt.where
    weight = source_of(where, prompt.data_source, config.weights) if weighted else None
    fitted(prompt, config)
    length = len(prompt.prompt_ids)
    too_long = length > config.max_prompt_length
    if length > split.longest[0]:
        split.longest = (length, where)
    split.lengths[length] += 1
    split.rows += 1
    if too_long:
        split.too_long += 1
        split.first_too_long = split.first_too_long or where
    else:
        known = prompt.data_source in split.sources or len(split.sources) < MOST_SOURCES
        split.sources[prompt.data_source if known else "others"] += 1
        if weight is not None:
            split.weighted[weight] += 1
    file, _, number = where.rpartition(":")
    if not split.files or split.files[-1][1] != file:
        split.files.append((len(split.hashes), file))
    split.numbers.append(int(number))
    split.hashes.append(_hash(prompt))


def _hash(prompt: Prompt) -> int:
    """64 bits of a prompt without its white space."""
    digest = hashlib.blake2b(digest_size=8)
    turns = [(message.role, message.content) for message in prompt.messages]
    for role, text in turns or [("", prompt.text)]:
        digest.update(f"{role}\0{' '.join(text.split())}\0".encode())
    for media in prompt.media:
        digest.update(media.sha256.encode())
    return int.from_bytes(digest.digest(), "little")


def repeated(split: SplitStatistics) -> Repeats:
    """Rows of a split whose prompt an earlier row of it has."""
    hashes = _array(split)
    _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    later = np.flatnonzero(firsts[inverse] != np.arange(len(hashes)))
    pairs = [
        (split.where(int(at)), split.where(int(firsts[inverse[at]]))) for at in later[:EXAMPLES]
    ]
    return Repeats(len(later), pairs)


def leaked(held_out: SplitStatistics, train: SplitStatistics) -> Repeats:
    """Held-out rows whose prompt is trained on too."""
    seen, firsts = np.unique(_array(train), return_index=True)
    mine = _array(held_out)
    both = np.flatnonzero(np.isin(mine, seen))
    found = firsts[np.searchsorted(seen, mine[both[:EXAMPLES]])]
    pairs = [
        (held_out.where(int(at)), train.where(int(first)))
        for at, first in zip(both[:EXAMPLES], found, strict=True)
    ]
    return Repeats(len(both), pairs)


def _array(split: SplitStatistics) -> npt.NDArray[np.uint64]:
    return np.frombuffer(split.hashes, dtype=np.uint64) if split.hashes else np.zeros(0, np.uint64)
