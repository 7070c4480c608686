"""`--profile`: a profile's values stand above the defaults and below everything that the user says."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hexad.cli.settings import load_settings
from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError
from hexad.common.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_profile_sets_its_values_and_says_so(name: str) -> None:
    settings = load_settings({}, env={}, profile=name)
    for key, value in PRESETS[name].values.items():
        section, _, field = key.partition(".")
        assert getattr(getattr(settings.config, section), field) == value
        assert settings.origins[key] == f"profile {name}"
        assert PRESETS[name].reasons[key]


def test_flags_and_environment_win_over_a_profile() -> None:
    settings = load_settings({"scheduler.max_num_seqs": "7"}, env={"HEXAD_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "99"}, profile="batch")
    assert settings.config.scheduler.max_num_seqs == 7
    assert settings.config.scheduler.max_num_batched_tokens == 99
    assert settings.config.cache.gpu_memory_utilization == PRESETS["batch"].values["cache.gpu_memory_utilization"]


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        load_settings({}, env={}, profile="chta")
    assert load_settings({}, env={}).config == HexadConfig()


def test_config_show_prints_where_values_come_from() -> None:
    from hexad.cli.config import app

    done = CliRunner().invoke(app, ["show", "--profile", "agent"])
    assert done.exit_code == 0, done.output
    line = next(text for text in done.output.splitlines() if "scheduling_policy" in text)
    assert "fair" in line and "profile agent" in line


def test_serve_says_what_a_profile_set(capsys: pytest.CaptureFixture[str]) -> None:
    from hexad.cli.serve import announce_profile

    announce_profile(load_settings({"scheduler.max_num_seqs": "7"}, env={}, profile="batch"))
    printed = capsys.readouterr().out
    assert "scheduler.max_num_batched_tokens = 16384: large steps" in printed
    assert "max_num_seqs" not in printed
