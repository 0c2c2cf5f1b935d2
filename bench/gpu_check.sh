#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in under nine minutes and without a network: build, tests on cuda and triton,
# compute-sanitizer, benchmarks. Each stage has its own time limit, writes its own log, and does not stop the next.
#
#   OUT=folder     where the logs go; default: gpu_check_output
#   PYTHON=python  one with torch, Triton, numpy, pybind11, ninja, setuptools, pytest and hypothesis
#   STAGES=names   those that run; default: all
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-gpu_check_output}
mkdir -p "$out"
out=$(cd "$out" && pwd)
summary=$out/summary.txt
: >"$summary"
cd "$root" || exit 1

export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export TRITON_INTERPRET=0                     # tests choose the interpreter unless told otherwise
export HPO_CORE_CUDA=1 HPO_CORE_CUDA_ARCHS=${HPO_CORE_CUDA_ARCHS:-90}
export HPO_CORE_EMULATED=0
failed=0

# stage NAME SECONDS COMMAND...: runs it under a limit and notes how it ended. An interrupted pytest still reports.
stage() {
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  case " ${STAGES:-$name} " in *" $name "*) ;; *) return ;; esac
  timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  local verdict="failed ($status)"
  [ $status -eq 0 ] && verdict=ok
  [ $status -eq 124 ] || [ $status -eq 137 ] && verdict="ran out of its ${limit} s"
  [ $status -eq 0 ] || failed=1
  {
    echo "== $name: $verdict, $((SECONDS - begin)) s"
    tail -n "${LINES_KEPT:-6}" "$out/$name.log"
  } | tee -a "$summary"
}

# One log for small commands, so that few files have to be carried away.
stage build 70 bash -c '
  nvidia-smi; nvcc --version | tail -n 2; "$0" --version
  "$0" -m pip install --no-index --no-build-isolation --no-deps -e . && cd / && "$0" -m hpo_core' "$python"

options=(-q --of-kernels --tb=short --maxfail=100 -m "not long" -k "on_gpu or not compile")
"$python" -c 'import xdist' 2>/dev/null && options+=(-n "$(nproc)")
"$python" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout=60)
# The tests of operators: `make test` is for those that run no kernel.
tests=$("$python" -c 'import sys; sys.path.append("tests"); from changed import OPERATORS
print(*(f"tests/test_{name}.py" for name in dict.fromkeys(OPERATORS)))')
for backend in cuda triton; do
  # Launches wait for their kernel, so that an error is that of the test that has made it.
  stage "tests_$backend" 100 env HPO_CORE_TEST_BACKENDS=$backend PYTHONSAFEPATH=1 CUDA_LAUNCH_BLOCKING=1 OMP_NUM_THREADS=2 \
    "$python" -m pytest $tests "${options[@]}"
  stage "agreement_$backend" 20 "$python" bench/gpu_check.py exercise $backend --size large
done

# Without torch's cache every tensor is an allocation of its own, whose end the sanitizer knows.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 stage sanitizer 70 bash -c 'status=0
  for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool --error-exitcode 9 "$0" bench/gpu_check.py exercise cuda || status=$?
  done
  exit $status' "$python"

# One process for each, so that a kernel that breaks the CUDA context costs only its own backend.
for backend in cuda triton peers; do
  LINES_KEPT=200 stage "bench_$backend" 50 "$python" bench/gpu_check.py bench $backend --out "$out/bench.jsonl"
done

echo "== finished after $SECONDS s; logs in $out" | tee -a "$summary"
exit $failed
