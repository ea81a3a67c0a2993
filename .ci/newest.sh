#!/usr/bin/env bash
# The project beside the newest packages, without the lock: what somebody gets who installs it today. For every night.
#   make newest [PYTHON=python3.13] [EXTRAS=rewards,vllm,redis] [TESTS="tests/contract ..."]
# CI has the lock's packages and Python 3.11, so it cannot see that a later numpy or Python ends the import. With
# EXTRAS=torch,rewards the trainer and the rollout are imported, too: torch from PyPI is 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} venv=${NEWEST_VENV:-.venv-newest} extras=${EXTRAS:-rewards,vllm,redis}
tests=${TESTS:-tests/unit/contract tests/unit/common tests/unit/client tests/unit/transferqueue tests/contract tests/integration/client}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
  echo "error: PYTHON=$python is no Python 3.12 or later: \`make newest PYTHON=/path/to/python3.13\`" >&2
  exit 2
fi
rm -rf "$venv"
"$python" -m venv "$venv"
# As a user has it, so not editable: what the wheel lacks is missed, too.
"$venv/bin/pip" install --quiet --no-compile --disable-pip-version-check --upgrade ".[$extras]" \
  pytest pytest-asyncio pytest-timeout hypothesis trustme ruff
"$venv/bin/python" --version
"$venv/bin/pip" list --disable-pip-version-check | grep -iE '^(numpy|grpcio|protobuf|pydantic|torch|transformers) '

# Every module, of the installed package: one that wants a package of an extra that is not here is counted and left out.
"$venv/bin/python" -P - <<'PYTHON'
import collections, importlib, pkgutil, sys, traceback

import meshrl

absent, broken, imported = collections.Counter(), [], 0
for found in pkgutil.walk_packages(meshrl.__path__, "meshrl.", onerror=lambda name: None):
    if found.name.endswith("__main__") or ".plugin." in found.name:
        continue
    try:
        importlib.import_module(found.name)
        imported += 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("meshrl"):
            broken.append(found.name)
            traceback.print_exc()
        else:
            absent[error.name] += 1
    except Exception:
        broken.append(found.name)
        traceback.print_exc()
print(f"{imported} modules imported; not installed: {dict(absent)}; broken: {broken or 'none'}")
sys.exit(bool(broken))
PYTHON
# These want torch or transformers.
case ",$extras," in
  *,torch,*) ;;
  *) for name in contract/test_engine unit/common/test_chat_templates integration/client/test_{dataset,foreign_trainer}; do
    tests="$tests --ignore tests/$name.py"
  done ;;
esac
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -o addopts="--import-mode=importlib --strict-markers -ra" $tests
