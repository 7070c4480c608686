#!/usr/bin/env bash
# The standard loads for the record, what the acceptance asks beside them, and the whole GPU test suite, on one card.
# Usage: record.sh OUT [loads] [inside] [disk] [tests] (from the repository's root; no part named: all of them)
# OUT gets results.tgz (one JSON a load), tests.txt and err.txt. Each part is at most: loads 240 s, inside 90 s, disk 150 s, tests 300 s.
set -u
out=$1; shift
parts=${*:-loads inside disk tests}
work=$(mktemp -d)
options=(-o max_model_len=8448 -o max_num_batched_tokens=8192 -o device=cuda)
limited() { timeout "${LIMIT:-150}" "$@" 2>>"$out/err.txt" | grep -v -E 'kv_footprint|weight_bytes|peak_mem|p9|p50|mean|repeats'; tar czf "$out/results.tgz" -C "$work" .; }
bench() { limited python3 -m hexad bench "$@" --quiet; }
wants() { [[ " $parts " == *" $1 "* ]]; }

if wants loads; then
  bench latency --model llama-3.1-8b "${options[@]}" --load W2 --load W3 --load W7 --json "$work/h200-llama-3.1-8b.json"
  bench offline --model llama-3.1-8b "${options[@]}" -o max_num_seqs=256 --load W4 --load W5 --load W1 --json "$work/h200-llama-3.1-8b-256.json"
  bench offline --model llama-3.1-8b "${options[@]}" -o max_num_seqs=512 --load W1 --json "$work/h200-llama-3.1-8b-512-W1.json"
  bench serve --model llama-3.1-8b "${options[@]}" --load W9 --concurrency 64 --requests 256 --spawn --json "$work/h200-llama-3.1-8b-W9.json"
  bench startup --model llama-3.1-8b "${options[@]}" --warm-runs 1 --json "$work/h200-llama-3.1-8b-W6.json"
  bench latency --model llama-3.2-1b "${options[@]}" --load W2 --json "$work/h200-llama-3.2-1b-W2.json"
fi
if wants inside; then # idle time between decode steps; each operator beside its bound
  bench profile --model llama-3.1-8b "${options[@]}" -o max_num_seqs=256 --trace --batch 256 --steps 32 \
    --trace-file "$work/h200-llama-3.1-8b-trace.json.gz" --json "$work/h200-llama-3.1-8b-trace.json"
  bench profile --model llama-3.1-8b "${options[@]}" --batch 1 --batch 64 --batch 256 --steps 16 --json "$work/h200-llama-3.1-8b-profile.json"
  bench kernels --model llama-3.1-8b --device cuda --batch 1 --batch 64 --context 2048 --seconds 0.05 --json "$work/h200-llama-3.1-8b-kernels.json"
fi
if wants disk; then # 16 GB of safetensors on this machine's disk
  limited python3 benchmarks/gpu/disk_load.py "${DISK:-/tmp/hexad-disk}" "${options[@]}" --json "$work/h200-llama-3.1-8b-disk.json"
fi
if wants tests; then
  shards=${SHARDS:-14}
  run_tests() { # name of the log, what to run; more environment before it
    for shard in $(seq 0 $((shards - 1))); do
      HEXAD_TEST_SHARD="$shard/$shards" timeout "${TEST_TIMEOUT:-150}" python3 -m pytest -q -rfEs "${@:2}" -p no:cacheprovider -o addopts= >"$work/$1-$shard.log" 2>&1 &
    done
    wait
    { echo "$1"; grep -h -E '^(FAILED|ERROR|SKIPPED)|passed|failed' "$work/$1"-*.log | sort; } | tee -a "$out/tests.txt"
  }
  run_tests card tests/gpu # HEXAD_TEST_SMOLLM2 names the folder with the parts of SmolLM2's file
  HEXAD_TRITON_ARCH=80 run_tests sm80 tests/gpu/test_*_parity.py # the code of Ampere cards, on this one
fi
tail -n 8 "$out/err.txt"
