"""Attention of FlashAttention 4 and FlashInfer beside the own kernels and torch's, at every kind of step, with the shapes of one model.

    python benchmarks/gpu/library_attention.py FILE [--model llama-3.1-8b] [--seconds 0.05] [--only flash_attn ...] [--device cuda]

Each library that is installed is checked against torch's reference at every shape, then timed by replays of a graph over pages that no
cache holds. FlashInfer's plan, which its caller makes once a step, is timed by itself (`plan_us`, host included). FILE gets one JSON
object; the screen a line a shape. With --device cpu only the reference runs, which tries out the script.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hexad.bench.ceilings import calibrated_now
from hexad.bench.facts import read_facts
from hexad.bench.kernel_cases import attention_case
from hexad.bench.kernels import time_calls
from hexad.bench.results import new_result
from hexad.operators.libraries.provider import LIBRARIES, installed
from hexad.operators.load import load_operators

PROMPTS = [(1, 512, 512), (16, 512, 512), (1, 1024, 1024), (8, 1024, 1024), (1, 2048, 2048), (4, 2048, 2048), (1, 8192, 8192)]
BEHIND = [(64, 128, 2176), (16, 512, 2560), (1, 2048, 8192), (1, 8192, 16384)]  # rows, new tokens, keys
DECODES = [(rows, 1, context) for rows in (1, 8, 64, 256) for context in (512, 2048, 8192) if rows * context <= 256 * 2048]
CACHE_BYTES, MOST_COPIES = 280 << 20, 32
TOLERANCE = 0.02  # of bfloat16 outputs near 1


def kernels(args: Any, only: list[str]) -> dict[str, Any]:
    registry = load_operators()
    found = {"torch": registry.reference("paged_attention", args)}
    if args.device_type == "cuda":
        found["triton"] = registry.bind("paged_attention", args, {"paged_attention": "triton"}).call
        for name in filter(installed, only or LIBRARIES):
            found[name] = importlib.import_module(f"hexad.operators.libraries.{name}").bind(args)
    return found


def measure(spec: Any, shape: tuple[int, int, int], device: torch.device, seconds: float, only: list[str]) -> dict[str, Any]:
    rows, queries, context = shape
    case = attention_case(spec, rows, queries, context, torch.bfloat16, device)
    copies = [case.inputs() for _ in range(max(1, min(MOST_COPIES, int(CACHE_BYTES // case.nbytes) + 1)))]
    found, row = kernels(case.args, only), {"rows": rows, "queries": queries, "keys": context, "us": {}, "error": {}, "first_s": {}}
    wanted = found["torch"](*copies[0]).float()
    for name, kernel in found.items():
        started = time.perf_counter()
        try:
            got = kernel(*copies[0]).float()
        except Exception as error:  # a library refuses in its own ways; the others go on
            row["error"][name] = f"{type(error).__name__}: {error}"[:300]
            continue
        row["first_s"][name] = round(time.perf_counter() - started, 2)
        row["error"][name] = float((got - wanted).abs().max())
        if not row["error"][name] <= TOLERANCE:
            continue
        row["us"][name] = 1e6 * time_calls([lambda one=one, kernel=kernel: kernel(*one) for one in copies], device, seconds)
        if name == "flashinfer":
            row["plan_us"] = plan_us(kernel, copies[0]) - row["us"][name]
    row["tflop_s"] = {name: case.flops / us / 1e6 for name, us in row["us"].items()}
    row["gb_s"] = {name: case.nbytes / us / 1e3 for name, us in row["us"].items()}
    return row


def plan_us(kernel: Any, inputs: tuple[Any, ...]) -> float:
    """One step of one layer with its plan, from call to result."""
    q, kv, batch = inputs
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        kernel(q, kv, replace(batch, scratch={}))
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--only", action="append", default=[], choices=list(LIBRARIES))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device, spec = torch.device(args.device), read_facts(args.model)[0]
    result = new_result("library_attention", None, args.model, "bfloat16")
    result["calibration"] = calibrated_now(args.device, 1.0)
    result["device"] = {"name": result["calibration"]["device"]}
    result["metrics"] = {"shapes": []}
    shapes = [(1, 64, 64), (2, 1, 64)] if device.type == "cpu" else PROMPTS + BEHIND + DECODES
    with torch.inference_mode():
        for shape in shapes:
            row = measure(spec, shape, device, args.seconds, args.only)
            result["metrics"]["shapes"].append(row)
            times = "  ".join(f"{name} {us:8.1f}" for name, us in row["us"].items())
            failed = {name: error for name, error in row["error"].items() if name not in row["us"]}
            plan = f"  plan {row['plan_us']:.0f}" if "plan_us" in row else ""
            print(f"{shape[0]:4d} x {shape[1]:5d} of {shape[2]:6d} keys, us: {times}{plan} {failed or ''}", flush=True)
            result["partial"] = len(result["metrics"]["shapes"]) < len(shapes)
            args.file.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
