"""Pictures of `meshrl up` and `meshrl view`: `python -m tests.screenshots FOLDER` makes the docs', `--all` more."""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import re
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from meshrl.common.sockets import Certificates
from meshrl.contract.types import EngineStats, Ledger, TrainerPhase, TrainerStatus, Version
from meshrl.http.common import problem
from meshrl.http.view.app import Admission, build_app, viewed_runs
from meshrl.launcher.supervisor import ServiceState
from meshrl.launcher.view import MeshStatus, live_view
from meshrl.rpc.http_server import serving_http

from .browser import Browser, browser
from .view_runs import SaidServices, two_runs

TOKEN = "for-pictures"
VIEWS = {
    "overview": ("overview", "document.querySelectorAll('.panel canvas').length >= 9"),
    "rollouts": ("rollouts?step=60", "document.querySelectorAll('.row').length >= 24"),
    "row": ("rollouts?step=60&row=21&colour=logprob", "document.querySelector('.token')"),
    "flow": ("flow", "document.querySelector('.stack')"),
    "fleet": ("fleet", "document.querySelector('main')?.innerText.includes('10.87 MiB')"),
    "timeline": ("timeline", "document.querySelectorAll('.lane .span').length >= 20"),
    "help": ("help?sign=equal-groups", "document.querySelector('.card[aria-current=true]')"),
    "config": ("config?other=gsm8k-fast", "document.querySelector('td')"),
}
"""Name to address and to what is there once the view is drawn."""
OF_THE_DOCS = ("overview", "rollouts", "row", "timeline")
HEIGHTS = {"overview": 600, "rollouts": 640, "row": 670, "timeline": 560}


@asynccontextmanager
async def served(directories: list[Path], services: SaidServices) -> AsyncIterator[str]:
    """The page over these directories; yields its address with the token."""
    runs, closing = viewed_runs(directories), asyncio.Event()
    app = build_app(runs, services, Admission(TOKEN, runs), closing)
    async with serving_http(app, "127.0.0.1", 0, Certificates(), refuse=problem) as url:
        yield f"{url}/#token={TOKEN}"
        closing.set()


def take(page: Browser, url: str, folder: Path, everything: bool) -> None:
    """Save the pictures."""
    page.open(url)
    page.until("document.querySelector('.panel canvas')")
    base = url.partition("#")[0]
    for name in VIEWS if everything else OF_THE_DOCS:
        address, drawn = VIEWS[name]
        for width in (1280, 390) if everything else (1100,):
            for dark in (False, True) if everything else (False,):
                page.show(width, 900 if everything else HEIGHTS[name], dark=dark)
                page.open(f"{base}#/{address}")
                page.until(drawn)
                time.sleep(0.5)  # curves are drawn a frame later
                end = f"-{width}-{'dark' if dark else 'light'}" if everything else ""
                page.picture(folder / f"view-{name}{end}.png", whole=everything)
    for complaint in page.complaints():
        print(complaint)


def picture_terminal(path: Path) -> None:
    """Save the display of `meshrl up` for a run at work, as an SVG that asks for no font from elsewhere."""
    versions = [Version(1, 23), Version(1, 24)]
    made = MeshStatus(
        run="demo",
        started=time.monotonic() - 24,
        states={f"rollout-{n}": ServiceState(phase="ready") for n in (0, 1)},
    )
    for step in range(25):
        reward = 0.95 - 0.75 * math.exp(-step / 6) + 0.03 * math.sin(step * 2.1)
        made.see(
            TrainerStatus(
                step=step,
                total_steps=40,
                version=Version(1, step),
                phase=TrainerPhase.TRAINING,
                reward_mean=reward,
                held_out_score=(0.16, 0.9, 0.97)[step // 10],
                tokens_per_s=15_800.0,
                samples=256 * step,
                staleness={0: 12, 1: 241, 2: 3},
                eta_s=13.0,
            )
        )
    made.ledger = Ledger(
        run="demo",
        admitted=6_912,
        trained=6_144,
        filtered={},
        stale={},
        dead_lettered={},
        resident={"queued": 64, "leased": 248, "pending": 40, "ready": 160, "settled": 256},
    )
    for at, version in enumerate(versions):
        made.fleet[f"rollout-{at}"] = EngineStats(
            version=version,
            running=121 + at,
            capacity=128,
            tokens_generated=210_000,
            tokens_per_s=8_800.0 + 310 * at,
            updates=version.step,
            update_pause_s=0.021,
        )
    console = Console(record=True, width=112, file=io.StringIO(), highlight=False)
    console.print(live_view(made))
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(
        str(path), title="meshrl up", code_format=plain, theme=MONOKAI, unique_id="live-view"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every view, two widths, light and dark")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    picture_terminal(options.folder / "live-view.svg")

    def pictures(url: str) -> None:
        with browser() as page:
            take(page, url, options.folder, options.all)

    with tempfile.TemporaryDirectory() as parent:
        directories = two_runs(Path(parent), hostile=False)
        async with served(directories, SaidServices(hostile=False)) as url:
            await asyncio.to_thread(pictures, url)


if __name__ == "__main__":
    asyncio.run(main())
