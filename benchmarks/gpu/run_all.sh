#!/usr/bin/env bash
# Kernel parity tests in parallel processes, then the kernel benchmark. Usage: run_all.sh OUT_DIR [kernels.py options]
set -u
out=$1; shift
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1
shards=${SHARDS:-14}
run_tests() { # name, environment...
  local name=$1; shift
  for i in $(seq 0 $((shards - 1))); do
    env "$@" HEXAD_TEST_SHARD=$i/$shards timeout "${TEST_TIMEOUT:-200}" python3 -m pytest -q -o addopts= -p no:cacheprovider tests/gpu/test_*_parity.py \
      >"$out/tests-$name-$i.log" 2>&1 &
  done
  wait
  grep -hE "^(FAILED|ERROR)|passed|failed" "$out"/tests-"$name"-*.log >"$out/tests-$name.txt"
  grep -h -A25 "^E  " "$out"/tests-"$name"-*.log | head -80 >>"$out/tests-$name.txt"
  rm -f "$out"/tests-"$name"-*.log
  awk '{for (i = 1; i < NF; i++) {if ($(i+1) ~ /^passed/) p += $i; if ($(i+1) ~ /^failed/) f += $i}} END {print "tests passed", p + 0, "failed", f + 0}' "$out/tests-$name.txt"
  grep -hE "^(FAILED|ERROR)" "$out/tests-$name.txt" | cut -c1-200 | head -12
}
if [ "${TESTS:-1}" = 1 ]; then run_tests card A=1; fi
if [ "${TESTS_OLD:-0}" = 1 ]; then run_tests sm80 HEXAD_TRITON_ARCH=80; fi
python3 benchmarks/gpu/kernels.py --out "$out" "$@"
