#!/usr/bin/env bash
# Runs Overdrive's GPU tests, parity cases and benches against the PyTorch 2.11 of this machine's python3, and writes
# results.json and report.html.
set -u

usage() {
  cat <<END
usage: run.sh [--out DIR] [--minutes N] [--only STAGES] [--quick]

  --out DIR     the folder for results.json and report.html (default: overdrive-results in the current folder)
  --minutes N   time limit for everything together (default: 20)
  --only STAGES only these stages and \`device\`, separated by commas: gpu-tests, calibration,
                compile, versus, compile-times, bench, parity
  --quick       fewer steps in the bench, no whole training

Needs bash, timeout (coreutils) and a python3 with torch 2.11 and the module lzma; OVERDRIVE_PYTHON names another
Python. The stages compile and compile-times need a C++ compiler too: g++, or the one that CXX
names.
Exits with 0 when every stage passed, or was skipped because every test of it needs a GPU.
END
}

fail() {
  echo "error: $*" >&2
  exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$PWD/overdrive-results
minutes=20
bench_options=()
stages=gpu-tests,calibration,compile,versus,compile-times,bench,parity
only=$stages
while [ $# -gt 0 ]; do
  case $1 in
    --out) [ $# -ge 2 ] || fail "--out needs a folder"; out=$2; shift 2 ;;
    --minutes) [ $# -ge 2 ] || fail "--minutes needs a number"; minutes=$2; shift 2 ;;
    --only) [ $# -ge 2 ] || fail "--only needs names of stages, separated by commas: $stages"; only=$2; shift 2 ;;
    --quick) bench_options+=(--quick); shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown option $1" ;;
  esac
done
case $minutes in '' | *[!0-9]* | 0) fail "--minutes takes a whole number from 1, not '$minutes'" ;; esac
only=${only// /}
[ -n "${only//,/}" ] || fail "--only needs names of stages, separated by commas: $stages"
for name in ${only//,/ }; do
  case ,$stages, in *,"$name",*) ;; *) fail "there is no stage $name; there are $stages" ;; esac
done
command -v timeout >/dev/null || fail "\`timeout\` is missing; install coreutils"

# These programs were linked for the libtorch that comes with python3's torch.
python=${OVERDRIVE_PYTHON:-python3}
found=$("$python" -c 'import torch; print(torch.__version__, torch.cuda.is_available(), torch.__path__[0])') ||
  fail "\`$python\` does not import torch; install torch 2.11.0, or set OVERDRIVE_PYTHON to a Python that has it"
read -r version python_cuda torch <<<"$(tail -n 1 <<<"$found")"
case $version in
  2.11.0 | 2.11.0+*) ;;
  *) fail "\`$python\` has torch $version, and these programs need 2.11.0" ;;
esac
[ -e "$torch/lib/libtorch_cuda.so" ] ||
  fail "\`$python\` has a CPU build of torch ($version); these programs need a CUDA build, even without a GPU"
export OVERDRIVE_PYTHON=$python
export PYTHONDONTWRITEBYTECODE=1
# Nothing here is to run on a fake GPU, also where the bundle was made.
export FAKECUDA=0
export LD_LIBRARY_PATH=$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

mkdir -p "$out" || fail "cannot make $out"
{ : >"$out/.part" && rm "$out/.part"; } 2>/dev/null || fail "cannot write to $out"
work=$(mktemp -d) || fail "cannot make a temporary folder"
trap 'rm -rf "$work"' EXIT
bin=$work/bin
mkdir "$bin"
unpack='import lzma, shutil, sys
with lzma.open(sys.argv[1]) as packed, open(sys.argv[2], "wb") as program: shutil.copyfileobj(packed, program)'
for packed in "$here"/bin/*.xz; do
  program=$bin/$(basename "$packed" .xz)
  "$python" -c "$unpack" "$packed" "$program" && chmod +x "$program" || fail "cannot unpack $packed to $bin"
done
# Programs look for data beside them.
ln -s "$here/data" "$bin/data" || fail "cannot make a link in $bin"
"$bin/overdrive-bench" --help >/dev/null ||
  fail "cannot run the programs in $bin; if no program may run there, set TMPDIR to another folder"
mkfifo "$work/pipe" || fail "cannot make a pipe in $work"
deadline=$(($(date +%s) + minutes * 60))

# Ends the stage that runs, and no other one begins.
stopped=
running=
trap 'stopped=1; [ -z "$running" ] || kill "$running" 2>/dev/null' INT TERM HUP

# stage NAME MOST_SECONDS COMMAND..: runs COMMAND within its own limit and the rest of the total time. It runs in the
# background, because bash runs no trap while it waits for a command in the foreground.
stage() {
  local name=$1 limit=$2 begun left code log
  shift 2
  case ,device,$only, in *,"$name",*) ;; *) return ;; esac
  begun=$(date +%s)
  left=$((deadline - begun))
  [ "$left" -lt "$limit" ] && limit=$left
  printf '\n== %s\n' "$name"
  if [ -n "$stopped" ]; then
    echo "not run: interrupted" | tee "$work/$name.log"
    code=-1
  elif [ "$limit" -lt 1 ]; then
    echo "not run: the time limit of $minutes minutes is over" | tee "$work/$name.log"
    code=-1
  else
    tee "$work/$name.log" <"$work/pipe" &
    log=$!
    timeout -k 10 "$limit" "$@" >"$work/pipe" 2>&1 </dev/null &
    running=$!
    wait "$running"
    code=$?
    # A signal ends this wait, and not yet the command.
    [ -z "$stopped" ] || { wait "$running"; code=143; }
    running=
    wait "$log"
  fi
  printf '%s\t%s\t%s\n' "$name" "$code" "$(($(date +%s) - begun))" >>"$work/stages.tsv"
  return "$((code != 0))"
}

# Collects the results so far, and exits with their verdict.
finish() {
  printf '\n'
  "$python" "$here/collect.py" "$work" "$out"
  exit
}

device() {
  local ours
  ours=$("$bin/overdrive-bench" --check-device) || return 1
  echo "python3 sees a GPU: $python_cuda; overdrive: $ours"
  if [ "$python_cuda" = True ] && ! grep -qiE 'cuda"?: *true' <<<"$ours"; then
    echo "error: python3 sees a GPU and these programs do not"
    return 1
  fi
}
export -f device
export bin python_cuda

echo "torch $version in $torch; everything within $minutes minutes"
stage device 120 bash -c device || finish
stage gpu-tests 300 "$bin/overdrive-gpu-tests" --skip calibration:: --skip compiled::steps_compiled
# In a process of its own, because it asks the device for what is refused. A failure says where the stand-in is wrong.
stage calibration 120 "$bin/overdrive-gpu-tests" calibration::
stage compile 600 "$bin/overdrive-gpu-tests" compiled::steps_compiled
# Without a GPU, the times on a processor.
[ "$python_cuda" = True ] && times=gpu-times || times=step
stage versus 300 "$bin/overdrive-versus" "$times" --json "$work/versus.json"
[ "$python_cuda" != True ] ||
  stage compile-times 600 "$bin/overdrive-versus" gpu-compile --json "$work/compile-times.json"
stage bench 900 "$bin/overdrive-bench" --data "$here/data/mnist" --json "$work/bench.json" \
  --report "$work/bench.html" ${bench_options[@]+"${bench_options[@]}"}
stage parity 420 "$bin/overdrive-parity" --cases "$here/parity/cases" --mnist "$here/data/mnist"
finish
