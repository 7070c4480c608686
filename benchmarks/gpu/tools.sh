#!/usr/bin/env bash
# The measuring tools themselves on one card, two minutes: doctor, plan, kernels, profile. Results go to the folder $1.
set -u
out=$1 model=${MODEL:-llama-3.1-8b}
hexad() { timeout "${LIMIT:-120}" python3 -m hexad "$@"; }
hexad doctor --measure --seconds 0.5 --json >"$out/doctor.json"; tail -c 900 "$out/doctor.json"
hexad plan "$model" --device here --context 2048 | head -20
hexad bench kernels --model "$model" --batch 1 --batch 64 --context 2048 --seconds 0.05 --quiet --json "$out/kernels.json" | cut -c1-150
hexad bench profile --model "$model" --batch 1 --batch 64 --steps 16 -o max_model_len=2048 --quiet --json "$out/profile.json" | cut -c1-150
