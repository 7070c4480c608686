"""Check, then time, the GPU kernels: `python benchmarks/gpu/kernels.py --out DIR [--sections linear,decode,...]`.

Every variant is compiled and checked against a float32 reference by parallel worker processes first (they fill Triton's cache); what
fails its check is not timed. Results go to DIR/kernels.jsonl, one line a variant, and the best per problem to the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import decode_step
import jobs_attention
import jobs_linear
import jobs_rows
import torch
from timing import Job, calibrate, graph_us, median_us

SHOWN = ("gb_s", "tflop_s", "floor_us", "share", "eager_us", "launcher_us", "triton_us", "torch_add_us")
STEPS = ((1, 256), (2, 256), (4, 256), (8, 194), (16, 256), (32, 256), (64, 384), (256, 194))  # rows, context
MODELS = list(jobs_linear.SHAPES)


def all_jobs(sections: list[str], models: list[str], buckets: list[int]) -> list[Job]:
    made: list[Job] = []
    if "linear" in sections:
        made += jobs_linear.jobs(models, buckets)
    if "decode" in sections:
        made += jobs_attention.decode_jobs()
    if "prefill" in sections:
        made += jobs_attention.prefill_jobs()
    if "rows" in sections:
        made += jobs_rows.jobs()
    return made


def prepare(jobs: list[Job], shard: int, shards: int, path: Path) -> None:
    """Compile and check this worker's share; errors go to a file."""
    with path.open("w") as file:
        for job in jobs[shard::shards]:
            try:
                calls, check = job.make(1)
                calls[0]()
                error = check()
                torch.cuda.synchronize()
            except Exception as failure:
                error = float("inf")
                print("FAILED", job.name, type(failure).__name__, str(failure)[:300], flush=True)
                if "CUDA error" in str(failure):
                    raise
            file.write(json.dumps({"name": job.name, "error": error}) + "\n")
            file.flush()
            torch.cuda.empty_cache()


def check_all(arguments: list[str], shards: int, out: Path) -> dict[str, float]:
    """Run the workers; name -> error."""
    workers = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--shard", str(shard), "--shards", str(shards)]) for shard in range(shards)
    ]
    deadline = time.time() + 150
    for worker in workers:
        try:
            worker.wait(max(1.0, deadline - time.time()))
        except subprocess.TimeoutExpired:  # a kernel that never ends
            print("a worker did not finish", flush=True)
            worker.kill()
            worker.wait()
    errors: dict[str, float] = {}
    for shard in range(shards):
        for line in (out / f"check-{shard}.jsonl").read_text().splitlines():
            row = json.loads(line)
            errors[row["name"]] = row["error"]
        (out / f"check-{shard}.jsonl").unlink()
    return errors


def time_job(job: Job) -> dict:
    calls, _ = job.make(job.copies if job.section != "prefill" else 1)
    us = graph_us(calls, 20 if job.section != "prefill" else 4)
    row = {"section": job.section, "name": job.name, "us": us, **job.labels}
    if job.bytes_moved:
        row["gb_s"] = job.bytes_moved / us / 1e3
    if job.flops and job.section == "prefill":
        row["tflop_s"] = job.flops / us / 1e6
    del calls
    return row


def host_launch_us() -> dict:
    """Host time of one eager launch through the launcher and through Triton's own call."""
    from hexad.operators.args import NormArgs
    from hexad.operators.triton.rows import bind_rms_norm, rms_norm_kernel

    x, weight = torch.randn(1, 4096, device="cuda").bfloat16(), torch.randn(4096, device="cuda").bfloat16()
    norm = bind_rms_norm(NormArgs(4096, 1e-5, torch.bfloat16, "cuda"))
    out = torch.empty_like(x)
    plain = lambda: rms_norm_kernel[(1,)](x, x, weight, out, 4096, 4096, 4096, 1e-5, False, True, False, num_warps=8)  # noqa: E731
    result = {"section": "host", "name": "launch", "us": 0.0}
    for label, call in (("launcher", lambda: norm(x, weight)), ("triton", plain), ("torch_add", lambda: out.add_(1))):
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(300):
            call()
        result[label + "_us"] = (time.perf_counter() - begin) / 300 * 1e6
        torch.cuda.synchronize()
    return result


def best(rows: list[dict]) -> None:
    """Screen: the best three of each linear problem, everything else in full."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["section"] == "linear":
            groups.setdefault((row["op"], row["out"], row["in"], row["rows"]), []).append(row)
        else:
            extra = " ".join(f"{k} {row[k]:.3g}" for k in SHOWN if k in row)
            print(f"{row['section']:8} {row['name']:70} {row['us']:9.2f} us {extra} err {row.get('error', 0):.1e}")
    for key, group in groups.items():
        group.sort(key=lambda row: row["us"])
        library = next((f"{row['us']:.2f}" for row in group if row["choice"][0] == "library"), "-")
        tops = "; ".join(f"{row['us']:.2f} us {row['gb_s']:.0f} {','.join(map(str, row['choice']))}" for row in group[:3])
        print(f"{key}: library {library}; {tops}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", default="linear,decode,prefill,rows,step,host")
    parser.add_argument("--models", default=MODELS[0])
    parser.add_argument("--buckets", default="1,8,16,32,64")
    parser.add_argument("--batches", default="1,8,16,32,64,256", help="of the whole steps that are timed, and tuned in section linear")
    parser.add_argument("--isolated", action="store_true", help="also time each product alone")
    parser.add_argument("--shards", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--shard", type=int)
    options = parser.parse_args()
    sections, models = options.sections.split(","), options.models.split(",")
    jobs = all_jobs(sections, models, [int(b) for b in options.buckets.split(",")])
    options.out.mkdir(parents=True, exist_ok=True)
    if options.shard is not None:
        prepare(jobs, options.shard, options.shards, options.out / f"check-{options.shard}.jsonl")
        return
    begin = time.time()
    errors = check_all(sys.argv[1:], options.shards, options.out) if jobs else {}
    print(f"{len(jobs)} variants compiled and checked in {time.time() - begin:.0f} s", flush=True)
    calibration = calibrate()
    print(calibration, flush=True)
    rows = []
    with (options.out / "kernels.jsonl").open("w") as file:
        file.write(json.dumps({"calibration": calibration, "device": torch.cuda.get_device_name(), "torch": torch.__version__}) + "\n")

        def keep(row: dict) -> None:
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()

        for job in jobs:
            error = errors.get(job.name, float("inf"))
            if error > job.tolerance:
                print("WRONG", job.name, error, flush=True)
                continue
            if job.section != "linear" or options.isolated:  # products are timed inside a whole step
                keep(time_job(job) | {"error": error})
        if "host" in sections:
            keep(host_launch_us())
        if "step" in sections:
            table: dict[str, dict[str, list]] = {}
            for model in models:
                for batch, context in STEPS:
                    if str(batch) not in options.batches.split(","):
                        continue
                    found = table if "linear" in sections else None
                    row = decode_step.measure(model, batch, context, calibration["read_gb_s"], calibration["bf16_tflop_s"], found)
                    keep(row)
                    print(row["name"], f"{row['us']:.0f} us, busy {row['busy_us']:.0f}:", row["kernels"], flush=True)
                    torch.cuda.empty_cache()
            (options.out / "tuning.json").write_text(json.dumps({torch.cuda.get_device_name(): table}, indent=1))
        keep({"section": "host", "name": "wall", "us": (time.time() - begin) * 1e6, "again": median_us(lambda: None)})
    best(rows)


if __name__ == "__main__":
    main()
