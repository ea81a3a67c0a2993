"""The column `routed_experts`: which experts each token of a row went to when it was sampled, compressed.

    column = version u8, bytes of a number u8, layers u16, experts of a token u16, 0 u16, tokens u32,
             zstandard of byte planes of [layers, tokens, experts of a token]: ascending, each minus the one before it

The order of a token's experts changes nothing that is computed of them, and costs a quarter of the bytes. A token
whose experts nobody recorded has the same number everywhere: two experts of one are never the same.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from meshrl.contract.errors import CorruptError

Experts: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""uint8 or uint16 [T, L, K]: tokens, decoder layers, experts of a token; zeros in dense layers."""

BYTE_EXPERTS: Final = 256
"""Experts up to which a number is one byte."""
MOST_A_TOKEN: Final = 4096
"""L x K that a column may state: DeepSeek-V3 has 488."""
LEVEL: Final = 1
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<BBHHHI")


def narrow(experts: npt.NDArray[Any]) -> Experts:
    """[T, L, K] in as few bytes as hold it. Raises CorruptError where no number of an expert fits."""
    if experts.ndim != 3:
        raise CorruptError(f"experts of shape {list(experts.shape)}, want [tokens, layers, k]")
    low, high = (int(experts.min()), int(experts.max())) if experts.size else (0, 0)
    if low < 0 or high > 0xFFFF:
        raise CorruptError(f"experts are numbered {low} to {high}, want 0 to {0xFFFF}")
    return experts.astype(np.uint8 if high < BYTE_EXPERTS else np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The column, taken apart only where its numbers are wanted: they are ten times a row's tokens."""

    column: npt.NDArray[np.uint8]
    start: int
    end: int
    """Tokens `[start, end)` of those in the column."""

    @classmethod
    def pack(cls, experts: npt.NDArray[Any]) -> Self:
        """Compress experts [T, L, K]."""
        ordered = np.sort(narrow(experts), axis=-1)
        tokens, layers, chosen = ordered.shape
        gaps = np.diff(ordered, axis=-1, prepend=ordered.dtype.type(0))
        planes = np.ascontiguousarray(gaps.transpose(1, 0, 2)).view(np.uint8)
        planes = planes.reshape(-1, ordered.itemsize).T
        data = zstandard.ZstdCompressor(level=LEVEL).compress(planes.tobytes())
        head = _HEAD.pack(_VERSION, ordered.itemsize, layers, chosen, 0, tokens)
        return cls(np.frombuffer(head + data, np.uint8), 0, tokens)

    @classmethod
    def of(cls, column: npt.NDArray[np.uint8], tokens: int) -> Self:
        """The column of a row, by its number of tokens. Raises CorruptError for another length."""
        data = column.tobytes()
        if len(data) < _HEAD.size:
            raise CorruptError(f"{len(data)} bytes are not routed experts")
        version, size, layers, chosen, zero, stated = _HEAD.unpack_from(data)
        fits = layers * chosen <= MOST_A_TOKEN and size in (1, 2) and not zero
        if version != _VERSION or stated != tokens or not fits:
            raise CorruptError(
                f"routed experts of {stated} tokens, {layers} layers and {chosen} experts (version {version}) in a"
                f" row of {tokens} tokens"
            )
        return cls(column, 0, tokens)

    def __len__(self) -> int:
        return self.end - self.start

    def part(self, start: int, end: int) -> Self:
        """The experts of tokens `[start, end)` of these, in the same column."""
        return replace(self, start=self.start + start, end=self.start + end)

    def array(self) -> Experts:
        """[T, L, K], ascending along K. Raises CorruptError."""
        _, size, layers, chosen, _, tokens = _HEAD.unpack_from(self.column.data)
        count = tokens * layers * chosen
        try:
            data = self.column.data[_HEAD.size :]
            # zstandard allocates what the data state of themselves, whatever `max_output_size` is.
            if zstandard.frame_content_size(data) != size * count:
                raise ValueError("they state another size")
            flat = zstandard.ZstdDecompressor().decompress(data, max_output_size=size * count)
            planes = np.frombuffer(flat, np.uint8).reshape(size, count)
        except (ValueError, zstandard.ZstdError) as error:
            raise CorruptError(f"routed experts of {tokens} tokens: {error}") from error
        dtype = np.dtype("<u2" if size > 1 else "u1")
        gaps = np.ascontiguousarray(planes.T).view(dtype).reshape(layers, tokens, chosen)
        own = gaps[:, self.start : self.end].transpose(1, 0, 2)
        found: Experts = np.cumsum(own, axis=-1, dtype=dtype)
        return found
