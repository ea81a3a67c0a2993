"""The recipes that come with meshrl, in a checkout as in an installed package; and copies of them."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.files import replace_file
from meshrl.contract.errors import UserError

FOLDER = Path("recipes")
"""Beside the other portions of the package `meshrl` in a wheel; in a checkout, at its root."""
DEMO = Path("demo") / "recipe.yaml"
ELSEWHERE = ("openai_agent",)
"""Recipes that name files outside of their folders."""


def recipes() -> Path:
    """The folder of the recipes."""
    here = Path(__file__).resolve()
    packaged = here.parents[1] / FOLDER
    return packaged if packaged.is_dir() else here.parents[3] / FOLDER


def templates() -> list[str]:
    """The folders of recipes that can be copied."""
    found = sorted({path.parent.name for path in recipes().glob("*/*.yaml")})
    return [name for name in found if name not in ELSEWHERE]


def copy_template(name: str, target: Path) -> list[Path]:
    """Copy a folder of recipes to `target`. Returns the files.

    Raises:
        UserError: there is no such folder, or a file is in the way.
    """
    if name not in templates():
        raise UserError(
            f"no recipe {name!r} comes with meshrl; there are: {', '.join(templates())}"
        )
    sources = [path for path in sorted((recipes() / name).iterdir()) if path.is_file()]
    copies = [target / source.name for source in sources]
    for copy in copies:
        if copy.exists():
            raise UserError(f"{copy} is there already")
    target.mkdir(parents=True, exist_ok=True)
    for source, copy in zip(sources, copies, strict=True):
        replace_file(copy, source.read_bytes())
    return copies
