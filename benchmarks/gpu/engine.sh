#!/usr/bin/env bash
# The engine on one card: parity tests, then the standard loads with dummy weights. Results go to the folder $1 as JSON.
# Usage: engine.sh OUT [quick|full]
set -u
out=$1 mode=${2:-quick}
model=${MODEL:-llama-3.1-8b}
run() { timeout "${LIMIT:-240}" python3 -m hexad bench "$@" --quiet 2>>"$out/engine.err"; }
common=(--model "$model" -o max_model_len=8448 -o max_num_batched_tokens=8192 -o device=cuda)

timeout 200 python3 -m pytest -q -x ${TESTS:-tests/gpu/test_engine_cuda.py} -p no:cacheprovider -o addopts= 2>&1 | tail -n 15 | tee "$out/engine-tests.txt"
if [ "$mode" = quick ]; then
  run latency "${common[@]}" --load W2 --load W3 --load W7 --json "$out/latency.json"
  run offline "${common[@]}" -o max_num_seqs=256 --load W4 --load W5 --json "$out/offline.json"
else
  run latency "${common[@]}" --load W2 --load W3 --load W7 --json "$out/latency.json"
  run offline "${common[@]}" -o max_num_seqs=256 --load W1 --load W4 --load W5 --json "$out/offline256.json"
  run offline "${common[@]}" -o max_num_seqs=512 --load W1 --json "$out/offline512.json"
fi
tail -n 30 "$out/engine.err"
python3 - "$out" <<'PY'
import glob, json, sys
for path in sorted(glob.glob(sys.argv[1] + "/*.json")):
    result = json.load(open(path))
    print(path.rsplit("/", 1)[-1], result.get("load"), json.dumps(result.get("metrics"))[:700])
PY
