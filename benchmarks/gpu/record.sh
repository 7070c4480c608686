#!/usr/bin/env bash
# The standard loads for the record, then the whole GPU test suite, on one card. Usage: record.sh OUT (from the repository's root)
# OUT gets results.tgz (one JSON a load), tests.txt and err.txt.
set -u
out=$1
work=$(mktemp -d)
options=(-o max_model_len=8448 -o max_num_batched_tokens=8192 -o device=cuda)
bench() { timeout 150 python3 -m hexad bench "$@" --quiet 2>>"$out/err.txt" | grep -v -E 'kv_footprint|weight_bytes|peak_mem|p9|p50|mean|repeats'; tar czf "$out/results.tgz" -C "$work" .; }

bench latency --model llama-3.1-8b "${options[@]}" --load W2 --load W3 --load W7 --json "$work/h200-llama-3.1-8b.json"
bench offline --model llama-3.1-8b "${options[@]}" -o max_num_seqs=256 --load W4 --load W5 --load W1 --json "$work/h200-llama-3.1-8b-256.json"
bench offline --model llama-3.1-8b "${options[@]}" -o max_num_seqs=512 --load W1 --json "$work/h200-llama-3.1-8b-512-W1.json"
bench serve --model llama-3.1-8b "${options[@]}" --load W9 --concurrency 64 --requests 256 --spawn --json "$work/h200-llama-3.1-8b-W9.json"
bench startup --model llama-3.1-8b "${options[@]}" --warm-runs 1 --json "$work/h200-llama-3.1-8b-W6.json"
bench latency --model llama-3.2-1b "${options[@]}" --load W2 --json "$work/h200-llama-3.2-1b-W2.json"

shards=${SHARDS:-14}
for shard in $(seq 0 $((shards - 1))); do
  HEXAD_TEST_SHARD="$shard/$shards" timeout "${TEST_TIMEOUT:-100}" python3 -m pytest -q tests/gpu -p no:cacheprovider -o addopts= >"$work/tests-$shard.log" 2>&1 &
done
wait
grep -h -E '^(FAILED|ERROR)|passed|failed' "$work"/tests-*.log | sort >"$out/tests.txt"
cat "$out/tests.txt"
tail -n 8 "$out/err.txt"
