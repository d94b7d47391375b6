# Python environments of this repository; sourced, not run.
#
#   find_python [3.X]                  prints an interpreter of that version; without one, the oldest from 3.11 on
#   environment NAME EXTRAS PYTHON     makes <repo>/NAME with `pip install -e '.[EXTRAS]'`, prints its interpreter
#
# An environment is installed again when pyproject.toml changes or the repository moves.

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Whether an interpreter runs, is at least 3.11 and can make environments; prints its version.
python_version() {
  "$1" -c 'import ensurepip, sys, venv; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Lines "VERSION PATH" of all interpreters that are on PATH or installed by pyenv, oldest version first.
list_pythons() {
  local candidate version
  for candidate in python3.11 python3.12 python3.13 python3.14 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
    candidate="$(command -v "$candidate" || true)"
    if [[ -n $candidate ]] && version="$(python_version "$candidate")"; then
      echo "$version $candidate"
    fi
  done | sort -s -t . -k 2,2n
}

find_python() {
  local version path
  while read -r version path; do
    if [[ -z ${1:-} || $version == "$1" ]]; then
      echo "$path"
      return 0
    fi
  done < <(list_pythons)
  echo "no Python ${1:-from 3.11 on} that can make environments was found on PATH or among pyenv's" >&2
  return 1
}

environment() {
  local dir="$repo/$1" extras="$2" python="$3"
  local stamp="$dir/installed-$extras" log="$dir/pip.log"
  if ! "$dir/bin/python" -c '' 2>/dev/null; then
    echo "making $1 with $("$python" --version)" >&2
    rm -rf "$dir"
    "$python" -m venv "$dir" >&2 || { rm -rf "$dir"; return 1; }
  fi
  if ! { echo "$repo"; cat "$repo/pyproject.toml"; } | cmp -s - "$stamp"; then
    echo "installing .[$extras] into $1" >&2
    if ! (cd "$repo" && "$dir/bin/python" -m pip install -q --disable-pip-version-check -e ".[$extras]") >"$log" 2>&1; then
      grep -v '^WARNING: Location' "$log" | tail -n 20 >&2
      echo "pip failed; the whole log is $1/pip.log" >&2
      return 1
    fi
    { echo "$repo"; cat "$repo/pyproject.toml"; } >"$stamp"
  fi
  echo "$dir/bin/python"
}
