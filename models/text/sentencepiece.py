"""SentencePiece BPE ("llama"): merges ranked by score, unknown characters as bytes."""
import heapq
import itertools
import operator

from ggjit.models.text.special_tokens import BYTE
from ggjit.models.text.vocabulary import KEY, SPACE, Tokenizer, library, runner

MAX_SPLIT_WORK = 1 << 28        # characters copied to find the pairs of every token; real vocabularies need a million


class SentencePiece(Tokenizer, models=("llama",)):
    """"llama": starts from single characters and merges the pair whose merged text scores best, leftmost first; what is
    no token in the end becomes the tokens of its UTF-8 bytes."""
    ADD_BOS, ADD_SPACE_PREFIX = True, True
    DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}

    def _build(self):
        merges, tied = self._merges()
        if tied:
            return self._merge_by_score
        model = library().models.BPE(vocab=self._vocab, merges=merges, unk_token=self._unk_text, byte_fallback=True,
                                      fuse_unk=False)
        return runner(library().Tokenizer(model))

    def _merges(self):
        """(pairs, tied): the pairs that make each token, best score first, which is what a BPE engine needs to do
        SentencePiece's merges; `tied` if two tokens score the same, for then position decides, not rank."""
        known, scores = self._mergeable, self._scores
        if sum(len(text) ** 2 for text in known) > MAX_SPLIT_WORK:
            self._bad(f"{KEY}tokens holds texts of {max(map(len, known))} characters and more, as no vocabulary does")
        pairs = [(-scores[id], text[:i], text[i:]) for text, id in known.items() for i in range(1, len(text))
                 if text[:i] in known and text[i:] in known]
        pairs.sort(key=operator.itemgetter(0))
        tied = any(a[0] == b[0] and a[1] + a[2] != b[1] + b[2] for a, b in itertools.pairwise(pairs))
        return [pair[1:] for pair in pairs], tied

    def _merge_by_score(self, part):
        """The definition itself, for vocabularies with equal scores, which a BPE engine cannot express."""
        known, scores, pieces, heap = self._mergeable, self._scores, list(part), []
        before, after = list(range(-1, len(pieces) - 1)), [*range(1, len(pieces)), -1]

        def offer(left, right):
            id = known.get(pieces[left] + pieces[right]) if left >= 0 and right >= 0 else None
            if id is not None:
                heapq.heappush(heap, (-scores[id], left, right, len(pieces[left]) + len(pieces[right])))

        for i in range(len(pieces) - 1):
            offer(i, i + 1)
        while heap:
            _, left, right, length = heapq.heappop(heap)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue                                    # one of the two parts was merged with another meanwhile
            pieces[left], pieces[right] = pieces[left] + pieces[right], ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [id for piece in pieces if piece for id in self._ids_of(piece)]

    def _ids_of(self, piece):
        """The token of `piece`, or those of its bytes, or the unknown token."""
        if piece in self._mergeable:
            return [self._mergeable[piece]]
        ids = [self._mergeable.get(f"<0x{byte:02X}>", self.unk_id) for byte in piece.encode()]
        return ids if self.unk_id not in ids else [self.unk_id] if self.unk_id is not None else []

    def _prepare(self, part, after_special):
        return ((" " if self.add_space_prefix and after_special else "") + part).replace(" ", SPACE)

    def _bytes(self, id, kind):
        return self._byte_of(id) if kind == BYTE else self._tokens.raw(id).replace(SPACE.encode(), b" ")
