"""The other commands: lazy, honest about where values come from, and talking to servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import ServerProcess

from hexad.cli.flags import HELP
from hexad.cli.main import COMMANDS
from hexad.cli.settings import field_types, flag_name, load_settings, read_env
from hexad.cli.sizes import parse_size, show_bytes
from hexad.common.errors import ConfigError


def hexad(*arguments: str, stdin: str = "", env: dict[str, str] | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hexad", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    check = (
        "import sys\nfrom hexad.cli.main import main\nsys.argv = ['hexad', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'zmq', 'numpy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    best_s = 9.0
    for _ in range(3):
        start_s = time.monotonic()
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
        best_s = min(best_s, time.monotonic() - start_s)
        assert done.returncode == 0, done.stderr
    for name in ("serve", "chat", "run", "pull", "models", "config", "version"):
        assert name in done.stdout
    assert best_s < 3.0, best_s


@pytest.mark.parametrize("name", ["serve", "chat", "run", "pull", "models", "config", "version"])
def test_each_command_has_help_and_loads_no_torch(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hexad", name, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: hexad {name}")
    assert "hexad.cli" in done.stderr
    assert not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE)


def test_every_key_has_a_flag_with_help() -> None:
    assert set(HELP) == set(field_types()), "describe the new keys in cli/flags.py"
    names = [flag_name(key) for key in field_types()]
    assert len(set(names)) == len(names)
    text = hexad("serve", "--help").stdout
    for name in names:
        assert name in text


def test_commands_that_are_listed_exist() -> None:
    assert {"serve", "chat", "run", "pull", "models", "config", "version"} <= set(COMMANDS)
    hexad("no-such-command", code=2)


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    for name, text in (
        ("a.yaml", "server:\n  port: 1\n  host: h1\nmodel:\n  seed: 5\nmax-num-seqs: 3\n"),
        ("a.toml", 'max-num-seqs = 3\n[server]\nport = 1\nhost = "h1"\n[model]\nseed = 5\n'),
    ):
        file = tmp_path / name
        file.write_text(text)
        env = {"HEXAD_SERVER__PORT": "2", "HEXAD_SERVER__HOST": "h2", "HEXAD_CACHE": "/somewhere", "OTHER": "1"}
        settings = load_settings({"server.port": "3"}, str(file), env)
        config = settings.config
        assert (config.server.port, config.server.host, config.model.seed, config.scheduler.max_num_seqs) == (3, "h2", 5, 3)
        assert settings.origins["server.port"] == "flag --port"
        assert settings.origins["server.host"] == "environment HEXAD_SERVER__HOST"
        assert settings.origins["model.seed"] == f"file {file}"
        assert "model.dtype" not in settings.origins


@pytest.mark.parametrize(
    ("flags", "file", "env", "words"),
    [
        ({}, "sever:\n  port: 1\n", {}, ["sever", "server"]),
        ({}, "server:\n  prt: 1\n", {}, ["prt", "port", "file"]),
        ({}, "max-modl-len: 1\n", {}, ["max-modl-len", "max-model-len"]),
        ({}, "- 1\n", {}, ["mapping"]),
        ({}, "a: [\n", {}, ["not valid yaml"]),
        ({}, None, {"HEXAD_SERVER__PRT": "1"}, ["prt", "port", "HEXAD_SERVER__PRT"]),
        ({}, None, {"HEXAD_SERVR__PORT": "1"}, ["servr", "server"]),
        ({}, None, {"HEXAD_SERVER__PORT": "70000"}, ["server.port", "65535", "HEXAD_SERVER__PORT"]),
        ({"model.load_format": "zip"}, None, {}, ["zip", "safetensors", "--load-format"]),
    ],
)
def test_mistakes_name_key_source_and_nearest(
    tmp_path: Path, flags: dict[str, str], file: str | None, env: dict[str, str], words: list[str]
) -> None:
    path = None
    if file is not None:
        path = tmp_path / "c.yaml"
        path.write_text(file)
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, str(path) if path else None, env)
    for word in words:
        assert word in caught.value.message


def test_environment_reads_only_its_own() -> None:
    assert read_env({"HEXAD_CACHE": "x", "HEXAD_SERVER__API_KEY": "a,b", "PATH": "y", "X__Y": "z"}) == [
        ("HEXAD_SERVER__API_KEY", "server.api_key", "a,b")
    ]
    config = load_settings({}, None, {"HEXAD_SERVER__API_KEY": "a,b", "HEXAD_DEVICE__OPERATORS": "attention=torch"}).config
    assert config.server.api_key == ("a", "b")
    assert config.device.operators == {"attention": "torch"}
    assert load_settings({}, None, {"HEXAD_MODEL__MAX_MODEL_LEN": "auto"}).config.model.max_model_len is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("32Ki", 32_768),
        ("4GiB", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 2**30),
        ("1.5k", 1500),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text, "x.y") == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "4 GiBs", "0x10", "1.0001k", "１２x"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.y"):
        parse_size(text, "x.y")


def test_show_bytes() -> None:
    assert [show_bytes(n) for n in (512, 2048, 5 * 2**20, 3 * 2**40)] == ["512 B", "2.00 KiB", "5.00 MiB", "3072.00 GiB"]


def test_config_show(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[server]\nport = 9\n")
    flags = ["--config", str(file), "--api-key", "secret-key", "--max-model-len", "32k", "-tp", "2", "--no-enable-prefix-caching"]
    rows = json.loads(hexad("config", "show", "--json", "my/model", *flags, env={"HEXAD_SERVER__HOST": "h"}).stdout)
    assert set(rows) == set(field_types())
    assert rows["model.model"] == {"value": '"my/model"', "origin": "flag --model"}
    assert rows["server.port"]["origin"] == f"file {file}"
    assert rows["server.host"]["origin"] == "environment HEXAD_SERVER__HOST"
    assert rows["model.max_model_len"]["value"] == "32000"
    assert rows["parallel.tensor_parallel_size"]["value"] == "2"
    assert rows["cache.enable_prefix_caching"]["value"] == "false"
    assert rows["model.seed"]["origin"] == "default"
    shown = hexad("config", "show", "--changed", *flags).stdout
    assert "secret-key" not in shown
    assert "flag --api-key" in shown


def test_version_and_models(tmp_path: Path) -> None:
    assert hexad("version").stdout.startswith("hexad ")
    assert hexad("--version").stdout.startswith("hexad ")
    assert "hexad pull" in hexad("models", env={"HEXAD_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}).stdout


def test_pull_and_models_of_the_cache(tmp_path: Path) -> None:
    done = hexad("pull", "/no/such/thing", code=2)
    assert "/no/such/thing" in done.stderr


def test_run_against_a_server(server: ServerProcess) -> None:
    done = hexad("run", "hi", "--url", server.url, "--max-tokens", "20", "--temperature", "0")
    assert done.stdout.strip()
    assert "answer 20 tokens" in done.stderr
    assert "tokens/s" in done.stderr
    again = hexad("run", "-", "--url", server.url, "--max-tokens", "20", "--temperature", "0", "--quiet", stdin="hi")
    assert again.stdout == done.stdout
    assert not again.stderr
    raw = hexad("run", "hi", "--raw", "--url", server.url, "--max-tokens", "20", "--temperature", "0")
    assert raw.stdout != done.stdout
    refused = hexad("run", "hi", "--url", server.url, "--temperature", "9", code=1)
    assert "temperature" in refused.stderr
    nobody = hexad("run", "hi", "--url", "http://127.0.0.1:9", code=2)
    assert "http://127.0.0.1:9" in nobody.stderr


def test_chat_against_a_server(server: ServerProcess) -> None:
    lines = "hello\n/stats\n/system be brief\nagain\n/stats\n/reset\n/what\nhello\n/exit\nnever read\n"
    done = hexad("chat", "--url", server.url, "--max-tokens", "5", "--temperature", "0", stdin=lines)
    figures = [line for line in done.stderr.splitlines() if line.startswith("prompt")]
    assert len(figures) == 2
    assert int(figures[0].split()[1]) < int(figures[1].split()[1])


def test_run_with_an_engine_of_its_own(tiny: Path) -> None:
    flags = ["--model", str(tiny), "--device", "fake", "--kv-cache-memory-bytes", "1MiB", "--max-tokens", "5", "--temperature", "0"]
    done = hexad("run", "hi", *flags)
    assert "answer 5 tokens" in done.stderr
    assert "INFO" not in done.stderr
    failed = hexad("run", "hi", "--model", "/no/such/model", "--device", "fake", code=2)
    assert "/no/such/model" in failed.stderr
