"""From a file of run.py: the table in docs/cpu.md (between its markers) and the plot of tokens/s against streams.

Usage: python benchmarks/cpu/table.py benchmarks/results/cpu-peers.json [--update docs/cpu.md] [--plot docs/img/cpu-streams.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
NAMES = {
    "hexad-http": "Hexad over HTTP",
    "hexad": "Hexad in process",
    "llama.cpp-http": "llama.cpp server",
    "llama-bench": "llama-bench",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
    "vllm": "vLLM CPU",
}
Metrics = dict[str, Any]


def figure(metrics: Metrics, peer: str, key: str) -> float | None:
    value: Any = metrics.get(peer, {})
    for part in key.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return value


# what is compared: title, our side, its key, the peers, smaller is better, must, goal
ROWS = (
    ("decode, 1 stream over HTTP, tok/s", "hexad-http", "decode_tok_s", ("llama.cpp-http",), False, "1.2x", "1.6x"),
    ("decode, 1 stream in process, tok/s", "hexad", "decode_tok_s", ("llama-bench",), False, "0.9x", "1.1x"),
    ("prefill of 1,024 tokens, tok/s", "hexad", "prefill_tok_s", ("openvino", "vllm"), False, "1.2x", "2.5x"),
    (
        "16 streams over HTTP, output tok/s",
        "hexad-http",
        "streams_tok_s/16",
        ("openvino", "llama.cpp-http", "vllm", "transformers"),
        False,
        "1.5x",
        "3x",
    ),
    ("TTFT of 512 tokens over HTTP, ms", "hexad-http", "ttft_512_ms", ("openvino", "llama.cpp-http", "vllm"), True, "0.8x", "0.4x"),
    ("process start to first token, s", "hexad-http", "first_token_s", ("llama.cpp-http",), True, "4 s", "2 s"),
    ("peak memory with 16 streams, MB (PSS)", "hexad-http", "peak_pss_mb", ("llama.cpp-http",), True, "1.0x", "0.6x"),
)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def comparison(metrics: Metrics) -> list[str]:
    lines = ["| figure | Hexad | best peer | ratio | must | goal |", "|---|---|---|---|---|---|"]
    for title, side, key, peers, smaller, must, goal in ROWS:
        ours = figure(metrics, side, key)
        known = [(value, peer) for peer in peers if (value := figure(metrics, peer, key)) is not None]
        if ours is None or not known:
            continue
        best, peer = min(known) if smaller else max(known)
        lines.append(f"| {title} | {number(ours)} | {number(best)} ({NAMES[peer]}) | {ours / best:.2f}x | {must} | {goal} |")
    return lines


def everything(metrics: Metrics) -> list[str]:
    streams = sorted({int(count) for one in metrics.values() for count in one.get("streams_tok_s", {})})
    heads = ["decode, 1 stream, tok/s", "prefill 1,024, tok/s", "TTFT 512, ms", "first token, s", "peak PSS, MB"]
    heads += [f"{count} streams, tok/s" for count in streams]
    keys = ["decode_tok_s", "prefill_tok_s", "ttft_512_ms", "first_token_s", "peak_pss_mb"] + [
        f"streams_tok_s/{count}" for count in streams
    ]
    lines = ["| | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 1)]
    for peer, title in NAMES.items():
        if peer in metrics:
            lines.append(f"| {title} | " + " | ".join(number(figure(metrics, peer, key)) for key in keys) + " |")
    return lines


def text(result: Metrics) -> str:
    """What stands between the markers."""
    metrics = result["metrics"]
    where = f"{result['device']['name']}, {result['load']['threads']} threads, medians of {result['load']['rounds']} rounds in one sitting"
    return "\n".join([BEGIN, f"{where} (`{result['command']}`):", "", *comparison(metrics), "", *everything(metrics), END])


def plot(metrics: Metrics, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shape, axes = plt.subplots(figsize=(7, 4.2), dpi=120)
    for peer, title in NAMES.items():
        points = {int(count): rate for count, rate in metrics.get(peer, {}).get("streams_tok_s", {}).items()}
        if points:
            counts = sorted(points)
            ours = peer.startswith("hexad")
            axes.plot(counts, [points[c] for c in counts], marker="o", label=title, linewidth=2.4 if ours else 1.4)
    axes.set_xscale("log", base=2)
    ticks = (1, 2, 4, 8, 16)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once (128 prompt and 128 output tokens each)")
    axes.set_ylabel("output tokens/s")
    axes.set_title("SmolLM2-135M-Instruct Q4_1 on two cores")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    shape.tight_layout()
    shape.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--update", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    result = json.loads(options.file.read_text())
    written = text(result)
    if options.update:
        before, _, rest = options.update.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        options.update.write_text(before + written + after)
    else:
        print(written)
    if options.plot:
        plot(result["metrics"], options.plot)


if __name__ == "__main__":
    main()
