"""How byte-level BPE vocabularies cut text into words before merging: `tokenizer.ggml.pre` -> regular expressions.

Merges never cross a cut, so a wrong cut gives wrong ids without any error; an unknown name is therefore refused.  The
expressions of a row are applied one after the other, each to the pieces the one before it left: a match is a piece, and
so is what lies between matches.  Source: the models' own tokenizer.json, as named and grouped by llama.cpp
(llama-vocab.cpp, llm_tokenizer_bpe).
"""
from dataclasses import dataclass

from ggjit.ops.core.errors import NotSupported

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_MODERN = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + _MODERN % "{1,3}"
QWEN2 = _CONTRACTIONS + _MODERN % ""
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
# letters with case, as that model's authors listed them; escaped, because editors normalise some of them
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")


@dataclass(frozen=True)
class Pre:
    """`ignore_merges`: a whole word that is a token is taken without merging; `add_bos`: if the file does not say."""
    patterns: tuple
    ignore_merges: bool = False
    add_bos: bool = False


_FAMILIES = [
    ("default", Pre((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code gigachat roberta-bpe mpt olmo jais",
     Pre((GPT2,))),
    ("llama3 llama-v3 llama-bpe falcon3", Pre((LLAMA3,), ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe", Pre((LLAMA3,))),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez", Pre((QWEN2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", Pre((r"\p{N}", GPT2))),
    ("falcon", Pre((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    ("deepseek-llm", Pre(("[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK,
                          r"\p{N}+"))),
    ("deepseek-coder", Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
    ("deepseek-v3", Pre((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
                         r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                         r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"))),
]
BY_NAME = {name: pre for names, pre in _FAMILIES for name in names.split()}


def pre_tokenizer(name):
    """The Pre of a `tokenizer.ggml.pre` value; NotSupported for one we do not know."""
    if name not in BY_NAME:
        raise NotSupported(f"pre-tokenizer {name!r} is not known; text cannot be turned into ids (known: "
                           f"{' '.join(sorted(BY_NAME))}), but token ids can be given to logits()")
    return BY_NAME[name]
