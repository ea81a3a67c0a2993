"""After red tests: run once more, alone on the machine, what failed beside others.

Only up to MOST tests, whose deadlines a busy machine can miss. Both outcomes are in CI's output: a test that is named
here again and again is a defect, of itself or of the product.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 5


def main(cache: str) -> int:
    """The exit code of the second run; 1 where there is none. `cache` is where pytest left what has failed."""
    record = Path(cache, "v/cache/lastfailed")
    failed = list(json.loads(record.read_text())) if record.exists() else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed, of which none is run again", flush=True)
        return 1
    print(f"failed beside other tests, run once more alone: {', '.join(failed)}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
