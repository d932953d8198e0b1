#!/usr/bin/env bash
# Everything that has to be green: lint, types on the built wheel, tests on the installed wheel. Arguments go to pytest.
# Makes its own virtual environment at first; needs nothing but Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
. scripts/environment.sh
make_environment .venv-check "colibri-mp with its development tools" --editable '.[dev]'
bin=$root/.venv-check/bin

step() { echo "== $* ($SECONDS s)" >&2; }

step "lint"
"$bin/ruff" check .
"$bin/ruff" format --check .

step "build and install the wheel"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" .
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$work"/*.whl
rm -rf build

step "types"
(cd "$work" && "$bin/mypy" --config-file "$root/pyproject.toml" -p colibri_mp)

step "kernels"
"$bin/python" tests/compile_kernels.py

step "tests"
"$bin/pytest" --numprocesses 2 --dist loadfile "$@"  # a file is one process's: its tests share clusters
step "all good"
