#!/usr/bin/env bash
# Renews requirements.lock: every dependency of the demo, the tests, the report and the tools, with hashes, for all
# platforms, without the address of an index. Uses uv, from the machine or in an environment of its own.
# Versions already locked are kept where they fit; `tools/lock.sh --upgrade` takes the newest.
set -euo pipefail

if command -v uv >/dev/null 2>&1; then
    uv=uv
else
    "${PYTHON:-python3}" -m venv build/lock
    build/lock/bin/python -m pip --disable-pip-version-check --quiet install uv
    uv=build/lock/bin/uv
fi
"$uv" pip compile --quiet --universal --python-version 3.12 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command 'make lock' \
    --extra demo --extra report --extra test --group dev "$@" pyproject.toml -o requirements.lock
if grep -nE '://|file:|--(index|extra-index|find-links)' requirements.lock; then
    echo "lock: error: requirements.lock names an address." >&2
    exit 1
fi
