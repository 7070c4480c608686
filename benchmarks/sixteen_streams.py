"""Sixteen streams of SmolLM2 on this CPU: Hexad beside `transformers`' batched generate, in turns in one sitting; and a shared-prefix load.

Usage: python benchmarks/sixteen_streams.py --json FILE [--rounds 3] [--threads 2].

Greedy, 128 prompt and 128 output tokens, end of sequence ignored, both in bfloat16 with the same weights. The shared-prefix load sends 32
requests of 32 own tokens after 512 common ones, cold and again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch

from hexad import LLM, SamplingParams
from hexad.bench.results import new_result, save
from hexad.common.config import DEFAULT_MODEL
from hexad.hardware.machine import read_machine
from hexad.models.sources import fetch

STREAMS, INPUT, OUTPUT, VOCABULARY = 16, 128, 128, 49_152
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


def load_reference(path: Path) -> torch.nn.Module:
    """transformers' network with the weights that transformers reads from the GGUF file, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = path if path.is_file() else next(path.glob("*.gguf"))
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    return model.to(torch.bfloat16)


def prompts(count: int, length: int, turn: int, shared: list[int] | None = None) -> list[list[int]]:
    make = random.Random(turn)
    return [[*(shared or []), *(make.randrange(1_000, VOCABULARY) for _ in range(length))] for _ in range(count)]


def time_transformers(model: torch.nn.Module, batch: list[list[int]]) -> float:
    ids = torch.tensor(batch)
    started = time.perf_counter()
    with torch.no_grad():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
    return time.perf_counter() - started


def time_hexad(llm: LLM, batch: list[list[int]], params: SamplingParams = GREEDY) -> tuple[float, list[float], int]:
    """(seconds, TTFT of each request in seconds, cached prompt tokens)."""
    before = llm.stats()["prefix_hits_total"]
    started = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
    took_s = time.perf_counter() - started
    return took_s, [result.metrics.ttft_s for result in results], int(llm.stats()["prefix_hits_total"] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reference = load_reference(fetch(DEFAULT_MODEL).path)
    ours, theirs = [], []
    with LLM(DEFAULT_MODEL, dtype="bfloat16", threads=options.threads) as llm:
        time_hexad(llm, prompts(STREAMS, 16, 999), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        for turn in range(options.rounds):
            ours.append(STREAMS * OUTPUT / time_hexad(llm, prompts(STREAMS, INPUT, turn))[0])
            theirs.append(STREAMS * OUTPUT / time_transformers(reference, prompts(STREAMS, INPUT, turn)))
            print(f"round {turn + 1}: Hexad {ours[-1]:.0f}, transformers {theirs[-1]:.0f} output tokens/s", flush=True)
        short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        shared = prompts(1, 512, 77)[0]
        runs = {name: time_hexad(llm, prompts(32, 32, 1_000 + i, shared), short) for i, name in enumerate(("cold", "cached"))}
    result = new_result("sixteen_streams", None, "SmolLM2-135M-Instruct", "gguf q4_1")
    result["device"] = {"name": read_machine().processor.name, "threads": options.threads}
    result["metrics"] = {
        "output_tok_s": {"hexad": statistics.median(ours), "transformers": statistics.median(theirs)},
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "rounds": {"hexad": ours, "transformers": theirs},
        "shared_prefix_ttft_ms": {name: statistics.median(run[1]) * 1e3 for name, run in runs.items()},
        "shared_prefix_hit_rate": {name: run[2] / (32 * 544) for name, run in runs.items()},
    }
    result["partial"] = False
    save(result, options.json)
    print(result["metrics"])


if __name__ == "__main__":
    main()
