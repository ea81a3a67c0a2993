"""Old name of `meshrl.common.config`, until 0.3."""

from meshrl.common.config import *  # noqa: F403
