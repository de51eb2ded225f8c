"""T5: an encoder reads a text once, and a decoder writes another text from the encoder's output.

    e       = the encoder's results, of blocks as in texts/encoder.py
    K, V    = Wk e, Wv e of every layer of the decoder, kept until the next text is encoded
    logits  = the decoder's, whose layers look at what it wrote so far and at K and V

    m = load_model("flan-t5-small.gguf")
    "".join(m.generate("translate English to German: How are you?"))
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import WHOLE, Loader, Scope
from ggjit.models.blocks.hparams import HParams
from ggjit.models.core.other_options import GENERATION, takes_other_names
from ggjit.models.families.t5 import encoder
from ggjit.models.networks.parts.kv_cells import _band
from ggjit.models.networks.texts.decoder import Decoder
from ggjit.models.networks.texts.encoder import relative_buckets
from ggjit.models.text.generation import Generation
from ggjit.models.text.generations import is_many
from ggjit.ops.core.errors import IndexRangeError, ParamError

ENCODE = "encode"                       # of the graph's shape: (ENCODE, tokens)


class T5(Decoder):
    """`m.encode(text)`, then `m.decode(ids)`; `m.generate(text)` does both.  One text at a time."""

    N_SEQS = 1
    SEES = False

    def __init__(self, file, options=None):
        if options is not None and options.n_seqs not in (None, 1):
            raise ParamError(f"n_seqs = {options.n_seqs}: {file.arch} models write one text at a time; leave n_seqs "
                             f"out")
        if options is not None and options.pooling not in (None, "none"):
            raise ParamError(f"pooling = {options.pooling!r}: {file.arch} models write texts; take m.encode(text), or "
                             f"a t5encoder file, for vectors")
        super().__init__(file, options)

    # ------------------------------------------------------------ loading
    def _load_weights(self):
        super()._load_weights()
        about = self._encoder = encoder(HParams(self.file))
        loader = Loader(self.weights, self.n_embd, self.n_vocab)
        self._encoder_layers = [b.load(loader, f"{about.prefix}{i}.") for i, b in enumerate(about.blocks)]
        self._encoder_norm = loader.norm(about.out_norm, about.norm)
        self._products = [*self._products, *loader.matrices]

    def _load(self):
        super()._load()
        n = self.n_ctx
        self.start_id = self.file.arch_get("decoder_start_token_id", 0, int)
        if not 0 <= self.start_id < self.n_vocab:
            raise IndexRangeError(f"{self.file.path}: decoder_start_token_id {self.start_id} is outside the vocabulary "
                                  f"0..{self.n_vocab - 1}")
        self._n_buckets = self.description.blocks[0].mixer.rel_buckets
        self._buckets = relative_buckets(np.arange(1 - n, n + 1), self._n_buckets, both=False)
        self._say_encoded(0)

    # ------------------------------------------------------------ the encoder
    @property
    def n_encoded(self):
        """Tokens of the text that was encoded; 0: none was."""
        if self._n_encoded is None:
            masks = self._whole("mask")
            self._n_encoded = int((masks[0].numpy() == 0).sum()) if masks else 0
        return self._n_encoded

    def encode(self, text):
        """Read a text, or its token ids: (n, dim) float32, the encoder's results.  What was decoded is forgotten.

        Errors: ParamError for weights that are NaN or a text longer than the context, IndexRangeError for ids outside
        the vocabulary.
        """
        with self._lock:
            ids = self._checked_ids(text, self.n_ctx)
            self.reset()
            self._say_encoded(0)
            with self._hooks.none_wanted():
                step = self._step((ENCODE, len(ids)))
                step.inputs["tokens"][:] = ids
                out = step.run().reshape(-1, self.n_embd).copy()
            self._say_encoded(len(ids))
            return self._finite(out, "the encoder's results")

    def _begin_again(self):
        super()._begin_again()
        self._say_encoded(0)

    def _whole(self, name):
        return [leaf for kept in self.cache for leaf in kept if leaf.name.startswith(f"{WHOLE} {name}")]

    def _say_encoded(self, n):
        for mask in self._whole("mask"):
            mask.set(np.where(np.arange(self.n_ctx) < n, 0, -np.inf).astype(np.float32).reshape(-1, 1))
        self._n_encoded = n

    def _build(self, ctx, shape):
        if shape[0] != ENCODE:
            return super()._build(ctx, shape)
        n, about = shape[1], self._encoder
        at = np.arange(n, dtype=np.int32)
        inputs = {"tokens": np.zeros(n, np.int32), "rows": at.astype(np.int64),
                  "buckets": relative_buckets(at[None, :] - at[:, None], self._n_buckets).reshape(-1)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g, x = Scope(leaf, n, n, about.eps, self._flash, None), gg.get_rows(self.embd, leaf["tokens"])
        for i, (block, w) in enumerate(zip(about.blocks, self._encoder_layers, strict=True)):
            x = block.build(g, x, w, i)
        x = g.norm(x, about.norm, self._encoder_norm)
        written = [node for block, w, kept in zip(self.description.blocks, self.layers, self.cache, strict=True)
                   for node in block.cross.written(kept[-3:], x, leaf["rows"], w)]
        return inputs, x, *written

    def largest_graph(self, all_logits=False):
        """The encoder's of a text as long as the context, or the decoder's of a full batch: which computes more."""
        graphs = self.graph(ENCODE, self.n_ctx), super().largest_graph(all_logits)
        return max(graphs, key=lambda graph: self._allocator.plan(graph).peak)

    # ------------------------------------------------------------ the decoder
    def _inputs(self, n_tokens, n_kv, n_out, n_seqs, n_tables=0, pictures=False):
        inputs = super()._inputs(n_tokens, n_kv, n_out, n_seqs, n_tables, pictures)
        return inputs | {"buckets": np.zeros(inputs["mask"].size, np.int32)}

    def _fill(self, inputs, runs, state_rows, n_tables=0):
        super()._fill(inputs, runs, state_rows, n_tables)
        (text, ids), = runs
        n, past = len(ids), len(text.ids)
        buckets = inputs["buckets"].reshape(n, -1)
        buckets[:, text.mappings[0].at(0, past + n)] = _band(self._buckets, self.n_ctx - 1 - past, n, past + n)

    def _fed(self, ids, all_rows, hidden=False):
        if not self.n_encoded:
            raise ParamError(f"{self.file.path}: nothing was encoded that the decoder could look at; call "
                             f"m.encode(text) first, or m.generate(text); of the commands generate and chat do so")
        return super()._fed(ids, all_rows, hidden)

    def load_state(self, state):
        super().load_state(state)
        self._n_encoded = None

    @takes_other_names(GENERATION)
    def generate(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, **options):
        """Iterator over pieces of the text that the decoder writes about `prompt`, which the encoder reads.

        Options: as Decoder.generate's.  Errors: ParamError for a list of prompts.
        """
        if is_many(prompt):
            raise ParamError(f"{self.file.arch} models write one text at a time; call generate for each of the "
                             f"{len(prompt)} prompts")
        return T5Generation(self, prompt, n_predict, stop, ignore_eos, temp=temp, **options)


class T5Generation(Generation):
    """A Generation about a text, which begins with the decoder's start token; it encodes its text again if another was
    encoded meanwhile."""

    def __init__(self, model, prompt, n_predict, stop, ignore_eos, **options):
        ids = model.tokenize(prompt) if isinstance(prompt, str) else prompt
        self.encoded_ids = model._checked_ids(ids, model.n_ctx).tolist()
        super().__init__(model, [model.start_id], n_predict, stop, ignore_eos, **options)

    def _decode(self, ids):
        with self.model._lock:
            if self.model.cache_owner is not self._mark:
                self.model.encode(self.encoded_ids)
            return super()._decode(ids)
