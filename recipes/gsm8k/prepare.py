"""GSM8K's jsonl to verl-schema parquet, SFT pairs, and (by option) a small BPE model to run it all without a hub.

    python recipes/gsm8k/prepare.py PATH/TO/gsm8k runs/gsm8k/assets [--tiny-model]

reads train.jsonl and test.jsonl (`question`, `answer` with the result after `####`), writes

    train.parquet, test.parquet      data_source, prompt (chat), ability, reward_model.ground_truth, extra_info
    sft_train.parquet                prompt (chat), response
    model/                           with --tiny-model: random weights and a BPE tokenizer learnt from the texts
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Question and worked answer of each line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            yield row["question"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"error: {path}:{number}: want an object with question and answer ({error})")


def verl_row(split: str, index: int, question: str, answer: str) -> dict[str, Any]:
    """One prompt in verl's schema."""
    truth = answer.rpartition("####")[2].strip().replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` as a parquet file."""
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} rows")


def write_tiny_model(path: Path, texts: list[str], *, vocabulary: int = 4096) -> None:
    """Write a Qwen3 of about one million parameters with a byte-level BPE tokenizer learnt from `texts`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    print(f"{path}: {sum(p.numel() for p in model.parameters()):,} parameters, random")


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="directory with train.jsonl and test.jsonl")
    parser.add_argument("target", type=Path, help="directory to write into")
    parser.add_argument("--tiny-model", action="store_true", help="also make model/")
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for split in ("train", "test"):
        source = options.source / f"{split}.jsonl"
        if not source.is_file():
            parser.error(f"{source}: no such file")
        pairs = list(read(source))
        rows = [verl_row(split, index, *pair) for index, pair in enumerate(pairs)]
        write(options.target / f"{split}.parquet", rows)
        if split == "train":
            texts = [text for pair in pairs for text in pair]
            sft = [
                {"prompt": row["prompt"], "response": answer}
                for row, (_, answer) in zip(rows, pairs, strict=True)
            ]
            write(options.target / "sft_train.parquet", sft)
    if options.tiny_model:
        write_tiny_model(options.target / "model", texts)


if __name__ == "__main__":
    main()
