"""Rows of offline training as tokens: a prompt and its response, or a whole conversation; and packs of such rows.

    {"messages": [{"role", "content", ...}], "tools": [...]} ──template──▶ text, spans ──▶ tokens, mask

Where the template marks what is generated (`{% generation %}`), its marks count. Else a turn of the assistant is what
the template adds to the conversation before it, which must begin as the longer conversation does, up to the token
that ends the turn (`turn_ends.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from meshrl.common.chat_templates import bound_templates, rendered
from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32, Media
from meshrl.images import ImageProcessor, reads_images
from meshrl.images.messages import MARK, parts_of, with_parts
from meshrl.trainer.data.files import FileRow, file_rows, row_lacks
from meshrl.trainer.data.messages import (
    MEDIA,
    UNUSABLE,
    as_dicts,
    is_blank,
    is_empty,
    pictures_of,
    read_prompt,
    read_text,
    refuse_unusable,
)
from meshrl.trainer.data.prompts import check_open, templated, text_ids
from meshrl.trainer.model.packing import Pack, alone, pack, plan, share_out
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.offline.config import SftConfig
from meshrl.trainer.offline.turn_ends import MARK as MARKED
from meshrl.trainer.offline.turn_ends import (
    ended,
    ending,
    first_token,
    next_turn,
    turn_end,
    without_end,
)
from meshrl.trainer.ranks.world import World


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One tokenised row."""

    tokens: Int32
    """int32[T]: prompt, then response."""
    prompt_length: int
    """Tokens before the first one that is learned."""
    mask: npt.NDArray[np.bool_] | None = None
    """bool[T]: the tokens that are learned; None: all after the prompt."""
    media: tuple[Media, ...] = ()
    """Its pictures, in the order of their places."""

    @property
    def num_learned(self) -> int:
        """Tokens that are learned."""
        return len(self.tokens) - self.prompt_length if self.mask is None else int(self.mask.sum())

    @property
    def fingerprint(self) -> Int32:
        """int32[n]: identity of the row: tokens (negated, where a mask says not learned), pictures."""
        said = self.tokens if self.mask is None else np.where(self.mask, self.tokens, ~self.tokens)
        names = bytes.fromhex("".join(each.sha256 for each in self.media))
        return np.concatenate([said, np.frombuffer(names, dtype=np.int32)])

    @property
    def learned(self) -> npt.NDArray[np.bool_]:
        """bool[T]: the tokens that are learned."""
        return np.arange(len(self.tokens)) >= self.prompt_length if self.mask is None else self.mask


def packs(
    examples: Sequence[Example], max_tokens: int, world: World, reader: VisionReader | None = None
) -> Iterator[tuple[list[Example], Pack]]:
    """This rank's packs of at most `max_tokens`, on its device, each with its rows; every rank has equally many.

    With sequence parallelism a pack is this rank's share of its tokens.
    """
    sizes = alone([len(example.tokens) for example in examples])
    packing = plan(sizes, ranks=world.data_size, max_tokens=max_tokens)
    for rows in packing.ranks[world.data_rank]:
        chosen = [examples[row] for row in rows]
        alike = world.sequence is None
        whole = packed(chosen, share_prefixes=alike, reader=reader).to(world.device)
        yield chosen, whole if world.sequence is None else share_out(whole, world.sequence)


def packed(
    examples: Sequence[Example], *, share_prefixes: bool = True, reader: VisionReader | None = None
) -> Pack:
    """Rows in one pack; its response tokens are those that are learned. `reader` finds their pictures."""
    made = pack(
        [each.tokens for each in examples],
        [each.prompt_length for each in examples],
        share_prefixes=share_prefixes,
        images=[
            reader.images(each.tokens, each.learned.astype(np.uint8), each.media, "a row")
            for each in examples
        ]
        if reader is not None
        else (),
    )
    if all(each.mask is None for each in examples):
        return made
    parts = [each.learned[each.prompt_length :] for each in examples]
    learned = torch.from_numpy(np.concatenate(parts))
    return replace(made, positions=made.positions[learned], targets=made.targets[learned])


