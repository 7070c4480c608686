"""Real files from a real disk: write a safetensors folder of a packaged shape with random weights, then `hexad bench startup` on it.

Usage: disk_load.py FOLDER [--model llama-3.1-8b] [--json FILE] [startup options]. The folder is written once, checked against free space
first, and removed at the end unless --keep. The result holds the disk's own read rate (the same files, read once in sequence and not from
memory), the rate of the engine's loading in the first start (files not in memory), and their ratio, `load_share_of_disk`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from hexad.bench.facts import locate, read_facts
from hexad.models.formats.dummy import expected_shapes

SHARD_BYTES = 4_900_000_000  # as hubs cut their files
SPARE_BYTES = 2 * 2**30  # of the disk, left free
CHUNK = 2**26  # 16-bit numbers written at once


def shards(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, cut into files."""
    made: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        count = 2 * math.prod(shape)
        if size and size + count > SHARD_BYTES:
            made.append({})
            size = 0
        made[-1][name] = shape
        size += count
    return made


def header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The head of a safetensors file of bfloat16 tensors: its length, then JSON, padded to 8 bytes."""
    table, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def random_bf16(count: int) -> np.ndarray:
    """Random numbers of about 0.02, as bits of bfloat16."""
    values = np.random.default_rng().normal(0, 0.02, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write(model: str, folder: Path) -> int:
    """The folder's weights in bytes.

    Raises:
        SystemExit: the disk is too small.
    """
    spec, _ = read_facts(model)
    parts = shards(expected_shapes(spec))
    total = sum(2 * math.prod(shape) for part in parts for shape in part.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < total + SPARE_BYTES:
        raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free; {model} takes {total / 1e9:.1f} GB and {SPARE_BYTES / 1e9:.1f} to spare")
    shutil.copy(locate(model) / "config.json", folder)
    numbers, places = random_bf16(CHUNK), {}
    for index, part in enumerate(parts):
        name = f"model-{index + 1:05}-of-{len(parts):05}.safetensors"
        with (folder / name).open("wb", buffering=0) as file:
            file.write(header(part))
            for tensor, shape in part.items():
                left = math.prod(shape)
                while left:
                    left -= file.write(numbers[:left].data) // 2
                places[tensor] = name
            os.fsync(file.fileno())  # only what is on the disk can be dropped from memory
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b", help="a packaged shape")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="leave the folder")
    options, more = parser.parse_known_args()
    begin = time.time()
    try:
        total = write(options.model, options.folder)
        seconds = time.time() - begin
        print(f"wrote {total / 1e9:.1f} GB in {seconds:.1f} s ({total / seconds / 1e9:.2f} GB/s)", flush=True)
        command = [sys.executable, "-m", "hexad", "bench", "startup", "--model", str(options.folder), "--warm-runs", "1", "--quiet", *more]
        done = subprocess.run(command + (["--json", str(options.json)] if options.json else []))
    finally:
        if not options.keep:
            shutil.rmtree(options.folder, ignore_errors=True)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
