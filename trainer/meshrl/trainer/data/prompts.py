"""Prompts of a data set: verl's schema or plain `prompt` / `answer`, chat template applied, lengths checked.

verl's row: `data_source`, `prompt` (chat messages), `reward_model.ground_truth`, `extra_info`.
Plain row: `prompt` (text or messages), `answer`, optionally `data_source`, `extra_info`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshrl.common.chat_templates import rendered
from meshrl.contract.errors import UserError
from meshrl.contract.types import Int32, Json, Media, Message, SamplingParams, Task
from meshrl.images import ImageProcessor
from meshrl.images.messages import with_parts
from meshrl.trainer.config import DataConfig
from meshrl.trainer.data.files import FileRow, file_rows, row_lacks
from meshrl.trainer.data.messages import (
    UNUSABLE,
    as_dicts,
    is_blank,
    pictures_of,
    read_prompt,
    refuse_unusable,
    refuse_what_json_lacks,
)


class PromptTokenizer(Protocol):
    """The methods of a tokenizer that prompts need; those of transformers have them."""

    chat_template: Any
    vocab_size: int
    """Tokens without those that were added."""

    def __len__(self) -> int:
        """All tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Their text, special tokens included."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The text of a conversation; `variables` are the template's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One tokenised row of a data set."""

    index: int
    """Its position among the rows of all files, skipped ones included."""
    prompt_ids: Int32
    """int32[P]"""
    where: str = ""
    """`file:row`."""
    messages: tuple[Message, ...] = ()
    text: str = ""
    """The prompt, if it is plain text."""
    data_source: str = ""
    ground_truth: Json = None
    extra_info: Mapping[str, Json] = field(default_factory=dict)
    response: Json = None
    """Answer in the data; None where they have none."""
    media: tuple[Media, ...] = ()
    """Its pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A data set in memory."""

    prompts: tuple[Prompt, ...]
    skipped: int
    """Rows left out because they were longer than `max_prompt_length`."""
    fingerprint: str
    """Hash of every prompt's tokens: a resumed run must have the same data."""


def load_prompts(
    files: Sequence[Path],
    config: DataConfig,
    tokenizer: PromptTokenizer,
    made: Iterable[FileRow] = (),
    images: ImageProcessor | None = None,
    vocabulary: int = 0,
) -> PromptSet:
    """Read, template and tokenise every row of `files`, then those that code has `made`.

    Args:
        files: Data files.
        config: How rows are read.
        tokenizer: The policy's.
        made: Rows of `data.reasoning_gym`.
        images: Reads the pictures of rows, where the model does.
        vocabulary: Tokens that the model knows; 0: not known.

    Raises:
        UserError: a malformed row or one that is too long and not to be skipped (names file and row), or no
            prompt is left.
    """
    prompts: list[Prompt] = []
    too_long: list[int] = []
    digest = hashlib.blake2b(digest_size=8)
    for index, row in enumerate(itertools.chain(file_rows(files, config.reader), made)):
        read = read_prompt_row(row, config, pictures=images is not None)
        whole = tokenised(index, read, config, tokenizer, images, vocabulary)
        prompt = fitted(whole, config)
        if prompt is None:
            too_long.append(len(whole.prompt_ids))
            continue
        digest.update(prompt.prompt_ids.tobytes() + b"|")
        digest.update("".join(each.sha256 for each in prompt.media).encode())
        prompts.append(prompt)
    if not prompts:
        raise no_prompts(files, too_long, config)
    return PromptSet(prompts=tuple(prompts), skipped=len(too_long), fingerprint=digest.hexdigest())


def no_prompts(files: Sequence[Path], too_long: Collection[int], config: DataConfig) -> UserError:
    """The refusal of `files` of which no prompt is left; `too_long` are the lengths of those left out."""
    names = ", ".join(map(str, files)) or "data.reasoning_gym"
    if not too_long:
        return UserError(f"no prompts in {names}: want rows with a prompt")
    return UserError(
        f"no prompts in {names}: each has more tokens than data.max_prompt_length {config.max_prompt_length}; want"
        f" at least {min(too_long)} there"
    )


