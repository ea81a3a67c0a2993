"""Binary bodies of the Tinker SDK to the mesh's types, and back. Every size is compared before memory is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from meshrl.contract.errors import CapacityError, UserError
from meshrl.contract.types import (
    Float32,
    Int32,
    Media,
    Pass,
    Refused,
    TrainingExample,
    TrainingRequest,
    TrainingResult,
    TrainingVerb,
)
from meshrl.images import ImageProcessor, media_type
from meshrl.v1 import tinker_pb2 as pb

MOST_BYTES = 64 << 20
"""Bytes of a request, decompressed."""
MOST_CELLS = 1 << 24
"""Numbers of a tensor, after its sparse form is filled up; tokens of all examples, those of pictures included."""
SPANNED = "stable_reinforce"
"""The loss that reads spans; clients send them with others, too."""
MASK = "mask"
"""The loss input that says which tokens were sampled: the spans of a datum, as one number each."""
FORMATS = ("png", "jpeg")
"""Formats of pictures, as media types name them."""
_TYPES: dict[int, Any] = {pb.TINKER_TYPE_FLOAT32: np.float32, pb.TINKER_TYPE_INT64: np.int64}

Column: TypeAlias = NDArray[np.int64] | Float32


Part: TypeAlias = Int32 | pb.TinkerImage
"""Tokens, or a picture."""


def laid_out(
    parts: Sequence[Part], images: ImageProcessor | None, most: int = MOST_CELLS
) -> tuple[Int32, tuple[Media, ...]]:
    """int32[T], at most `most`: the tokens as a model reads them; and its pictures, which are read.

    Raises:
        UserError: there are more tokens, or a picture that cannot be read or is not what its sender says.
    """
    tokens, media, left = [np.empty(0, np.int32)], list[Media](), most
    for part in parts:
        block = _taken_up(part, images, media) if isinstance(part, pb.TinkerImage) else part
        left -= len(block)
        if left < 0:
            raise UserError(f"its pictures and texts have more than {most} tokens")
        tokens.append(block)
    return np.concatenate(tokens), tuple(media)


def _taken_up(sent: pb.TinkerImage, images: ImageProcessor | None, media: list[Media]) -> Int32:
    """The tokens of a picture, which is added to `media`. Raises UserError."""
    where, found = f"picture {len(media) + 1}", media_type(sent.data)
    if images is None:
        raise UserError(f"{where}: the base model reads no pictures; want tokens")
    if sent.format not in FORMATS or found != f"image/{sent.format}":
        raise UserError(
            f"{where}: its format is {sent.format!r}, its file is {found or 'no picture'}; want"
            " png or jpeg, and a file of that"
        )
    media.append(Media.of(sent.data))
    block = images.block(media[-1], where)
    if sent.HasField("expected_tokens") and sent.expected_tokens != len(block):
        raise UserError(
            f"{where}: expected_tokens is {sent.expected_tokens}, and the model reads it as"
            f" {len(block)}"
        )
    images.check(media[-1], where)
    return block


def decompressed(body: bytes, encoding: str) -> bytes:
    """The body of a request. Raises UserError, CapacityError."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise UserError(f"Content-Encoding: got {encoding!r}, want zstd or none")
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            found = reader.read(MOST_BYTES + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not zstd: {error}") from error
    if len(found) > MOST_BYTES:
        raise CapacityError(f"the body has more than {MOST_BYTES} bytes")
    return bytes(found)


def read_forward_backward(body: bytes, images: ImageProcessor | None = None) -> TrainingRequest:
    """The request that a body says, a wrong one as `Refused`. Raises UserError without a model or a number."""
    message = pb.TinkerForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from error
    if not message.model_id or message.seq_id < 1:
        raise UserError(
            f"model_id {message.model_id!r}, seq_id {message.seq_id}: want a model, and a number from 1 on"
        )
    verb: TrainingVerb
    try:
        verb = _pass(message, images)
    except UserError as error:
        verb = Refused(error=error.message)
    return TrainingRequest(model=message.model_id, number=message.seq_id, verb=verb)


def _pass(message: pb.TinkerForwardBackwardRequest, images: ImageProcessor | None) -> Pass:
    loss: Any = message.loss_fn
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UserError(f"loss_fn_config: {name} is text; want a number")
        settings[name] = value.number
    examples, left = list[TrainingExample](), MOST_CELLS
    for index, datum in enumerate(message.data):
        try:
            tokens, media = laid_out([_part(chunk) for chunk in datum.model_input], images, left)
            left -= len(tokens)
            inputs = _inputs(datum, spans=loss == SPANNED)
            examples.append(TrainingExample(tokens=tokens, loss_inputs=inputs, media=media))
        except UserError as error:
            raise UserError(f"data[{index}]: {error.message}") from error
    return Pass(
        examples=examples, loss=loss, loss_settings=settings, backward=not message.forward_only
    )


def _part(chunk: pb.TinkerChunk) -> Part:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens: Int32 = _array(chunk.encoded_text.tokens, np.int32, "model_input")
        return tokens
    if kind != "image" or chunk.image.HasField("override_dimensions"):
        raise UserError("model_input: want tokens, or pictures in their own size")
    return chunk.image


def _inputs(datum: pb.TinkerDatum, *, spans: bool) -> dict[str, Column]:
    inputs: dict[str, Column] = {
        name: _tensor(value, name) for name, value in datum.loss_fn_inputs.items()
    }
    if MASK in inputs:
        raise UserError(f"{MASK}: no such input")
    if spans:
        inputs[MASK] = _sampled(datum.loss_fn_input_spans)
    return inputs


def _sampled(spans: Sequence[pb.TinkerSpan]) -> Float32:
    """float32[T]: 1 where a token was sampled."""
    runs = []
    for span in spans:
        sampled = span.WhichOneof("span") == "sampled_tokens"
        run = span.sampled_tokens if sampled else span.prompt_tokens
        runs.append((sampled, run.length))
    if any(length < 0 for _, length in runs) or sum(n for _, n in runs) > MOST_CELLS:
        raise UserError("loss_fn_input_spans: want lengths from 0 on, in all fewer tokens")
    return np.repeat(
        np.array([float(sampled) for sampled, _ in runs], np.float32), [n for _, n in runs]
    )


def _tensor(tensor: pb.TinkerTensor, name: str) -> Column:
    dtype = _TYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{name}: of type {tensor.dtype}, want float32 or int64")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > MOST_CELLS:
        raise UserError(f"{name}: shape {list(shape)}, want at most {MOST_CELLS} numbers")
    if tensor.WhichOneof("layout") == "sparse_csr":
        return _filled(tensor.sparse_csr, shape, dtype, name)
    found: Column = _array(tensor.dense, dtype, name)
    if len(shape) > 1:
        if math.prod(shape) != len(found):
            raise UserError(f"{name}: {len(found)} numbers, and its shape is {list(shape)}")
        return found.reshape(shape)
    return found


def _filled(sparse: pb.TinkerSparse, shape: tuple[int, ...], dtype: Any, name: str) -> Column:
    """[T, K] of rows with some of their columns."""
    values = _array(sparse.values, dtype, name)
    starts = _array(sparse.crow_indices, np.int64, name)
    columns = _array(sparse.col_indices, np.int64, name)
    right = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and len(columns) == len(values)
        and not starts[0]
        and starts[-1] == len(values)
        and (np.diff(starts) >= 0).all()
        and (len(columns) == 0 or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not right:
        raise UserError(f"{name}: its sparse rows do not fit the shape {list(shape)}")
    filled: Column = np.zeros(shape, dtype)
    filled[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return filled


def _array(data: bytes, dtype: Any, name: str) -> Any:
    if len(data) % np.dtype(dtype).itemsize:
        raise UserError(f"{name}: {len(data)} bytes are not an array of {np.dtype(dtype)}")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def write_outputs(result: TrainingResult) -> bytes:
    """The result of a pass, as its message: a record for each example."""
    message = pb.TinkerForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        message.metrics[name] = value
    for output in result.outputs:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        for name, values in output.items():
            data = np.ascontiguousarray(values, dtype="<f4").tobytes()
            record.fields[name].CopyFrom(
                pb.TinkerBatched(
                    data=data,
                    offsets=np.array([0, len(data)], dtype="<i8").tobytes(),
                    dtype=pb.TINKER_TYPE_FLOAT32,
                    trailing_shape=values.shape[1:],
                )
            )
    return message.SerializeToString()
