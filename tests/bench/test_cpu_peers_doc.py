"""docs/cpu.md shows the figures of the saved comparison, and the comparison has what its table needs."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "cpu-peers.json"


def table_module():
    spec = importlib.util.spec_from_file_location("cpu_peers_table", ROOT / "benchmarks" / "cpu" / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_file():
    result = json.loads(FILE.read_text())
    assert table_module().text(result) in (ROOT / "docs" / "cpu.md").read_text()
    assert result["partial"] is False and {"hexad-http", "hexad", "llama.cpp-http", "llama-bench", "openvino"} <= set(result["metrics"])


def test_ratios_and_best_peers():
    table = table_module()
    metrics = {
        "hexad-http": {"decode_tok_s": 120.0, "streams_tok_s": {"16": 600.0}, "ttft_512_ms": 80.0},
        "llama.cpp-http": {"decode_tok_s": 100.0, "streams_tok_s": {"16": 200.0}, "ttft_512_ms": 300.0},
        "openvino": {"streams_tok_s": {"16": 300.0}, "ttft_512_ms": 160.0},
    }
    lines = table.comparison(metrics)
    assert "| decode, 1 stream over HTTP, tok/s | 120 | 100 (llama.cpp server) | 1.20x | 1.2x | 1.6x |" in lines
    assert "| 16 streams over HTTP, output tok/s | 600 | 300 (OpenVINO GenAI) | 2.00x | 1.5x | 3x |" in lines
    assert "| TTFT of 512 tokens over HTTP, ms | 80.0 | 160 (OpenVINO GenAI) | 0.50x | 0.8x | 0.4x |" in lines
    assert len(lines) == 5  # what was not measured is left out