def task_maker(
    run: str, *, group_size: int, sampling: SamplingParams, program: str, deadline_s: float
) -> Callable[[Prompt, str], Task]:
    """A function from a prompt and a task id to the task of `run`."""

    def make(prompt: Prompt, task_id: str) -> Task:
        return Task(
            run=run,
            task_id=task_id,
            prompt_ids=prompt.prompt_ids,
            messages=prompt.messages,
            prompt_text=prompt.text,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            program=program,
            sampling=sampling,
            group_size=group_size,
            deadline_s=deadline_s,
            media=prompt.media,
        )

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A row as it was read, not tokenised yet."""

    where: str
    """`file:row`."""
    prompt: str | tuple[Message, ...]
    ground_truth: Json
    extra_info: Mapping[str, Json]
    data_source: str
    response: Json = None
    media: tuple[Media, ...] = ()


def read_prompt_row(source: FileRow, config: DataConfig, *, pictures: bool = False) -> PromptRow:
    """Read the columns of a row; with `pictures`, of a prompt that may have some.

    Raises:
        UserError: no prompt, one that is not text, no answer, or a malformed column; names file and row.
    """
    row, where = source.values, source.where
    value = row.get(config.prompt_key)
    if value is None:
        if config.prompt_key in row:
            raise UserError(
                f"{where}: {config.prompt_key!r} is null, want text or a list of messages"
            )
        has = row_lacks(config.prompt_key, "data.prompt_key", row)
        raise UserError(f"{where}: no {config.prompt_key!r} (data.prompt_key); {has}")
    key = config.image_key
    refuse_unusable(row, where, [name for name in (*UNUSABLE, key) if name != key or not pictures])
    prompt = read_prompt(value, where, config.prompt_key, pictures=pictures)
    check_open(prompt if isinstance(prompt, str) else as_dicts(prompt), where)
    texts = prompt if isinstance(prompt, str) else [message.content for message in prompt]
    media = pictures_of(row, texts, where, key) if pictures else ()
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, Mapping):
        raise UserError(f"{where}: extra_info is {type(extra_info).__name__}, want an object")
    source_name = row.get("data_source") or ""
    if not isinstance(source_name, str | int):
        raise UserError(f"{where}: data_source is {source_name!r:.40}, want text")
    key, answer = _ground_truth(source, config)
    refuse_what_json_lacks(answer, where, key)
    refuse_what_json_lacks(extra_info, where, "extra_info")
    return PromptRow(
        where=where,
        prompt=_introduced(prompt, config),
        media=media,
        ground_truth=answer,
        response=row.get(config.response_key) if config.response_key else answer,
        extra_info=extra_info,
        data_source=str(source_name),
    )


def _introduced(prompt: str | tuple[Message, ...], config: DataConfig) -> str | tuple[Message, ...]:
    """The prompt behind `data.system_prompt` and `data.few_shot`."""
    if not (config.system_prompt or config.few_shot) or not prompt:
        return prompt
    messages = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    own = messages[:1] if messages[0].role == "system" else ()
    system = own
    if not own and config.system_prompt:
        system = (Message(role="system", content=config.system_prompt),)
    shots = [
        Message(role=role, content=content)
        for shot in config.few_shot
        for role, content in (("user", shot.prompt), ("assistant", shot.answer))
    ]
    return (*system, *shots, *messages[len(own) :])


def prompt_text(row: PromptRow, config: DataConfig, tokenizer: PromptTokenizer) -> str:
    """Prompt text with the chat template applied. Raises UserError, which names file and row."""
    if isinstance(row.prompt, str):
        return row.prompt
    variables = config.apply_chat_template_kwargs
    messages = with_parts(row.prompt) if row.media else as_dicts(row.prompt)
    return templated(messages, row.where, tokenizer, **variables)


def prompt_ids(text: str, where: str, tokenizer: PromptTokenizer, *, plain: bool) -> Int32:
    """int32[P] of a prompt's text; `plain`: no chat template has made it. Raises UserError where there are none."""
    ids = text_ids(text, tokenizer) if plain else tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise UserError(f"{where}: the prompt is empty")
    return np.array(ids, dtype=np.int32)


def text_ids(text: str, tokenizer: PromptTokenizer) -> list[int]:
    """The tokens of a text that no chat template has made, behind those that a text begins with, once."""
    ids, begin = tokenizer.encode(text, add_special_tokens=False), beginning(tokenizer)
    return ids if ids[: len(begin)] == begin else [*begin, *ids]


def beginning(tokenizer: PromptTokenizer) -> list[int]:
    """The tokens that the tokenizer puts before a text: BOS, where it adds one."""
    alone = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    places = range(len(whole) - len(alone) + 1)
    return whole[: next((at for at in places if whole[at : at + len(alone)] == alone), 0)]


