"""Drafters: small networks that predict the tokens of a larger one (models/blocks/drafts.py).

They compute nothing alone: `m.generate(prompt, speculative=drafter)`.
"""
import weakref

import numpy as np

from ggjit.models.blocks.description import Loader
from ggjit.models.blocks.hparams import HParams, rope_options
from ggjit.models.families.drafters import DRAFTERS
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.parts.drafting import KINDS
from ggjit.models.networks.parts.guesses import drop, use
from ggjit.ops.core.errors import ModelError, NotSupported, ParamError


class Drafter(Network):
    """What load_model gives of EAGLE-3's, DFlash's and Gemma 4's draft models.

        m, draft = load_model("llama.gguf"), load_model("eagle3.gguf")
        print(m.generate("Once upon a time", speculative=draft).text)
    """

    def _load(self):
        hparams = HParams(self.file, rope=rope_options(self.options.rope))
        self.n_embd, self.n_ctx_train = hparams.n_embd, hparams.n_ctx_train
        self.net = DRAFTERS[self.file.arch](hparams)
        self.n_vocab = self.file.arch_get("vocab_size", self._n_words(), int)
        self.loaded = self.net.load(Loader(self.weights, self.n_embd, self.n_vocab))
        ids = self.loaded["d2t"].numpy() if "d2t" in self.loaded else np.zeros(1, np.int64)
        if ids.min() < 0 or ids.max() >= max(self.n_vocab, 1):
            raise ModelError(f"{self.file.path}: d2t holds ids from {ids.min()} to {ids.max()}, the vocabulary has "
                             f"{self.n_vocab}; convert the model again")
        if not 0 <= getattr(self.net, "mask_id", 0) < max(self.n_vocab, 1):
            raise ModelError(f"{self.file.path}: tokenizer.ggml.mask_token_id = {self.net.mask_id}, the vocabulary has "
                             f"{self.n_vocab} tokens; convert the model again")
        self._targets = weakref.WeakSet()

    def _n_words(self):
        """Tokens of the vocabulary that it guesses of, the target's."""
        table = self.file.tensors.get("token_embd.weight") or self.file.tensors.get("output.weight")
        return len(self.file.get("tokenizer.ggml.tokens", ())) or (table.ne[-1] if table else 0)

    def guesses_for(self, m):
        """The guesser of texts of the Decoder m.  Errors: ParamError for another model than the one it was made for;
        NotSupported."""
        self._check(m)
        found = use(m, lambda known: getattr(known, "drafter", None) is self, lambda: KINDS[type(self.net)](m, self))
        self._targets.add(m)
        return found

    def _check(self, m):
        net, path = self.net, self.file.path
        n_target = getattr(net, "n_target", self.n_embd)
        words = [x.file.metadata.get("tokenizer.ggml.tokens") for x in (m, self)]
        same = None in words or len(words[0]) == len(words[1]) and all(a == b for a, b in zip(*words, strict=True))
        if m.n_embd != n_target or self.n_vocab and self.n_vocab != m.n_vocab or not same or \
                max(net.layers, default=0) > m.n_layer:
            layers = f" and {max(net.layers)} layers or more" if net.layers else ""
            raise ParamError(f"{path} guesses for a model of {n_target} numbers a token, {self.n_vocab} tokens"
                             f"{layers}, which {m.file.path} is not; take the draft model that was made for it")
        if net.tables is not None and net.tables.needs_target and self.n_embd != m.n_embd:
            raise ParamError(f"{path} has no embeddings of its own, and vectors of {self.n_embd} numbers; those of "
                             f"{m.file.path} have {m.n_embd}")

    @property
    def description(self):
        return self.net

    def _alone(self, *args, **options):
        raise NotSupported(f"{self.file.path} guesses for another model: m.generate(prompt, speculative=this)")

    logits = hidden = generate = chat = embed = graph = as_graph = largest_graph = _alone

    def free(self):
        for m in list(getattr(self, "_targets", ())):
            if getattr(m.predictor, "drafter", None) is self:
                drop(m)
        super().free()
