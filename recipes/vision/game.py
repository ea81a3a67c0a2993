"""A game of three turns whose every answer is a picture: name the colour of the shape that you see.

After a right answer another shape comes, after a wrong one the same colour again, drawn otherwise.
"""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from meshrl.rollout.programs.user import Session

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 60, 210),
    "yellow": (235, 215, 40),
    "white": (245, 245, 245),
    "black": (10, 10, 10),
}
SIDE, TURNS = 64, 3
QUESTION = "<image> which colour ?"


def picture(draws: random.Random, colour: str) -> bytes:
    """A shape of `colour` on a grey ground, as PNG."""
    ground = draws.randrange(110, 150)
    image = Image.new("RGB", (SIDE, SIDE), (ground, ground, ground))
    size, canvas = draws.randrange(24, 44), ImageDraw.Draw(image)
    left, top = draws.randrange(SIDE - size), draws.randrange(SIDE - size)
    shape = draws.choice((canvas.ellipse, canvas.rectangle))
    shape((left, top, left + size, top + size), fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


async def play(session: Session) -> dict[str, float]:
    """The share of right answers; the first picture is the prompt's."""
    colour, right = str(session.task.ground_truth), 0
    said = await session.reply()
    for turn in range(1, TURNS + 1):
        # The rows of a group that have said the same see the same.
        draws = random.Random(f"{session.task.extra_info['index']} {turn} {right}")
        if said.split()[:1] == [colour]:
            right += 1
            colour = draws.choice([each for each in COLOURS if each != colour])
        if turn < TURNS:
            said = await session.say(QUESTION, images=[picture(draws, colour)])
    return {"score": right / TURNS}
