#!/usr/bin/env bash
# Installs the project, editable, into the environment "$1" that create_venv.sh made. With a second argument, the name
# of an extra, installs that extra's packages too, at versions that fit the locked ones.
set -euo pipefail

venv=$1
extra=${2:-}
if [ -x "$venv/bin/pip" ]; then
    install=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-build-isolation)
else
    install=(uv pip install --quiet --python "$venv/bin/python" --no-build-isolation)
fi
if [ -z "$extra" ]; then
    "${install[@]}" --no-deps -e .
else
    # Only the versions of the lock are wanted here: a constraint with hashes would ask hashes of everything.
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    grep -E '^[A-Za-z0-9._-]+==' requirements.lock | sed 's/ *\\$//' >"$constraints"
    "${install[@]}" -c "$constraints" -e ".[$extra]"
fi
