"""Draws how a row, a reward and a version travel, by following them through the running code.

    .venv/bin/python benchmarks/walks.py --write

Writes `docs/explanation/walks.md`: each file in the order in which the walk first comes to it, with the first
documented function that is called there and what its docstring says. The walks are those of `hops.py`: a task of one
row through admission, rollout, reward and a trainer's calls; a submitted reward that scores a sample; a version from
`publish` to the engines that serve it. Without `--write` the page is printed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

from hops import HOPS, Calls, noted, pass_rows, pass_versions

from meshrl.contract.types import Sample, Uid
from meshrl.rewardd.config import RewardConfig
from meshrl.rewardd.registry.building import open_registry
from meshrl.rewardd.registry.types import Submission

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/explanation/walks.md"
Stop = tuple[Path, str, str]
"""File, function and the first sentence of its docstring."""
HEAD = """# Three walks: a row, a reward, a version
<!-- Drawn by benchmarks/walks.py (`--write`) from a running mesh: change the code, not this page. -->

Each file in the order in which the walk first comes to it, the function by which it enters, and what that does.
[From prompt to gradient](from-prompt-to-gradient.md) tells the first walk in words, the last is in
[the weight plane](weight-plane.md).
"""
SOURCE = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
)


class OrderedCalls(Calls):
    """Code objects of each hop in the order of their first call."""

    def __init__(self, *hops: str) -> None:
        super().__init__(*hops)
        self.order: dict[str, dict[CodeType, None]] = {hop: {} for hop in hops}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self.hop:
            self.order[self.hop].setdefault(frame.f_code)

    def stops(self, *hops: str) -> Iterator[Stop]:
        """File, function and first sentence of its docstring, once for each file of the product."""
        seen: set[str] = set()
        for hop in hops:
            for code in self.order[hop]:
                file, said = code.co_filename, _sentence(code)
                if file not in seen and said and is_stop(code):
                    seen.add(file)
                    yield Path(file).relative_to(ROOT), code.co_qualname, said


def is_stop(code: CodeType) -> bool:
    """A function of the product that a reader can look up: neither generated nor local."""
    file = code.co_filename
    return (
        file.startswith(f"{ROOT}/")
        and "/meshrl/" in file
        and "_pb2" not in file
        and "/testing/" not in file
        and "<" not in code.co_qualname
    )


def _sentence(code: CodeType) -> str:
    """The first line of the docstring, which Python keeps as the first constant."""
    first = code.co_consts[0] if code.co_consts else None
    line = first.strip().splitlines()[0] if isinstance(first, str) and first.strip() else ""
    return line if line.endswith(".") else ""


async def pass_reward(folder: Path, calls: Calls) -> None:
    """A submitted function is checked, stored, pointed to and scores one sample."""
    config = RewardConfig.model_validate({"functions": [{"name": "gsm8k"}], "workers": 1})
    async with open_registry(config, folder) as registry:
        calls.enter("submit")
        await registry.submit("alice", Submission(name=registry.followed, source=SOURCE))
        calls.enter("score")
        [score] = await registry.judge.score(
            [
                Sample(
                    uid=Uid("run", "task", 0),
                    data_source="any",
                    solution="4",
                    ground_truth="4",
                    extra_info={},
                )
            ]
        )
        calls.enter("")
        assert score.score == 1.0


def table(stops: Iterable[Stop]) -> Iterator[str]:
    """Rows of Markdown: the number of the stop, file with link, function, sentence."""
    yield "| | file | enters by | which does |"
    yield "|---|---|---|---|"
    for number, (file, function, said) in enumerate(stops, 1):
        path = file.as_posix()
        escaped = said.replace("|", "\\|")
        yield f"| {number} | {path.partition('/meshrl/')[2]} | [`{function}`](../../{path}) | {escaped} |"
    yield ""


def page() -> str:
    """The whole page."""
    logging.getLogger("meshrl").setLevel(logging.CRITICAL)
    row, reward, version = (
        noted(pass_rows, OrderedCalls(*HOPS)),
        noted(pass_reward, OrderedCalls("submit", "score")),
        noted(partial(pass_versions, carrier="shm"), OrderedCalls("version")),
    )
    lines = [HEAD]
    for title, calls, hops in (
        ("A row is admitted", row, ["admit"]),
        ("It is sampled and scored", row, ["stages"]),
        ("It is taken, trained and released", row, ["train"]),
        ("A reward is submitted", reward, ["submit"]),
        ("It scores a row", reward, ["score"]),
        ("A version is published and served", version, ["version"]),
    ):
        lines += [f"## {title}", "", *table(calls.stops(*hops))]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
