"""The page of `meshrl view` in a real Chromium: each view, text that would be markup, and a run that grows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.rpc.credentials import MeshRole, ensure_credentials, file_of_role

from ..browser import Browser, browser, missing
from ..screenshots import VIEWS, served
from ..view_runs import SaidServices, add_many_rows, add_picture_rows, add_steps, two_runs

SCROLL = "const box = document.querySelector('.scroll')"
FIRST_PARTS = """return [...document.querySelectorAll('.parts li:first-child .what')]
    .map((part) => part.innerText)"""
IN_ONE_COLUMN = """const lines = [...document.querySelectorAll('.scroll td > *')];
    return lines.length > 9 && new Set(lines.map((line) => line.getBoundingClientRect().left)).size === 1"""
pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no browser: {missing()}")


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as page:
        yield page


def look_at_every_view(page: Browser, url: str) -> None:
    page.open(url)
    base = url.partition("#")[0]
    for width in (1280, 390):
        page.show(width, 900, dark=width == 390)
        for name, (address, drawn) in VIEWS.items():
            page.open(f"{base}#/{address}")
            page.until(drawn)
            assert page.run("return document.documentElement.scrollWidth") <= width, (name, width)
            if name == "flow":
                assert page.run(FIRST_PARTS) == ["trained", "scored"]
            if name == "fleet":
                assert page.run(f"{SCROLL}; return box.scrollWidth <= box.clientWidth"), width
                assert width > 640 or page.run(IN_ONE_COLUMN), "lines of a cell stand among labels"
            assert not page.run("return document.querySelector('.problem')?.textContent"), name
    # What the first row says is text, wherever it is shown.
    for address in ("rollouts?step=60", "rollouts?step=60&layout=rows", "rollouts?step=60&row=0"):
        page.open(f"{base}#/{address}")
        page.until("document.querySelector('main')?.innerText.includes('onerror=')")
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0
    assert page.run("return document.title") == "rollouts · meshrl"
    # Nothing failed, and nothing was asked of another site.
    assert page.complaints() == []
    asked = page.run("return performance.getEntriesByType('resource').map(one => one.name)")
    assert asked and all(each.startswith(base) for each in asked)


def walk_by_keyboard(page: Browser, url: str) -> None:
    """From a point of a curve to the rows of its step, to a row, to its tokens, and back."""
    press = """const [target, key] = [document.querySelector(arguments[0]), arguments[1]];
        target.focus(); target.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))"""
    page.open(f"{url.partition('#')[0]}#/overview")
    curve = "[data-metric='reward/mean'] .u-over"
    page.until("document.querySelector(arguments[0])", curve)
    for _ in range(59):
        page.run(press, curve, "ArrowLeft")
    page.run(press, curve, "Enter")
    page.until("location.hash.includes('step=60') && document.querySelector('.row')")
    page.run("document.querySelector('.row').click()")
    page.until("document.querySelector('.token')")
    page.run(press, ".strip", "ArrowRight")
    page.until("document.querySelector('.told')?.innerText.includes('sampler')")
    page.run(press, ".strip", "j")
    page.until("document.querySelector('main')?.innerText.includes('row 1 of step 60')")
    page.run(press, "body", "Escape")
    page.until("!location.hash.includes('row=') && document.querySelectorAll('.row').length")


def set_every_option(page: Browser, url: str) -> None:
    page.open(f"{url.partition('#')[0]}#/overview")
    page.until("document.querySelectorAll('.panel canvas').length >= 9")
    change = """const box = document.querySelector(arguments[0]);
        box.value = arguments[1]; box.dispatchEvent(new Event(arguments[2]))"""
    page.run(change, "input[type=range]", "0.9", "input")
    page.run("document.querySelector('label:has(+ .wide) input').click()")
    page.run(change, "input[type=text]", "policy/unknown", "change")
    page.run("document.querySelector('.chip input').click()")
    page.until("document.querySelector('.panel output')?.children.length === 1")
    assert page.complaints() == []


def turn_pages_of_many_rows(page: Browser, url: str) -> None:
    """The last page, sorted and filtered, of 100,000 rows: the page holds what it shows, and no more."""
    base = f"{url.partition('#')[0]}#/rollouts?run=gsm8k-fast&step=80&layout=rows"
    page.open(f"{base}&sort=reward+up&page=1999")
    page.until("document.body.innerText.includes('rows 99,951 to 100,000 of 100,000')")
    assert page.run("return document.querySelectorAll('main tbody tr').length") == 50
    page.open(f"{base}&search=answer+99999")
    page.until("document.body.innerText.includes('rows 1 to 1 of 1')")
    page.open(f"{base.replace('layout=rows', 'layout=groups')}&where=reward+%3D%3D+3&page=3")
    page.until("document.querySelectorAll('.group').length === 10")
    assert page.complaints() == []


def replay_as_operator(page: Browser, url: str, credential: str, services: SaidServices) -> None:
    page.open(url)
    page.open(f"{url.partition('#')[0]}#/flow")
    page.until("document.body.innerText.includes('meshrl dead-letters replay')")
    assert not page.run("return document.querySelector('td button')")
    page.open("about:blank")
    page.open(f"{url.partition('#')[0]}#token={credential}")
    page.until("document.querySelector('.panel canvas')")
    page.open(f"{url.partition('#')[0]}#/flow")
    page.until("document.querySelector('td button')")
    page.run("document.querySelector('td button').click()")
    page.until("document.body.innerText.includes('44 rows are admitted again')")
    assert [replayed[1:3] for replayed in services.replayed] == [("rollout", "timeout")]


def watch_it_grow(page: Browser, url: str, run: Path) -> None:
    page.open(f"{url.partition('#')[0]}#/overview")
    page.until("document.querySelector('.chip')?.innerText.includes('step 119')")
    add_steps(run, 120, 121)
    page.until("document.querySelector('.chip')?.innerText.includes('step 120')")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("this is no JSON\n")
    page.until("document.querySelector('.problem')?.innerText.includes('no JSON object')")
    assert not page.run("return document.querySelector('.warning')")
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(121, 126):
            file.write(json.dumps({"step": step, "advantages/rows_in_equal_groups": 1.0}) + "\n")
    page.until("document.querySelector('.warning')?.innerText.includes('all rows of each group')")
    page.run("document.querySelector('.warning a').click()")
    page.until(
        "document.querySelector('.card[aria-current=true] h2')?.innerText === 'Equal groups'"
    )


async def test_every_view_is_drawn_and_what_models_say_stays_text(
    page: Browser, tmp_path: Path
) -> None:
    runs = two_runs(tmp_path)
    add_many_rows(runs[1], 80)
    async with served(runs, SaidServices()) as url:
        await asyncio.to_thread(look_at_every_view, page, url)
        await asyncio.to_thread(turn_pages_of_many_rows, page, url)
        await asyncio.to_thread(walk_by_keyboard, page, url)
        await asyncio.to_thread(set_every_option, page, url)
        await asyncio.to_thread(watch_it_grow, page, url, runs[0])


def look_at_pictures(page: Browser, url: str) -> None:
    page.open(url)
    page.complaints()  # of the page before, whose server is gone
    page.show(390, 800)
    page.open(f"{url.partition('#')[0]}#/rollouts?step=90&row=0")
    page.until("document.querySelectorAll('.pictures figure').length === 5")
    page.until("[...document.querySelectorAll('.pictures img')].every((one) => one.naturalWidth)")
    shown = page.run("return document.querySelector('.pictures').innerText")
    assert "320 × 200" in shown and "96 × 96" in shown and "want PNG, JPEG" in shown
    assert "not kept" in shown and "no name of a picture" in shown
    assert len(page.run("return document.querySelectorAll('.pictures img')")) == 2
    assert page.run("return document.documentElement.scrollWidth") <= 390
    assert "<|image_pad|>×64" in page.run("return document.body.textContent")
    assert not page.complaints() and page.run("return document.title") != "1"
    page.show(1280, 800)


async def test_a_row_shows_its_pictures_and_nothing_else_of_their_files(
    page: Browser, tmp_path: Path
) -> None:
    run = two_runs(tmp_path)[0]
    add_picture_rows(run, 90)
    async with served([run], SaidServices()) as url:
        await asyncio.to_thread(look_at_pictures, page, url)


async def test_an_operator_replays_dead_letters_by_a_button_that_a_reader_lacks(
    page: Browser, tmp_path: Path
) -> None:
    run, services = two_runs(tmp_path)[0], SaidServices()
    ensure_credentials(run)
    operator = file_of_role(run, MeshRole.OPERATOR).read_text().strip()
    async with served([run], services) as url:
        await asyncio.to_thread(replay_as_operator, page, url, operator, services)


async def test_a_page_without_the_token_says_what_to_open(page: Browser, tmp_path: Path) -> None:
    async with served(two_runs(tmp_path), SaidServices()) as url:

        def look() -> None:
            page.open(url.replace("=", "=not-"))
            page.until("document.body.innerText.includes('open the address')")

        await asyncio.to_thread(look)
