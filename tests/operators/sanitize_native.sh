#!/bin/sh
# The native operators' tests, fuzzers among them, against a library built with AddressSanitizer and UBSan, then those with threads against
# one built with ThreadSanitizer. Usage: tests/operators/sanitize_native.sh [python]   (minutes; needs GCC's sanitizer libraries)
# HEXAD_FUZZ_ROUNDS (40): random cases of each fuzzer for an instruction set.
set -eu
python=${1:-.venv/bin/python}
export OMP_NUM_THREADS=1 HEXAD_FUZZ_ROUNDS="${HEXAD_FUZZ_ROUNDS:-40}"
tests=tests/operators/test_native
run() {  # standard error stays open for what a sanitizer says
    "$python" -m pytest -x -p no:cacheprovider --capture=sys "$@"
}

library=$("$python" -m hexad.operators.native.build --sanitize)
echo "AddressSanitizer and UBSan"
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
    HEXAD_NATIVE_LIBRARY="$library" run ${tests}_linear.py ${tests}_stack.py ${tests}_kv_int8.py ${tests}_draw.py ${tests}_fuzz.py

library=$("$python" -m hexad.operators.native.build --threads)
echo "ThreadSanitizer"
run ${tests}_pool.py
LD_PRELOAD="$(gcc -print-file-name=libtsan.so)" TSAN_OPTIONS="halt_on_error=1 exitcode=66" HEXAD_FUZZ_ROUNDS=3 \
    HEXAD_NATIVE_LIBRARY="$library" run ${tests}_linear.py ${tests}_stack.py ${tests}_draw.py ${tests}_fuzz.py -k "threads or formats or stale or memory"
