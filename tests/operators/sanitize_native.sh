#!/bin/sh
# The native operators' tests against a library built with AddressSanitizer and UBSan, then the pool's with ThreadSanitizer.
# Usage: tests/operators/sanitize_native.sh [python]   (minutes; needs GCC's sanitizer libraries)
set -eu
python=${1:-.venv/bin/python}
library=$("$python" -m hexad.operators.native.build --sanitize)
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
    OMP_NUM_THREADS=1 HEXAD_NATIVE_LIBRARY="$library" \
    "$python" -m pytest -x -p no:cacheprovider tests/operators/test_native_linear.py tests/operators/test_native_stack.py
library=$("$python" -m hexad.operators.native.build --threads)
LD_PRELOAD="$(gcc -print-file-name=libtsan.so)" TSAN_OPTIONS="halt_on_error=1 exitcode=66" \
    OMP_NUM_THREADS=1 HEXAD_NATIVE_LIBRARY="$library" \
    "$python" -m pytest -x -p no:cacheprovider tests/operators/test_native_linear.py -k "threads or rows"