def read_examples(config: SftConfig, files: Sequence[Path], tokenizer_path: Path) -> list[Example]:
    """Tokenised rows of `files`.

    Raises:
        UserError: a row lacks a key, is too long, or has an empty prompt or response.
    """
    if not files:
        return []
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_path)
    images = ImageProcessor(config.model.path) if reads_images(config.model.path) else None
    examples = [_example(row, tokenizer, config, images) for row in file_rows(files, config.reader)]
    if not examples:
        raise UserError(f"no rows in {', '.join(map(str, files))}")
    return examples


def _example(
    source: FileRow, tokenizer: Any, config: SftConfig, images: ImageProcessor | None
) -> Example:
    row, where = source.values, source.where
    if row.get(config.messages_key) is not None and row.get(config.response_key) is None:
        return conversation(source, tokenizer, config, images)
    for key, option in ((config.prompt_key, "prompt_key"), (config.response_key, "response_key")):
        if key not in row:
            raise UserError(f"{where}: no {key!r} ({row_lacks(key, option, row)})")
    sees, key = images is not None, config.image_key
    refuse_unusable(row, where, [name for name in (*UNUSABLE, key) if name != key or not sees])
    prompt = read_prompt(row[config.prompt_key], where, config.prompt_key, pictures=sees)
    texts = prompt if isinstance(prompt, str) else [message.content for message in prompt]
    media = pictures_of(row, texts, where, key) if sees else ()
    response = read_text(row[config.response_key], where, config.response_key)
    messages = prompt if isinstance(prompt, str) else (with_parts if media else as_dicts)(prompt)
    example = tokenised(
        messages, response, tokenizer, where,
        append_eos=config.append_eos, max_length=config.max_length,
        variables=config.apply_chat_template_kwargs,
    )  # fmt: skip
    return example if images is None else with_pictures(example, media, images, where, config)


def tokenised(
    prompt: str | Sequence[Mapping[str, Any]],
    response: str,
    tokenizer: Any,
    where: str,
    *,
    append_eos: bool,
    max_length: int,
    variables: Mapping[str, Any] | None = None,
) -> Example:
    """A prompt (text, or messages that go through the chat template, with `variables`) and its response as tokens.

    With `append_eos` the response has the end of an assistant's turn behind it, once.

    Raises:
        UserError: it is too long, has an empty prompt or response, is a chat without a chat template, or nothing ends
            a response.
    """
    if is_blank(prompt) or is_blank(without_end(response, tokenizer, variables)):
        raise UserError(f"{where}: empty prompt or response")
    if isinstance(prompt, str):
        prompt_ids = text_ids(prompt, tokenizer)
    else:
        check_open(prompt, where)
        text = templated(prompt, where, tokenizer, **(variables or {}))
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    if append_eos:
        response = ended(response, tokenizer, where, variables)
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    total = len(prompt_ids) + len(response_ids)
    if total > max_length:
        raise UserError(f"{where}: {total} tokens > max_length {max_length}")
    return Example(np.array([*prompt_ids, *response_ids], dtype=np.int32), len(prompt_ids))


Turn: TypeAlias = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CURE = "give the row as a prompt and its response, or mark what is generated in the template ({% generation %})"
OTHERWISE = (
    "the chat template writes message {} otherwise where the conversation continues or ends, so its tokens cannot be"
    " told: end the row with it, or mark what is generated in the template ({{% generation %}})"
)


