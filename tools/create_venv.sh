#!/usr/bin/env bash
# Creates the virtual environment "$1" (.venv by default) and installs the locked dependencies into it.
#
# Interpreter, in this order: $PYTHON if set; uv; python3.12; the newest 3.12 of pyenv; python3 if it is 3.12 or newer.
# The environment counts as done only when "$1/.locked" exists, which is written last.
set -euo pipefail

venv=${1:-.venv}
locks=(requirements.lock requirements-demo-model.lock)
tried=()

say() { printf 'setup: %s\n' "$*"; }

# Whether "$1" is a Python >= 3.12 that really runs (a shim may exist and refuse) and can make environments.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] < (3, 12))' >/dev/null 2>&1
}

pyenv_python() {
    command -v pyenv >/dev/null 2>&1 || return 1
    local version
    version=$(pyenv versions --bare 2>/dev/null | grep -E '^3\.12(\.[0-9]+)?$' | sort -t. -k3 -n | tail -n 1)
    [ -n "$version" ] && printf '%s/versions/%s/bin/python' "$(pyenv root)" "$version"
}

fresh_directory() {
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.made-by-penelope-jax"
}

with_uv() {
    command -v uv >/dev/null 2>&1 || return 1
    fresh_directory
    uv venv --quiet --allow-existing --python 3.12 "$venv" || return 1
    uv pip install --quiet --python "$venv/bin/python" --require-hashes -r "${locks[0]}" || return 1
    uv pip install --quiet --python "$venv/bin/python" --require-hashes --no-deps -r "${locks[1]}"
}

with_pip() {
    fresh_directory
    "$1" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
    "${pip[@]}" install --require-hashes -r "${locks[0]}"
    "${pip[@]}" install --require-hashes --no-deps -r "${locks[1]}"
}

if [ -e "$venv" ] && [ ! -e "$venv/.made-by-penelope-jax" ]; then
    echo "setup: error: $venv exists and was not made by this script; move it away, or choose another with 'make VENV=...'." >&2
    exit 2
fi

if [ -n "${PYTHON:-}" ]; then
    if ! usable "$PYTHON"; then
        echo "setup: error: PYTHON=$PYTHON is not a Python 3.12 or newer with the venv module." >&2
        exit 2
    fi
    candidates=("$PYTHON")
else
    say "creating $venv (takes a minute or two)"
    if with_uv; then
        touch "$venv/.locked"
        say "done, with uv and $("$venv/bin/python" --version)"
        exit 0
    fi
    if command -v uv >/dev/null 2>&1; then
        say "uv failed; trying the interpreters that are installed"
        tried+=("uv (failed, see above)")
    else
        tried+=("uv (not found)")
    fi
    candidates=(python3.12 "$(pyenv_python || echo 'a 3.12 of pyenv')" python3)
fi

for python in "${candidates[@]}"; do
    if usable "$python"; then
        say "using $python: $("$python" --version)"
        with_pip "$python"
        touch "$venv/.locked"
        say "done"
        exit 0
    fi
    tried+=("$python (not found, older than 3.12, or without the venv module)")
done

{
    echo "setup: error: no Python 3.12 or newer. Tried:"
    printf '  %s\n' "${tried[@]}"
    echo "Install uv or Python 3.12, or name an interpreter: make PYTHON=/path/to/python3.12 ..."
} >&2
exit 2
