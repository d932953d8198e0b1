# Sourced by run.sh and check.sh: finds a Python and makes a virtual environment. Not to be run by itself.

# Prints the first Python that is 3.11 or newer.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "colibri-mp needs Python 3.11 or newer; install it or set PYTHON=/path/to/python" >&2
    return 1
}

# make_environment FOLDER WHAT PIP_ARGUMENTS...: a virtual environment with `pip install PIP_ARGUMENTS`, made again only
# when pyproject.toml or the arguments have changed.
make_environment() {
    local folder=$1 what=$2 python stamp
    shift 2
    stamp=$folder/.made-for-$(cat pyproject.toml - <<<"$*" | cksum | tr ' ' '-')
    [ -e "$stamp" ] && return
    python=$(find_python)
    echo "making $folder ($what), once; this downloads packages and takes a minute or two" >&2
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2
    touch "$stamp"
}