def conversation(
    source: FileRow, tokenizer: Any, config: SftConfig, images: ImageProcessor | None = None
) -> Example:
    """The tokens of a conversation, of which those of the assistant are learned; `images` reads its pictures.

    Raises:
        UserError: a message, a tool or a picture is malformed, the assistant says nothing, its turns cannot be told,
            or the row is too long; names file and row.
    """
    where, key = source.where, config.messages_key
    sees = images is not None
    unusable = [name for name in MEDIA if not (sees and name == config.image_key)]
    refuse_unusable(source.values, where, unusable, "conversations")
    turns = _turns(source.values[key], where, key, pictures=sees)
    media: tuple[Media, ...] = ()
    if sees:
        texts = [turn.get("content", "") for turn in turns]
        media = pictures_of(source.values, texts, where, config.image_key)
    if media:
        turns = [
            {**turn, "content": parts_of(turn["content"])}
            if MARK in turn.get("content", "")
            else turn
            for turn in turns
        ]
    tools = _tools(source.values.get(config.tools_key), where, config.tools_key)
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: {key!r} is a conversation and the tokenizer has no chat template"
        )
    variables = dict(config.apply_chat_template_kwargs)
    options = variables | ({"tools": tools} if tools else {})
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant" and isinstance(turn.get("content"), str):
            said = without_end(turn["content"], tokenizer, variables)
            if not (said.strip() or turn.keys() & {"tool_calls", "reasoning_content"}):
                raise UserError(
                    f"{where}: '{key}.{number}' of the assistant is empty, so there is nothing to learn in it"
                )
            turns[number] = {**turn, "content": said}
    try:
        if GENERATION.search(str(tokenizer.chat_template)):
            text, spans = _marked(turns, tokenizer, options)
        else:
            text, spans = _added(turns, tokenizer, options, config)
    except UserError as error:
        raise UserError(f"{where}: {error.message}") from error
    tokens, mask = _encoded(text, spans, tokenizer)
    if not mask.any():
        raise UserError(
            f"{where}: the assistant says nothing in {key!r}, so there is nothing to learn"
        )
    example = Example(tokens, int(np.argmax(mask)), mask)
    if images is not None:
        return with_pictures(example, media, images, where, config)
    if len(tokens) > config.max_length:
        raise UserError(f"{where}: {len(tokens)} tokens > max_length {config.max_length}")
    return example


def with_pictures(
    example: Example,
    media: tuple[Media, ...],
    images: ImageProcessor,
    where: str,
    config: SftConfig,
) -> Example:
    """A row that has a token for each of its pictures, with all that stands for them instead, which is not learned.

    Raises:
        UserError: a picture that cannot be read, or the row is too long with them; names `where`.
    """
    tokens, source = images.expansion(example.tokens, media, where)
    if len(tokens) > config.max_length:
        raise UserError(f"{where}: {len(tokens)} tokens > max_length {config.max_length}")
    mask = example.learned[source] & (example.tokens[source] != images.placeholder)
    return Example(tokens, int(np.argmax(mask)), mask, media)


def _turns(value: object, where: str, key: str, *, pictures: bool = False) -> list[Turn]:
    """The messages as templates read them, empty fields left out."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise UserError(f"{where}: {key!r} is {value!r:.60}, want a list of messages")
    turns = []
    for number, message in enumerate(value):
        at = f"{key}.{number}"
        if not isinstance(message, Mapping):
            raise UserError(
                f"{where}: {at!r} is {message!r:.60}, want an object with role and content"
            )
        turn: Turn = {name: given for name, given in message.items() if not is_empty(given)}
        if unknown := [name for name in turn if name not in FIELDS]:
            raise UserError(f"{where}: {at!r} has {unknown[0]!r}, want only {', '.join(FIELDS)}")
        if turn.get("role") not in ROLES:
            raise UserError(
                f"{where}: the role of {at!r} is {turn.get('role')!r}, want one of {', '.join(ROLES)}"
            )
        if "tool_calls" in turn:
            turn["tool_calls"] = [
                _call(call, where, at) for call in _list(turn["tool_calls"], where, at)
            ]
        # A message that only calls tools has no content; in any other one it is text, which may be empty.
        if message.get("content") is not None or "tool_calls" not in turn:
            turn["content"] = (
                message["content"]
                if message.get("content") == ""
                else read_text(message.get("content"), where, f"{at}.content", pictures=pictures)
            )
        for name in ("name", "tool_call_id", "reasoning_content"):
            if name in turn:
                turn[name] = read_text(turn[name], where, f"{at}.{name}")
        turns.append(turn)
    return turns


def _list(value: object, where: str, at: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UserError(f"{where}: tool_calls of {at!r} are {value!r:.60}, want a list")
    return value


def _call(call: object, where: str, at: str) -> Turn:
    """A tool call in the form of OpenAI's API, with its arguments as an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise UserError(
            f"{where}: {at!r} calls {call!r:.80}, want a function with its name and arguments as an object"
        )
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _tools(value: object, where: str, key: str) -> list[Any]:
    """The tools that the conversation was given: schemas, or JSON of them."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: {key!r} is not JSON: {error}") from error
    if is_empty(value):
        return []
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise UserError(f"{where}: {key!r} is {value!r:.60}, want a list of function schemas")
    return list(value)


Rendered: TypeAlias = tuple[str, list[tuple[int, int]]]
"""The text of a conversation, and from where to where the assistant speaks, in characters."""


def _marked(turns: Sequence[Turn], tokenizer: Any, options: Mapping[str, Any]) -> Rendered:
    """Find the assistant's text by the template's own marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    bound_templates()
    settings = {**tokenizer.special_tokens_map, "add_generation_prompt": False, **options}
    try:
        # Its annotations say a text alone.
        found: Any = render_jinja_template(
            conversations=[list(turns)],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **settings,
        )
    except Exception as error:  # a template may raise any error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses the conversation: {reason}") from error
    (text,), (spans,) = found
    return text, [(begin, end) for begin, end in spans]


