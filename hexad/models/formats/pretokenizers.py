"""How byte-level BPE vocabularies split text into words before merging, by the name that GGUF files record. No torch.

Patterns are those that each model family publishes in its tokenizer.json; a wrong one gives other ids and worse answers without any
error, so a name that is not listed is refused rather than guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_O200K = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
# What readers of GGUF fall back on for files whose split is not recorded.
_UNRECORDED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Split:
    """One way of splitting: patterns applied one after the other, each isolating its matches."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is in the vocabulary is taken whole, without merging
    add_bos: bool = False  # when the file does not say

    def build(self) -> PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_DIGITS_GPT2 = Split((r"\p{N}", _GPT2))
_SPLIT_LLAMA3 = Split((_LLAMA3,), whole_words=True, add_bos=True)

SPLITS: dict[str, Split] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt"), Split((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "megrez"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _SPLIT_LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), Split((_QWEN2,))),
    "tekken": Split((_TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((_O200K,))),
    DEFAULT: Split(_UNRECORDED),
}
