"""`python -m meshrl_sglang_server …`: SGLang's server, which asks for the key that is in SGLANG_API_KEY.

SGLang takes a key as an argument only, and the arguments of a process can be read by every user of the machine.
This file runs inside SGLang's own environment, where meshrl is not installed.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":  # SGLang's own processes import this file again
    # In one word: a key may begin with a dash.
    sys.argv.append(f"--api-key={os.environ['SGLANG_API_KEY']}")
    runpy.run_module("sglang.launch_server", run_name="__main__")
