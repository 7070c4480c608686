"""What sampling adds to a decode step: the same batch greedy, with each way to draw at random, with log-probabilities and with penalties.

    python benchmarks/gpu/sampled_steps.py FILE [--model llama-3.1-8b] [--batch 1 --batch 64 --batch 256] [-o device=cuda ...]

Packaged shapes run with dummy weights, whose logits lie close together: a nucleus is most of the vocabulary, the hardest case of top_p.
FILE gets one JSON object, `metrics.ms_per_step` by batch and by name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hexad.bench.ceilings import calibrated_now
from hexad.bench.faces import Prompt
from hexad.bench.facts import read_facts
from hexad.bench.inprocess import InProcess
from hexad.bench.loads import random_prompts
from hexad.bench.results import new_result
from hexad.bench.runs import step_time_s
from hexad.bench.shapes import is_shape, resolve_model

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 40": {"temperature": 0.8, "top_k": 40},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "presence penalty": {"temperature": 0.0, "presence_penalty": 0.5},
}


def step_ms(face: InProcess, sampling: dict[str, Any], prompts: Sequence[Prompt], output_tokens: int) -> float:
    face.sampling = sampling
    face.run(prompts, min(16, output_tokens))  # captures graphs, compiles
    return 1e3 * step_time_s(face.run(prompts, output_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--batch", action="append", type=int, default=[])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("-o", "--option", action="append", default=[], help="an engine option, name=value")
    args = parser.parse_args()
    options: dict[str, Any] = dict(option.split("=", 1) for option in args.option)
    batches = args.batch or [1, 64, 256]
    spec = read_facts(args.model)[0]
    result = new_result("sampled_steps", None, args.model, "bfloat16")
    if not options.get("device", "").startswith("fake"):
        result["calibration"] = calibrated_now(options.get("device", "cuda"), 0.3)
        result["device"] = {"name": result["calibration"]["device"]}
    shape = {"load_format": "dummy"} if is_shape(args.model) else {}
    defaults = {"max_num_seqs": max(batches), "max_model_len": args.input_len + args.output_len + 1}
    face = InProcess(resolve_model(args.model), shape | defaults | options)
    table: dict[str, dict[str, float]] = {}
    result["metrics"] = {"ms_per_step": table}
    for batch in batches:
        prompts = random_prompts(batch, args.input_len, spec.vocab_size, seed=batch)
        row = table[str(batch)] = {}
        for way, sampling in WAYS.items():
            row[way] = step_ms(face, sampling, prompts, args.output_len)
            result["partial"] = len(table) < len(batches) or len(row) < len(WAYS)
            args.file.write_text(json.dumps(result))
        print(f"{batch:4d} rows, ms a step: " + "  ".join(f"{way} {ms:.3f}" for way, ms in row.items()), flush=True)
    face.close()


if __name__ == "__main__":
    main()
