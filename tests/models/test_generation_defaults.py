"""generation_config.json -> defaults of sampling parameters."""

from __future__ import annotations

import json

import pytest

from hexad.common.errors import ModelError
from hexad.models.generation_config import sampling_defaults


def defaults(folder, choice="auto", **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return sampling_defaults(folder, choice)


def test_what_the_author_set(tmp_path):
    given = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": 2}
    assert defaults(tmp_path, **given) == {k: given[k] for k in ("temperature", "top_p", "top_k", "repetition_penalty")}
    assert defaults(tmp_path, max_new_tokens=64) == {"max_tokens": 64}
    assert defaults(tmp_path, do_sample=False, temperature=0.7, top_p=0.5) == {"temperature": 0.0}


def test_none_another_folder_and_no_file(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    assert defaults(tmp_path, "none", top_k=5) == {}
    assert sampling_defaults(other) == {}
    assert sampling_defaults(other, str(tmp_path)) == {"top_k": 5}
    assert sampling_defaults(tmp_path / "model.gguf") == {}
    (tmp_path / "model.gguf").write_bytes(b"x")
    assert sampling_defaults(tmp_path / "model.gguf") == {"top_k": 5}


@pytest.mark.parametrize("values", [{"top_k": -1}, {"temperature": "hot"}, {"top_p": -0.5}, {"max_new_tokens": 0}])
def test_bad_values_are_named(tmp_path, values):
    with pytest.raises(ModelError, match=next(iter(values))):
        defaults(tmp_path, **values)
