"""How byte-level BPE vocabularies cut text into words before merging: `tokenizer.ggml.pre` -> regular expressions.

Merges never cross a cut, so a wrong cut gives wrong ids without any error; an unknown name is therefore refused.  The
expressions of a row are applied one after the other, each to the pieces the one before it left: a match is a piece, and
so is what lies between matches.  Names, groups and expressions are llama.cpp's (llama-vocab.cpp, llm_tokenizer_bpe;
unicode.cpp), also where a model's own tokenizer.json says otherwise: upper case is A-Z there and lower case a-z, other
letters count as both; digits are 0-9 where it says \\d; characters are those of Unicode 15.1.

No expression may look ahead to the end of a run from every character of it: a long run would take the square of its
length.  Digits that are counted from the right are therefore cut in steps.
"""
import re
from dataclasses import dataclass

from ggjit.core.arguments import nearest
from ggjit.ops.core.errors import NotSupported

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _plain(digits, before=_CONTRACTIONS + "|", letters=r"\p{L}", marks="", ends=r"[\r\n]*", spaces=_SPACES):
    """Regular expression of the pieces: contractions, words, digits, punctuation with line ends, spaces."""
    return rf"{before}{_LEAD}{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+{ends}{spaces}"


def _cased(digits, letters=r"\p{L}", contractions=_CONTRACTIONS + "?"):
    """Words that may start with capitals, each with its contraction, digits, punctuation with line ends and slashes."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    return (rf"{_LEAD}{upper}*{lower}+{contractions}|{_LEAD}{upper}+{lower}*{contractions}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES)


LLAMA3 = _plain(r"\p{N}{1,3}")
QWEN2 = _plain(r"\p{N}")
_CJK = "[[一-龥\u0800-一가-\ud7ff]&&\\S]+"
_HAN = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
_KIMI = (rf"[{_HAN}]+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES)
_DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
              r"| ?[\p{P}\p{S}]+")
_KANA_AND_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_EAST_ASIAN = ("[一-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
               "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\u1100-\u11ff]+")
# digits in groups of three from the right: what stands before a run with its first group (llama.cpp's loop leaves it
# there), that group's end, the others
_DIGITS = (r"(?<!\P{N})\P{N}*+\p{N}++", r"\A\P{N}*+(?:\p{N}{1,2}(?=(?:\p{N}{3})*+\z)|\p{N}{3})", r"(?<!\P{N})\p{N}{3}")
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"
# letters with case, as that model's authors listed them; escaped, because editors normalise some of them
_WITH_CASE = (
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
class PreTokenizer:
    """`ignore_merges`: a whole word that is a token is taken without merging; `add_bos`: if the file does not say.
    `raw`: characters are themselves, not GPT-2's stand-ins for bytes, and what is no token becomes "<0x0A>" tokens;
    `escape`: a space is "▁", as in SentencePiece; `lines`: line ends that are a token together are not merged."""
    patterns: tuple
    ignore_merges: bool = False
    add_bos: bool = False
    raw: bool = False
    escape: bool = False
    lines: bool = False


_FAMILIES = [
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code gigachat roberta-bpe mpt olmo jais "
     "trillion granite-docling a.x-4.0 mellum modern-bert exaone4", PreTokenizer((GPT2,))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe glm4", PreTokenizer((LLAMA3,))),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan solar-open grok-2", PreTokenizer((QWEN2,))),
    ("qwen35", PreTokenizer((_plain(r"\p{N}", letters=r"[\p{L}\p{M}]", marks=r"\p{M}"),))),
    ("ufakzeka", PreTokenizer((_plain(r"\p{N}", before=""),))),
    ("laguna", PreTokenizer((_LINES, QWEN2))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _plain(r"\p{N}+")), ignore_merges=True)),
    ("seed-coder", PreTokenizer((_plain(r"\p{N}", ends=""),))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_plain(r"\p{N}", spaces=r"|\s*[\r\n]|\s+(?!\S)|\s+"),))),
    ("exaone-moe", PreTokenizer((_plain(r"\p{N}", letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)", ends=r"[\r\n/]?",
                                        spaces=r"|\s*[\r\n]|\s+(?!\S)|\s+"),))),
    ("jais-2", PreTokenizer((_plain(r"\p{N}{1,3}", spaces=r"|\s*[\r\n]+" + "".join(
        rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"),))),
    ("tekken", PreTokenizer((_cased(r"\p{N}", contractions=""),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_cased(r"\p{N}{1,3}"),))),
    ("granite-embed-multi-97m", PreTokenizer((_cased(r"\p{N}{1,3}", letters=r"\p{L}\p{M}"),), ignore_merges=True)),
    ("youtu", PreTokenizer(("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
                            rf"{_LEAD}[\p{{L}}\p{{M}}]+{_CONTRACTIONS}?|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" +
                            _SPACES),
                           ignore_merges=True)),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("tiny_aya cohere2moe", PreTokenizer((*_DIGITS, rf"{_LEAD}[\p{{L}}\p{{M}}]+{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
                                          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES))),
    ("afmoe", PreTokenizer((*_DIGITS, _EAST_ASIAN, _DEEPSEEK3 + r"[\r\n]*" + _SPACES))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?<![0-9])[0-9]{1,2}\K(?=(?:[0-9]{3})++(?![0-9]))", "[0-9]{3}"))),
    ("bloom gpt3-finnish poro-chat", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("chameleon", PreTokenizer(("<sentinel:[0-9]+>", "(?:IMGIMG)[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}",
                                r"[\p{P}!-/:-@\[-`{-~]", GPT2), add_bos=True)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", GPT2))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    ("deepseek-llm", PreTokenizer(("[\r\n]", rf"\s?[{_WITH_CASE}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3001-。]+",
                                   r"(?<!\s)\s++\z", _CJK, r"\p{N}+"))),
    ("deepseek-coder", PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4",
     PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3 + r"[\r\n]*" + _SPACES))),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((_LINES,), add_bos=True, raw=True, escape=True, lines=True)),
    ("sarvam-moe", PreTokenizer((_LINES,), raw=True, escape=True)),
    ("whitespace", PreTokenizer((r"\S+",), raw=True)),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3 + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"))),
]
BY_NAME = {name: pre for names, pre in _FAMILIES for name in names.split()}

# the others drop the space before punctuation when ids become text ("clean_up_tokenization_spaces" of their configs)
KEEP_SPACES = frozenset("""
    deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu sarvam-moe command-r qwen2 kormo f2llmv2
    deepseek-r1-qwen qwen35 poro-chat viking tekken smollm chameleon gpt-4o llama4 kanana2 talkie tiny_aya
    cohere2moe granite-embed-multi-97m superbpe trillion granite-docling bailingmoe bailingmoe2 llada-moe
    seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2 afmoe laguna minimax-m2
    solar-open""".split())

# letters, marks, digits, punctuation and symbols of Unicode 16: the regular expressions know them, llama.cpp does not
_UNICODE_16 = (
    "\u0897\u1b4e-\u1b4f\u1b7f\u1c89-\u1c8a\u2427-\u2429\u31e4-\u31e5\ua7cb-\ua7cd\ua7da-\ua7dc"
    "\U000105c0-\U000105f3\U00010d40-\U00010d8f\U00010ec2-\U00010efc\U00011380-\U000113e2\U000116d0-\U000116e3"
    "\U00011bc0-\U00011bf9\U00011f5a\U00013460-\U000143fa\U00016100-\U00016139\U00016d40-\U00016d79\U00018cff"
    "\U0001cc00-\U0001ceb3\U0001e5d0-\U0001e5ff\U0001f8b2-\U0001f8c1\U0001fa89-\U0001fa8f\U0001fabe\U0001fac6"
    "\U0001fadc-\U0001fadf\U0001fae9\U0001fbcb-\U0001fbef")


def expressions(pre):
    """The patterns of a PreTokenizer for an engine with a newer Unicode: \\p{L} is what Unicode 15.1 calls a letter."""
    pattern = re.compile(r"\\(p|P)\{([LMNPS])\}")

    def older(m):
        return f"[\\p{{{m[2]}}}&&[^{_UNICODE_16}]]" if m[1] == "p" else f"[\\P{{{m[2]}}}{_UNICODE_16}]"
    return [pattern.sub(older, p) for p in pre.patterns]


def pre_tokenizer(name, path):
    """The PreTokenizer of a file's `tokenizer.ggml.pre` value ("" is "default"); NotSupported for an unknown one.
    """
    if (name or "default") not in BY_NAME:
        raise NotSupported(f"{path}: tokenizer.ggml.pre is {name!r}{nearest(name, BY_NAME)}, a pre-tokenizer that is "
                           f"not known, so text cannot be turned into ids (known: {' '.join(sorted(BY_NAME))}); give "
                           f"token ids instead of text")
    return BY_NAME[name or "default"]
