"""Whisper's vocabulary: bytes of text, then the special tokens, then times.

    English only                                   0 .. 50255 text, 50256 end, 50257 start, ...
    multilingual                                   0 .. 50256 text, 50257 end, 50258 start, ...
    behind start      a token of each language, translate, transcribe, start of lm, start of previous text,
                      no speech, no timestamps, then 0.00 s, 0.02 s, ... 30.00 s

A text is cut into words as GPT-2 does, and the bytes of a word are joined pair by pair: the pair whose token has the
lowest number first.
"""
import string
import unicodedata

import numpy as np

from ggjit.core.arguments import nearest
from ggjit.models.core.byte_chars import BYTE_OF_CHAR
from ggjit.models.files.gguf import StringArray
from ggjit.ops.core.errors import ModelError, ParamError

ENGLISH_ONLY = 51864            # tokens; a multilingual vocabulary has more
N_OTHERS = 51765                # tokens of a multilingual vocabulary beside languages, less one
TIME_STEP = 0.02                # seconds between two times
# in the order of their tokens; large-v3 has the last one too
LANGUAGES = dict(line.split(" ", 1) for line in """\
en english|zh chinese|de german|es spanish|ru russian|ko korean|fr french|ja japanese|pt portuguese|tr turkish|pl polish
ca catalan|nl dutch|ar arabic|sv swedish|it italian|id indonesian|hi hindi|fi finnish|vi vietnamese|he hebrew
uk ukrainian|el greek|ms malay|cs czech|ro romanian|da danish|hu hungarian|ta tamil|no norwegian|th thai|ur urdu
hr croatian|bg bulgarian|lt lithuanian|la latin|mi maori|ml malayalam|cy welsh|sk slovak|te telugu|fa persian|lv latvian
bn bengali|sr serbian|az azerbaijani|sl slovenian|kn kannada|et estonian|mk macedonian|br breton|eu basque|is icelandic
hy armenian|ne nepali|mn mongolian|bs bosnian|kk kazakh|sq albanian|sw swahili|gl galician|mr marathi|pa punjabi
si sinhala|km khmer|sn shona|yo yoruba|so somali|af afrikaans|oc occitan|ka georgian|be belarusian|tg tajik|sd sindhi
gu gujarati|am amharic|yi yiddish|lo lao|uz uzbek|fo faroese|ht haitian creole|ps pashto|tk turkmen|nn nynorsk
mt maltese|sa sanskrit|lb luxembourgish|my myanmar|bo tibetan|tl tagalog|mg malagasy|as assamese|tt tatar
haw hawaiian|ln lingala|ha hausa|ba bashkir|jw javanese|su sundanese|yue cantonese""".replace("\n", "|").split("|"))
CODES = tuple(LANGUAGES)
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
NO_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))    # words of these are not cut by spaces


