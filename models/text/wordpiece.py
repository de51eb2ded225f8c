"""WordPiece ("bert"): each word is split greedily into the longest pieces of the vocabulary."""
from ggjit.models.text.special_tokens import CONTROL, UNKNOWN
from ggjit.models.text.vocabulary import KEY, SPACE, Tokenizer, library, runner


class WordPiece(Tokenizer, models=("bert",)):
    """The file writes the start of a word as "▁word" and its continuation as "ing" where BERT has "word" and "##ing".
    Lower case without accents, unless the file says otherwise.  Where llama.cpp differs from BERT, this is BERT: marks
    with a width (Devanagari) stay, a word of more than 100 characters is unknown."""
    ADD_BOS, ADD_EOS, CLEAN_SPACES = True, True, True
    DEFAULT_IDS = {"bos": 101, "eos": 102, "unknown": 100}

    def __init__(self, file):
        super().__init__(file)
        sep_id = self._special_id("seperator")              # the key of the file format is spelt this way
        self.eos_id = sep_id if sep_id is not None else self.eos_id
        self.add_bos = self.add_eos = True                  # the networks were always trained with both

    def _build(self):
        if self.unk_id is None:
            self._bad(f"{KEY}unknown_token_id is missing")
        tokenizers, types = library(), self._types.tolist()
        vocab = {(t if types[i] in (CONTROL, UNKNOWN) else t[1:] if t.startswith(SPACE) else "##" + t): i
                 for t, i in self._vocab.items()}
        vocab[self._unk_text] = self.unk_id
        engine = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=vocab, unk_token=self._unk_text))
        lower = self._file.get(KEY + "normalizer.lowercase", True, kind=bool)
        engine.normalizer = tokenizers.normalizers.BertNormalizer(
            lowercase=lower, strip_accents=self._file.get(KEY + "normalizer.strip_accents", lower, kind=bool))
        engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        return runner(engine)

    def decode(self, ids, special=False):
        return super().decode(ids, special).removeprefix(" ")

    def _bytes(self, id, kind):
        return self._tokens.raw(id).replace(SPACE.encode(), b" ")
