"""Tokenizers from Hugging Face folders, against transformers reading the same folder."""

from __future__ import annotations

import json

import pytest
import tokenizers
from model_files import fresh_seed, texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hexad.common.errors import ModelError
from hexad.models.tokenizer import Tokenizer


def train(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of a family's make."""
    corpus = ["".join(c for c in text if c < "\u0250") for text in texts(800, 1)]
    if kind == "byte_level":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    elif kind == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("éé", normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)])
    return backend


@pytest.fixture(scope="module", params=["byte_level", "unigram", "wordpiece"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    train(request.param).save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_encoding_equals_transformers(folder):
    from transformers import AutoTokenizer

    reference, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_files(folder)
    strings = [*texts(1_500, fresh_seed()), "<|im_start|>user<think>éé</s>"]
    for add in (True, False):
        expected = [reference.encode(s, add_special_tokens=add) for s in strings]
        assert ours.encode_batch(strings, add_special_tokens=add) == expected
    assert (ours.bos_token, ours.eos_token, ours.vocab_size) == ("<s>", "</s>", len(reference))
    assert ours.special_ids == set(reference.all_special_ids) | {ours.token_to_id(t) for t in ("<|im_start|>", "[UNK]", "<unk>")} - {None}


def test_decoding(folder):
    ours = Tokenizer.from_files(folder)
    strings = [s for s in texts(600, fresh_seed()) if s and "éé" not in s]
    for ids in ours.encode_batch(strings):
        assert ours.decode(ids) == ours._backend.decode(ids, skip_special_tokens=True)


def test_byte_level_is_lossless_even_around_added_tokens(folder):
    if folder.name.startswith("byte_level"):
        ours = Tokenizer.from_files(folder)
        for text in ["aéé<think>é b", *[s for s in texts(600, fresh_seed()) if "<s>" not in s]]:
            ids = ours.encode(text, add_special_tokens=False)
            assert ours.decode(ids) == text
            assert b"".join(ours.token_bytes(i) for i in ids) == text.encode()


def test_a_saved_length_limit_does_not_cut_prompts(tmp_path):
    backend = train("byte_level")
    backend.enable_truncation(4)
    backend.enable_padding()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_files(tmp_path).encode("one two three four five six seven eight nine ten")) > 8


def test_bos_and_eos_flags_without_a_post_processor(tmp_path):
    backend = train("byte_level")
    backend.post_processor = processors.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tree["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_files(tmp_path)
    assert ours.encode("")[:1] == [ours.bos_token_id]
    assert ours.encode("")[-1:] == [ours.eos_token_id]


def test_tokens_that_only_the_config_knows(tmp_path):
    backend = train("byte_level")
    backend.save(str(tmp_path / "tokenizer.json"))
    size = backend.get_vocab_size()
    entries = {str(size + 1): {"content": "<b>", "special": False}, str(size): {"content": "<a>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    ours = Tokenizer.from_files(tmp_path)
    assert ours.encode("<a><b>", add_special_tokens=False) == [size, size + 1]
    assert [ours.is_special(size), ours.is_special(size + 1)] == [True, False]


@pytest.mark.parametrize(("name", "says"), [("tokenizer.model", "convert it"), ("other.txt", "no tokenizer.json")])
def test_no_tokenizer(tmp_path, name, says):
    (tmp_path / name).write_text("x")
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_files(tmp_path)


@pytest.mark.parametrize("data", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "\x00"])
def test_broken_files(tmp_path, data):
    (tmp_path / "tokenizer.json").write_text(data)
    with pytest.raises(ModelError, match="not a valid tokenizer"):
        Tokenizer.from_files(tmp_path)


def test_override_names_another_folder(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_files(tmp_path, str(folder)).vocab_size == Tokenizer.from_files(folder / "tokenizer.json").vocab_size
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer.from_files(folder, str(tmp_path / "absent"))
