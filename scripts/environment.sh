# Python environments of this repository; sourced, not run.
#
#   find_python [3.X]                  prints an interpreter of that version; without one, the oldest from 3.11 on
#   environment NAME EXTRAS PYTHON [CONSTRAINTS]
#                                      makes <repo>/NAME with `pip install '.[EXTRAS]'`, prints its interpreter
#   lower_bounds PYTHON EXTRA          prints constraints: the dependencies at the lower bounds of pyproject.toml
#   copy_checkout DIRECTORY            copies the files of the checkout that git does not ignore
#
# The package is installed as a user installs it, not editable: what the packaging leaves out is missing in the tests
# too. It is installed again when a file in zerojax/ changes; dependencies are resolved again when pyproject.toml changes
# or the repository moves.

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

# Files that are copied by setuptools: their checksums, to know when the package has to be installed again.
source_checksums() {
  (cd "$repo" && find zerojax -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 cksum)
}

copy_checkout() {
  (cd "$repo" && git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [[ ! -e $file ]] || printf '%s\0' "$file" # not those that were deleted and are still in git's index
  done | tar --null -T - -cf -) | tar -C "$1" -xf -
}

lower_bounds() {
  "$1" - "$repo/pyproject.toml" "$2" <<'PYTHON'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in project["dependencies"] + project["optional-dependencies"][sys.argv[2]]:
    bound = re.match(r"([\w.-]+)(?:\[.*?\])?>=([\w.]+)", requirement)
    if not bound:
        sys.exit(f"pyproject.toml: {requirement!r} does not begin with a lower bound, as in 'name>=1.2'")
    print("{}=={}".format(*bound.groups()))
PYTHON
}

# Runs pip in the environment in $1. What it prints goes to pip.log, and its end to stderr if it fails.
run_pip() {
  local dir="$1" log="$1/pip.log"
  shift
  if ! "$dir/bin/python" -m pip install -q --disable-pip-version-check "$@" >"$log" 2>&1; then
    grep -v '^WARNING: Location' "$log" | tail -n 20 >&2
    echo "pip failed; the whole log is $log" >&2
    return 1
  fi
}

# Installs zerojax and the given options of pip from a copy without the build/ and *.egg-info of earlier builds, which
# setuptools would take deleted modules from, and without leaving such in the checkout.
install_copy() {
  local dir="$1" extras="$2" copy status=0
  shift 2
  copy="$(mktemp -d)"
  (cd "$repo" && tar --exclude=__pycache__ -cf - pyproject.toml README.md LICENSE zerojax) | tar -C "$copy" -xf -
  run_pip "$dir" "$copy$extras" "$@" || status=$?
  rm -rf "$copy"
  return $status
}

# One installation at a time in this checkout: scripts/test and scripts/demo share an environment. A process that runs
# in it while the package is installed again sees new files, as it would in an editable installation.
environment() {
  (
    if command -v flock >/dev/null && ! flock -n 9; then
      echo "waiting for another script that installs in $repo" >&2
      flock 9
    fi
    update_environment "$@" 9<&-
  ) 9<"$repo/scripts"
}

update_environment() {
  local dir="$repo/$1" extras="$2" python="$3" constraints="${4:-}"
  local stamp="$dir/installed-$extras" sources="$dir/installed-sources"
  local options=("setuptools>=77" --no-compile) # modules are compiled when they are imported
  if ! "$dir/bin/python" -c '' 2>/dev/null; then
    echo "making $1 with $("$python" --version)" >&2
    rm -rf "$dir"
    "$python" -m venv "$dir" >&2 || { rm -rf "$dir"; return 1; }
  fi
  # A stamp is deleted first: an installation that is interrupted is not taken for one that ended.
  if ! { echo "$repo"; cat "$repo/pyproject.toml"; } | cmp -s - "$stamp"; then
    echo "installing .[$extras] into $1" >&2
    if [[ -n $constraints ]]; then
      echo "$constraints" >"$dir/constraints.txt"
      options+=(-c "$dir/constraints.txt")
    fi
    source_checksums >"$sources.new"
    rm -f "$stamp" "$sources"
    install_copy "$dir" "[$extras]" "${options[@]}" || return 1
    { echo "$repo"; cat "$repo/pyproject.toml"; } >"$stamp"
    mv "$sources.new" "$sources"
  elif source_checksums >"$sources.new" && ! cmp -s "$sources.new" "$sources"; then
    echo "installing zerojax into $1" >&2
    rm -f "$sources"
    install_copy "$dir" "" --no-deps --no-build-isolation --force-reinstall || return 1 # with setuptools from above
    mv "$sources.new" "$sources"
  fi
  echo "$dir/bin/python"
}