class Vocabulary:
    """Tokens of a model: `.eot .sot .translate .transcribe .prev .no_speech .no_timestamps`, and `.begin` of 0.00 s."""

    def __init__(self, file, n_vocab):
        self.path, self.n_vocab = file.path, n_vocab
        self.multilingual = n_vocab > ENGLISH_ONLY
        self.n_languages = n_vocab - N_OTHERS - self.multilingual
        if not 1 <= self.n_languages <= len(CODES) + 1:
            raise ModelError(f"{file.path}: a vocabulary of {n_vocab} tokens is not Whisper's ({ENGLISH_ONLY} or a "
                             f"few more)")
        self.eot = ENGLISH_ONLY - 1608 + self.multilingual
        self.sot = self.eot + 1
        (self.translate, self.transcribe, self.start_of_lm, self.prev, self.no_speech, self.no_timestamps,
         self.begin) = (self.sot + self.n_languages + i for i in range(1, 8))
        self._bytes = _bytes_of(file, self.eot)
        self._ids = {}
        for id, raw in enumerate(self._bytes):
            self._ids.setdefault(raw, id)

    @property
    def languages(self):
        """Codes of the languages the model knows, in the order of their tokens."""
        return CODES[:self.n_languages] if self.multilingual else ("en",)

    def language_token(self, code):
        return self.sot + 1 + CODES.index(code)

    def language(self, name):
        """The code of "de", "German" or "german".  Errors: ParamError."""
        lower = str(name).lower()
        code = lower if lower in LANGUAGES else next((c for c, n in LANGUAGES.items() if n == lower), None)
        if not isinstance(name, str) or code not in self.languages:
            more = "" if self.multilingual else "; it is an English-only model"
            raise ParamError(f"{self.path} does not know the language {name!r}"
                             f"{nearest(lower, [*self.languages, *LANGUAGES.values()])}{more}")
        return code

    def is_time(self, token):
        return token >= self.begin

    def seconds(self, token):
        """The time in seconds that a time token stands for."""
        return (token - self.begin) * TIME_STEP

    def prompt(self, language, task, timestamps, previous=()):
        """Tokens before those of a window; previous: tokens of the text before it."""
        head = [self.prev, *previous] if len(previous) else []
        kind = [self.language_token(language), self.translate if task == "translate" else self.transcribe]
        return [*head, self.sot, *(kind if self.multilingual else ()), *([] if timestamps else [self.no_timestamps])]

    # ------------------------------------------------------------ text
    def bytes(self, tokens):
        """The bytes of the text among the tokens."""
        return b"".join([self._bytes[t] for t in tokens if t < self.eot])

    def text(self, tokens):
        """The text of tokens; special tokens and times have none."""
        return self.bytes(tokens).decode("utf-8", "replace")

    def encode(self, text):
        """Tokens of a text, a list of int."""
        out = []
        for word in gpt2_words(text):
            out += self._joined(word.encode("utf-8", "replace"))
        return out

    def _joined(self, raw):
        ids = self._ids
        parts = [bytes([b]) for b in raw]
        while len(parts) > 1:
            ranks = [ids.get(a + b, self.eot) for a, b in zip(parts, parts[1:], strict=False)]
            best = min(ranks)
            if best >= self.eot:
                break
            i = ranks.index(best)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return [ids[p] for p in parts if p in ids]

    def first_of(self, text):
        """The token that is this text, or None."""
        return self._ids.get(text.encode())

    def non_speech(self):
        """Ids of the tokens that OpenAI's models may not write by default: signs that describe sounds or speakers."""
        signs = list("\"#()*+/:;<=>@[\\]^_`{|}~「」『』") + \
            "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split()
        music = set("♩♪♫♬♭♮♯")
        out = {ids[0] for text in (" -", " '") if (ids := self.encode(text))}
        for sign in [*signs, *music]:
            for ids in (self.encode(sign), self.encode(" " + sign)):
                if len(ids) == 1 or sign in music:
                    out.update(ids[:1])
        return np.array(sorted(out))

    # ------------------------------------------------------------ words
    def words(self, tokens, language):
        """[(text, [tokens])] of the text among the tokens: cut at spaces, or where characters end in languages without.

        A sign is a word of its own.
        """
        parts, pending = [], []
        for t in tokens:
            if t >= self.eot:
                continue
            pending.append(t)
            try:
                parts.append((self.bytes(pending).decode(), pending))
            except UnicodeDecodeError:
                continue                        # half a character: the next token brings the rest
            pending = []
        if pending:
            parts.append((self.text(pending), pending))
        if language in NO_SPACES:
            return parts
        out = []
        for text, ids in parts:
            if out and not text.startswith(" ") and text.strip() not in string.punctuation:
                out[-1] = out[-1][0] + text, out[-1][1] + ids
            else:
                out.append((text, ids))
        return out


def _bytes_of(file, eot):
    """[bytes of each text token]"""
    texts = file.get("tokenizer.ggml.tokens", None, StringArray)
    if texts is None or len(texts) < eot:
        raise ModelError(f"{file.path}: {0 if texts is None else len(texts)} texts of tokens, expected {eot}; convert "
                         f"the model again")
    return [raw_bytes(text) for text in texts[:eot]]


def raw_bytes(text):
    """The bytes that GPT-2's characters stand for."""
    return bytes([BYTE_OF_CHAR[c] for c in text]) if all(c in BYTE_OF_CHAR for c in text) else text.encode()


def gpt2_words(text):
    """A text as GPT-2 cuts it: contractions, and runs of letters, numbers or signs with the space before them."""
    out, i, n = [], 0, len(text)
    kinds = [_kind(c) for c in text]
    while i < n:
        short = next((c for c in CONTRACTIONS if text.startswith(c, i)), None)
        if short:
            out.append(short)
            i += len(short)
            continue
        start = i
        i += text[i] == " " and i + 1 < n and kinds[i + 1] != "space"
        kind = kinds[i]
        while i < n and kinds[i] == kind:
            i += 1
        if kind == "space" and i < n and i - start > 1:
            i -= 1                              # the last space goes with what follows
        out.append(text[start:i])
    return out


def _kind(c):
    if c.isspace():
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(c)[0], "sign")