def tokenised(
    index: int,
    row: PromptRow,
    config: DataConfig,
    tokenizer: PromptTokenizer,
    images: ImageProcessor | None,
    vocabulary: int = 0,
) -> Prompt:
    """A row's prompt in tokens, however long; arguments as of `load_prompts`.

    Raises:
        UserError: the template refuses it, or a token is none of the model's; names file and row.
    """
    messages, plain = ((), row.prompt) if isinstance(row.prompt, str) else (row.prompt, "")
    text = prompt_text(row, config, tokenizer)
    ids = prompt_ids(text, row.where, tokenizer, plain=isinstance(row.prompt, str))
    if vocabulary and (largest := int(ids.max())) >= vocabulary:
        raise UserError(
            f"{row.where}: the prompt has the token {largest} ({tokenizer.decode([largest])!r:.40}), and the model"
            f" knows 0 to {vocabulary - 1} (vocab_size of config.json); want the model's own tokenizer"
        )
    return Prompt(
        index=index,
        prompt_ids=expanded(ids, row, images),
        media=row.media,
        where=row.where,
        messages=messages,
        text=plain,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
        response=row.response,
    )


def expanded(ids: Int32, row: PromptRow, images: ImageProcessor | None) -> Int32:
    """int32[P]: as many tokens for each picture of the row as the model reads. Raises UserError."""
    return ids if images is None else images.expanded(ids, row.media, row.where)


def own_answer(response: Json, where: str, config: DataConfig) -> str:
    """The text of the data's own answer. Raises UserError, which names `where`."""
    if not isinstance(response, str) or not response.strip():
        raise UserError(
            f"{where}: {config.response_key or 'the answer'} is {response!r:.40}, want the text of the data's own"
            " answer (data.response_key), which SPIN learns from"
        )
    return response


def templated(
    messages: Sequence[Mapping[str, Any]], where: str, tokenizer: PromptTokenizer, **variables: Any
) -> str:
    """The text of a chat that is a prompt, by the chat template. Raises UserError, which names `where`."""
    if not tokenizer.chat_template:
        raise UserError(f"{where}: the prompt is a chat and the tokenizer has no chat template")
    try:
        return rendered(tokenizer, messages, add_generation_prompt=True, **variables)
    except UserError as error:
        raise UserError(f"{where}: {error.message}") from error


def check_open(prompt: str | Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse what is no prompt: the assistant has spoken last, or nobody has said anything.

    Raises:
        UserError: it is none; names `where`.
    """
    if isinstance(prompt, str):
        if is_blank(prompt):
            raise UserError(f"{where}: the prompt is empty")
        return
    role, content = prompt[-1]["role"], prompt[-1]["content"]
    if role == "assistant":
        raise UserError(
            f"{where}: the prompt ends with a message of the assistant, and a chat template would open another one:"
            " leave it out, or give the prompt as the text that the policy continues with, its template applied"
        )
    if role == "user" and is_blank(content):
        raise UserError(f"{where}: the prompt is empty: the user's last message has no text")


def _ground_truth(source: FileRow, config: DataConfig) -> tuple[str, Json]:
    """The answer, behind its column: `data.answer_key`, else what the row's schema says.

    Raises:
        UserError: there is none, and one is required.
    """
    row, where, key = source.values, source.where, config.answer_key or "answer"
    there, answer = key in row, row.get(key)
    if config.answer_key is None and row.get("reward_model") is not None:
        model, key = row["reward_model"], "reward_model.ground_truth"
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise UserError(
                f"{where}: reward_model is {model!r:.80}, want an object with ground_truth"
            )
        there, answer = True, model["ground_truth"]
    if answer is None:
        problem = "it is null or NaN" if there else row_lacks(key, "data.answer_key", row)
    elif is_blank(answer) and not source.made:
        problem = "it is empty"
    else:
        return key, answer
    if config.answer_required:
        raise UserError(
            f"{where}: no {key!r}; {problem}; say where the answer is (data.answer_key), or that tasks have none"
            " (data.answer_required: false)"
        )
    return key, answer


def fitted(prompt: Prompt, config: DataConfig) -> Prompt | None:
    """The prompt, cut where it is too long; None where it is left out. Raises UserError, which names file and row."""
    ids, limit = prompt.prompt_ids, config.max_prompt_length
    if len(ids) <= limit:
        return prompt
    if config.filter_overlong_prompts:
        return None
    match "error" if prompt.media else config.truncation:
        case "error":
            raise UserError(
                f"{prompt.where}: {len(ids)} tokens > data.max_prompt_length {limit}; raise it, or set"
                " data.filter_overlong_prompts or data.truncation"
            )
        case "left":
            cut = ids[-limit:]
        case "right":
            cut = ids[:limit]
        case "middle":
            cut = np.concatenate([ids[: limit // 2], ids[len(ids) - (limit - limit // 2) :]])
    return replace(prompt, prompt_ids=cut)
