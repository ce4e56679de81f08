# Sourced by the other scripts: `ensure_environment EXTRA` makes the virtual environment and leaves its Python in
# $python. The repository is $root.
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

# An installed package, as the README installs it, may be in use: the scripts would replace it by an editable one under
# a running training. They get an environment of their own then.
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

# What the README's quick start installs: its extras, and its index of torch's builds without CUDA.
readme_extras=$(sed -n 's/^pip install -c scripts.constraints\.txt "\.\[\(.*\)\]"$/\1/p' "$root/README.md")
cpu_index=$(sed -n 's/^pip install torch==.* --index-url \([^ ]*\).*/\1/p' "$root/README.md")

# As the README's line: without an NVIDIA GPU, torch without gigabytes of CUDA. If its index cannot be reached, pip
# chooses a build of the tested version.
install_torch_without_cuda() {
  if command -v nvidia-smi >/dev/null || "$python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    return
  fi
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --retries 1 --timeout 15 \
    --constraint "$root/scripts/constraints.txt" --index-url "$cpu_index" torch >/dev/null 2>&1 ||
    echo "torch without CUDA cannot be had from the index in the README: pip takes its usual build"
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
  install_torch_without_cuda
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$root/scripts/constraints.txt" --editable "${root}[$extra]" || {
    rm -f -- "$cut"
    die "the installation failed (pip says above why): run the same command again to go on"
  }
  printf '%s\n' "$key" >"$stamp"
  rm -f -- "$cut"
  trap - INT
}

# The requirements of the package and of its extra lora in pyproject.toml, one a line: "transformers>=5.17,<5.25".
requirements() {
  "$python" - "$root/pyproject.toml" <<'PYTHON'
import re
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    text = file.read()
for start, end in ((r"^dependencies = \[", r"^\]"), (r"^lora = \[", r"\]")):
    needed = re.search(f"{start}(.*?){end}", text, re.DOTALL | re.MULTILINE)[1]
    print(*re.findall(r'"([^"]+)"', needed), sep="\n")
PYTHON
}

# layer_environment NAME REQUIREMENT…: an environment that has the requirements, and everything else from the tested
# one, which stays as it is. Leaves its Python in $python, what it has of its own in $layered, and in $unreachable, if
# pip could not ask the registry, a word. torch stays unless $with_torch is set: another one may bring gigabytes of CUDA.
layer_environment() {
  local folder=$root/$1 site tested_site log
  shift
  ensure_environment dev
  tested_site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  log=$folder/pip.txt
  "$python" -m venv --clear --without-pip "$folder"
  "$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$folder/constraints.txt"
  [ -z "${with_torch:-}" ] || : >"$folder/constraints.txt"
  python=$folder/bin/python
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf 'import site; site.addsitedir(%s)\n' "'$tested_site'" >"$site/tested_versions.pth"
  unreachable=
  # With one attempt again, pip says that a connection broke. With none it takes what is installed, without a word.
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile --retries 1 --timeout 30 --upgrade \
    --constraint "$folder/constraints.txt" "$@" 2>"$log" || {
    cat -- "$log" >&2
    grep -q 'Retrying (' "$log" || die "the installation failed (pip says above why)"
  }
  ! grep -q 'Retrying (' "$log" || unreachable=yes
  layered=$("$python" -m pip list --disable-pip-version-check --format freeze --path "$site" 2>/dev/null)
}

# What other libraries can break: the bundle, every mode of `generate`, the trainers, PEFT, the pipeline, the Auto classes.
version_tests=(
  tests/test_generation_modes.py tests/test_generation.py tests/test_generation_marian.py tests/test_auto_classes.py
  tests/test_pipeline.py tests/test_modeling.py tests/test_shipped_files.py tests/test_tied_saving.py
  tests/test_configuration.py tests/test_loading_paths.py tests/test_trainer_stock.py tests/training/test_trainer.py
  tests/training/test_fine_tuning.py tests/test_stack.py
)

# Run them, and the modes in remote code, in a layered environment.
test_versions() {
  printf 'testing with %s\n' "${layered//$'\n'/, }"
  "$python" -m pytest -q -n auto --dist loadfile "${version_tests[@]}"
  "$python" -m pytest -q -m slow tests/test_generation_modes.py
}

# conformance [PYTEST ARGUMENT…]: Hugging Face's own tests of the transformers in $python, downloaded once.
conformance() {
  local version tests part
  version=$("$python" -c 'import importlib.metadata; print(importlib.metadata.version("transformers"))')
  tests=$root/.conformance/$version
  if [ ! -d "$tests" ]; then
    echo "downloading the tests of transformers $version"
    mkdir -p -- "$root/.conformance"
    part=$(mktemp -d "$root/.conformance/part.XXXXXX")
    "$python" -m pip download --quiet --disable-pip-version-check --dest "$part" --no-deps --no-binary transformers \
      --no-build-isolation "transformers==$version" || { rm -rf -- "$part"; die "the download failed (pip says above why)"; }
    tar -xzf "$part/transformers-$version.tar.gz" -C "$part" "transformers-$version/tests"
    : >"$part/transformers-$version/tests/__init__.py" # one of them loads its folder as a package
    mv -- "$part/transformers-$version/tests" "$tests"
    rm -rf -- "$part"
  fi
  "$python" "$root/tests/conformance/run.py" "$tests" "$@" </dev/null
}
