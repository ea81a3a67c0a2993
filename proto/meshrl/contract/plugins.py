"""Old name of `meshrl.common.plugins`, until 0.3."""

from meshrl.common.plugins import *  # noqa: F403
