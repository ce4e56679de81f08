# Shared by quickstart.sh and test.sh. They source it: `ensure_environment EXTRA` makes the virtual environment and
# leaves its Python in $python. The repository is $root.
# shellcheck shell=bash

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python

# Nothing below needs the Hub, and no name must be looked up there.
export HF_HUB_OFFLINE=1

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# A Python that starts, is new enough and can make environments. $PYTHON goes first. Version managers leave
# commands on the path that only say that nothing is installed, so each one is tried.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.10 or newer with the venv module was found: install one, or name it: PYTHON=/path/to/python3 bash $0"
}

# What the installation depends on. The folder is part of it: a copied environment would go on using the old tree.
installation_key() {
  { printf '%s\n' "$root"; "$python" -V; cat -- "$root/pyproject.toml" "$root/scripts/constraints.txt"; } | cksum
}

# An installed package, as the README installs it, may be in use: docs.sh and test.sh would replace it by an editable one
# under a running training. They get an environment of their own then.
use_own_environment_beside_an_installed_package() {
  local installed
  [ -x "$python" ] || return 0
  installed=$("$python" - <<'PYTHON' 2>/dev/null || true
from importlib.metadata import distribution
from json import loads
source = loads(distribution("hf_vanilla_transformer").read_text("direct_url.json") or "{}")
print("" if source.get("dir_info", {}).get("editable") else "installed")
PYTHON
  )
  [ -n "$installed" ] || return 0
  venv=$root/.venv-dev
  python=$venv/bin/python
  echo "leaving the package in .venv as it is, and using $venv"
}

# ensure_environment EXTRA: the stamp is written last. A stamp that agrees means that no network is needed.
# An interrupted installation leaves its mark and starts again: pip takes half a package for a whole one.
ensure_environment() {
  local extra=$1 base key
  local stamp=$venv/.installed-$extra cut=$venv/.installing
  if [ -e "$cut" ] || ! "$python" -c 'import pip' >/dev/null 2>&1; then
    base=$(find_python)
    echo "making $venv"
    "$base" -m venv --clear "$venv" || die "$base could not make $venv: delete that folder and try again"
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$venv has a Python older than 3.10: delete that folder and try again"
  key=$(installation_key)
  if [ -f "$stamp" ] && [ "$(cat -- "$stamp")" = "$key" ]; then
    return
  fi
  rm -f -- "$stamp"
  : >"$cut"
  trap 'exit 130' INT # pip ends a Ctrl-C like a failure, and only the latter takes the mark away
  echo "installing the tested versions (scripts/constraints.txt) into $venv"
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$root/scripts/constraints.txt" --editable "${root}[$extra]" || {
    rm -f -- "$cut"
    die "the installation failed (pip says above why): run the same command again to go on"
  }
  printf '%s\n' "$key" >"$stamp"
  rm -f -- "$cut"
  trap - INT
}
