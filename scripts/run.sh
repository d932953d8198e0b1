#!/usr/bin/env bash
# Generates text: ./scripts/run.sh "Once upon a time" [flags of `colibri-cluster run`]
# Makes its own virtual environment at first; with no --model it uses the built-in one.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
make_environment .venv "colibri-mp and what it needs" --editable .
exec .venv/bin/colibri-cluster run "$@"
