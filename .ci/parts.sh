# What .ci/run and .ci/full have in common; sourced, not run. CONTRIBUTING.md describes the parts.
#
#   part NAME COMMAND...                         runs the command; if it fails, so does the run
#   part_that_may_fail NAME SECONDS COMMAND...   runs the command for at most so many seconds
#   lint_and_wheel                               the parts that a run begins with
#   $oldest, $newest                             interpreters for the oldest and the newest versions

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

oldest_version=3.11 newest_version=3.12
logs="$(mktemp -d)"
background=""
summary=()

finish() {
  local status=$?
  [[ -z $background ]] || kill "$background" 2>/dev/null || true
  printf '\n== summary, after %s\n' "$(minutes $SECONDS)"
  ((${#summary[@]})) && printf '%s\n' "${summary[@]}"
  ((status == 0)) || echo "FAILED: parts that are not listed did not run"
  [[ -z ${limit_s:-} ]] || ((SECONDS <= limit_s)) || echo "LONGER THAN $(minutes "$limit_s"): see pytest --durations=30"
  rm -rf "$logs"
}
trap finish EXIT

minutes() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }

# note NAME SECONDS TEXT: a line of the summary.
note() {
  echo "== $1: $3, $(minutes "$2")"
  summary+=("$(printf '%-44s %12s   %s' "$1" "$(minutes "$2")" "$3")")
}

last_line() { grep -v '^[[:space:]]*$' "$1" | tail -n 1; }

part() {
  local name="$1" start=$SECONDS log="$logs/${#summary[@]}"
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$log" || { note "$name" $((SECONDS - start)) "FAILED"; exit 1; }
  note "$name" $((SECONDS - start)) "$(last_line "$log")"
}

part_that_may_fail() {
  local name="$1" seconds="$2" start=$SECONDS log="$logs/${#summary[@]}" status=0
  shift 2
  echo "== $name"
  timeout --kill-after 10 "$seconds" "$@" 2>&1 | tee "$log" || status=$?
  case $status in
    0) note "$name" $((SECONDS - start)) "$(last_line "$log")" ;;
    124 | 137) note "$name" $((SECONDS - start)) "NOT ENDED after $seconds s (this does not fail the run)" ;;
    *) note "$name" $((SECONDS - start)) "FAILED (this does not fail the run): $(last_line "$log")" ;;
  esac
}

lint() {
  local python
  python="$(environment .venv-lint lint "$oldest")" &&
    "$python" -m ruff check . &&
    "$python" -m ruff format --check . &&
    "$python" -m pyright --pythonpath "$python" zerojax
}

# Lint runs next to the wheel, whose part mostly waits for the disk and the index.
lint_and_wheel() {
  local start=$SECONDS status=0
  { status=0; lint || status=$?; echo $((SECONDS - start)) >"$logs/lint.seconds"; exit $status; } >"$logs/lint" 2>&1 &
  background=$!
  part "wheel and sdist, Python $(python_version "$newest")" scripts/wheel --python "$newest"
  wait "$background" || status=$?
  background=""
  echo "== lint and types"
  cat "$logs/lint"
  if ((status)); then
    note "lint and types" "$(cat "$logs/lint.seconds")" "FAILED"
    exit 1
  fi
  note "lint and types (next to the wheel)" "$(cat "$logs/lint.seconds")" "$(last_line "$logs/lint")"
}

pythons="$(list_pythons)"
versions="$(cut -d ' ' -f 1 <<<"$pythons" | sort -u)"
oldest="$(find_python "$oldest_version" 2>/dev/null || find_python)"
if ! newest="$(find_python "$newest_version" 2>/dev/null)"; then
  if [[ $(wc -l <<<"$versions") -gt 1 ]]; then
    echo "== no Python $newest_version among:" $versions
    exit 1
  fi
  newest="$oldest"
  summary+=("Python $newest_version: NOT TESTED, since Python $versions is the only one on this machine")
fi
on_oldest="Python $(python_version "$oldest"), oldest versions"
on_newest="Python $(python_version "$newest"), newest versions"