def _added(
    turns: Sequence[Turn], tokenizer: Any, options: Mapping[str, Any], config: SftConfig
) -> Rendered:
    """Find the assistant's text by what each turn adds. Raises UserError if a turn changes the text before it."""
    text, spans = rendered(tokenizer, turns, **options), []
    end = turn_end(tokenizer, config.apply_chat_template_kwargs)
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        last = number + 1 == len(turns)
        after = text if last else rendered(tokenizer, turns[: number + 1], **options)
        begin = _begin(turns, number, after, tokenizer, options)
        content = len(after)
        if found := [(begin + at, begin + to) for at, to in ending(after[begin:], tokenizer)]:
            ends = (place for place in found if end.endswith(after[slice(*place)]))
            content, stop = next(ends, found[0])
            if not text.startswith(after[:stop]):
                stop = content  # an earlier turn has another end: it is not learned there
        elif after.rstrip().endswith(end or "\n"):
            stop = len(after.rstrip())
        elif last:
            mark = next_turn(turns, tokenizer, options) or end
            text = after = after + (mark if config.append_eos else "")
            stop = len(after)
        else:
            after += first_token(text[len(after) :], tokenizer)
            stop = len(after)
        if not text.startswith(after[:stop]):
            raise UserError(OTHERWISE.format(number))
        said = after[begin:content]
        if any(call["function"]["name"] not in said for call in turn.get("tool_calls", ())):
            raise UserError(f"the chat template leaves out the tool calls of message {number}")
        spans.append((begin, stop))
    return text, spans


def _begin(
    turns: Sequence[Turn],
    number: int,
    after: str,
    tokenizer: Any,
    options: Mapping[str, Any],
) -> int:
    """Start of turn `number` in `after`, the conversation up to its end: behind the generation prompt.

    Raises:
        UserError: it cannot be told.
    """
    if number:
        before = rendered(tokenizer, turns[:number], add_generation_prompt=True, **options)
        if after.startswith(before):
            return len(before)
        known = rendered(tokenizer, turns[:number], **options)
        if not (before.startswith(known) and after.startswith(known)):
            raise UserError(OTHERWISE.format(number))
        raise UserError(
            f"the chat template asks for message {number} with {before[len(known) :]!r:.60} and writes it without,"
            f" so its tokens cannot be identified: {CURE}"
        )
    # Nothing comes before it that could be asked with: a template may refuse a conversation without messages.
    opened, mark, _ = rendered(
        tokenizer, [{**turns[0], "content": f"{MARKED}{turns[0].get('content') or ''}"}], **options
    ).partition(MARKED)
    if not mark or not after.startswith(opened):
        raise UserError(
            "it is unclear where the chat template begins the assistant's text in message 0: put the user's"
            " message before it"
        )
    return len(opened)


def _encoded(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> tuple[Any, Any]:
    """int32[T] and bool[T]. Turns are tokenised apart from what is around them, as a model samples them."""
    ids: list[int] = []
    mask: list[bool] = []
    at, ended = 0, ""
    for begin, end in [*spans, (len(text), len(text))]:
        for part, learned in ((text[at:begin], False), (text[begin:end], True)):
            # Some end tokens take the white space behind them in, which is no part of the turn.
            piece = tokenizer.encode(ended + part, add_special_tokens=False) if part else []
            piece = piece[1:] if ended else piece
            ids += piece
            mask += [learned] * len(piece)
            found = ending(part, tokenizer) if learned else []
            ended = part[found[-1][0] :] if found and found[-1][1] == len(part) else ""
        at = end
    if mask:
        mask[0] = False  # nothing predicts the first token
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)
