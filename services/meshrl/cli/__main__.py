"""`PYTHON meshrl.cli`, of `meshrl.common.python_process`: how `up` starts every service."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109 - as Python wrote it
    del sys.path[
        0
    ]  # as the console script: a file in the working directory is no module of the mesh

from meshrl.cli import main

main()
