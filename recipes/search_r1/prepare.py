"""A small corpus, questions about it, and a tiny model that knows how to search and mostly guesses instead.

python recipes/search_r1/prepare.py runs/search_r1/assets

where was Belod born? ─▶ <answer>Tirim</answer>                       a guess, as mostly after this warm start
where was Belod born? ─▶ <search>Belod</search> ─▶ <information>…</information> ─▶ <answer>Sanek</answer>

Each held-out question is about a person that no training question names: only the corpus knows the answer.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from meshrl.cli.demo.tiny_model import chat_tokenizer
from meshrl.cli.demo.warm_start import Pair, Stage, warm_start, write_rows
from meshrl.rollout.tools.formats.search_r1 import OBSERVATION

PEOPLE, HELD_OUT = 6000, 256
SEARCHING_SHARE = 0.2
TAGS = [f"<{end}{name}>" for name in ("search", "information", "answer") for end in ("", "/")]


@dataclass(frozen=True, slots=True)
class Person:
    """One passage of the corpus."""

    name: str
    town: str

    @property
    def text(self) -> str:
        """The text of the corpus."""
        return f"born in {self.town}"

    @property
    def asked(self) -> str:
        """The prompt, chat template applied."""
        return f"<|user|>where was {self.name} born?<|end|><|assistant|>"


def people(seed: int) -> list[Person]:
    """Each with a name of its own."""
    draw = random.Random(seed)

    def word() -> str:
        return "".join(
            draw.choice(letters) for letters in ("BDKLMNRST", "aeiou") * 2
        ) + draw.choice("dklmnt")

    names = dict.fromkeys(word() for _ in range(3 * PEOPLE))
    towns = [word() for _ in range(200)]
    return [
        Person(name.capitalize(), draw.choice(towns).capitalize()) for name in list(names)[:PEOPLE]
    ]


def searched(person: Person) -> list[Pair]:
    """Both turns of a row with a search, each as a pair for supervised fine-tuning."""
    query = f"<search>{person.name}</search>"
    found = OBSERVATION.replace("{}", f"Doc 1(Title: {person.name}) {person.text}")
    return [
        (person.asked, query),
        (f"{person.asked}{query}{found}", f"<answer>{person.town}</answer>"),
    ]


def guessed(person: Person) -> list[Pair]:
    """An answer at once."""
    return [(person.asked, f"<answer>{person.town}</answer>")]


def stages(known: list[Person], seed: int) -> list[Stage]:
    """Searches, then mostly guesses."""
    draw = random.Random(seed)
    searches = [pair for person in known for pair in searched(person)]
    mixed = [
        pair
        for person in known
        for pair in (searched if draw.random() < SEARCHING_SHARE else guessed)(person)
    ]
    draw.shuffle(searches)
    draw.shuffle(mixed)
    return [
        Stage(name="searches", rows=searches, steps=900, lr=3e-3, seed=seed, enough=0.98),
        Stage(name="mostly guesses", rows=mixed, steps=60, lr=1e-3, seed=seed),
    ]


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory: Path = options.directory
    (directory / "corpus").mkdir(parents=True, exist_ok=True)
    everybody = people(options.seed)
    write_rows(
        directory / "corpus/people.jsonl",
        [{"contents": f"{person.name}\n{person.text}"} for person in everybody],
    )
    held_out, known = everybody[:HELD_OUT], everybody[HELD_OUT:]
    for name, chosen in (("train", known), ("held_out", held_out)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"where was {person.name} born?"}],
                "reward_model": {"ground_truth": {"target": [person.town]}},
            }
            for person in chosen
        ]
        write_rows(directory / f"{name}.jsonl", rows)
    warm_start(
        directory,
        stages(known, options.seed),
        [pair for person in held_out[:64] for pair in searched(person)],
        seed=options.seed,
        report=lambda name, now: print(f"{name}: step {now.step}, loss {now.loss:.3f}"),
        tokenizer=chat_tokenizer([*TAGS, "\n"]),
    )


if __name__ == "__main__":
    main()
