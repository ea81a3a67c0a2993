"""Asks osv.dev about known vulnerabilities of the packages of a lock file: `make audit`.

Exit code 0: none are known; 1: some are, listed by pip-audit; 2: the service cannot be reached, in one line.
"""

from __future__ import annotations

import subprocess
import sys

TIMEOUT_S = 15
SERVICE = "osv"


def main(lock: str) -> int:
    """Run pip-audit; returns the exit code."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "-r", lock]
    command += ["-s", SERVICE, "--timeout", str(TIMEOUT_S), "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout.strip():
        # It has no exit code of its own for this: with vulnerabilities it prints a table.
        last = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        print(f"error: the packages were not audited: {last}", file=sys.stderr)
        return 2
    print(done.stdout.strip() or done.stderr.strip())
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
