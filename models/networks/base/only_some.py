"""Methods that only some networks have: for the others, an error that says which model to load instead."""
from ggjit.ops.core.errors import NotSupported


class OnlySome:
    """Methods that subclasses of Network replace."""

    def encode_image(self, image):
        raise NotSupported(f"{self.file.arch} models read no pictures; load a decoder with its vision part")

    def encode_audio(self, sound):
        raise NotSupported(f"{self.file.arch} models hear nothing so; load a decoder with the part of it that hears")

    def generate(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, **options):
        raise NotSupported(f"{self.file.arch} models do not generate text; load a llama model")

    def score(self, texts, logprobs=0):
        raise NotSupported(f"{self.file.arch} models do not predict the next token; load a llama model")

    def chat(self, messages, n_predict=-1, tools=None, template=None, variables=None, **options):
        raise NotSupported(f"{self.file.arch} models do not generate text; load a llama model")

    def infill(self, before, after, n_predict=64, others=(), suffix_first=False, **options):
        raise NotSupported(f"{self.file.arch} models do not fill in the middle; load a code model")

    def set_lora(self, lora=()):
        raise NotSupported(f"the adapters of {self.file.arch} models are given when they are loaded: "
                           f"load_model(path, lora=[(adapter, scale)])")

    def set_control_vectors(self, vectors=(), first=1, last=None):
        raise NotSupported(f"{self.file.arch} models take no control vectors; load a llama model")

    def shift_context(self, n_keep, n_discard):
        raise NotSupported(f"{self.file.arch} models keep no text between calls; load a llama model")

    def save_state(self, path=None):
        raise NotSupported(f"{self.file.arch} models keep no text between calls; load a llama model")

    def load_state(self, state):
        raise NotSupported(f"{self.file.arch} models keep no text between calls; load a llama model")

    def chat_prompt(self, messages, tools=None, add_generation_prompt=True, template=None, **variables):
        raise NotSupported(f"{self.file.arch} models do not generate text; load a llama model")

    def hidden(self, ids):
        raise NotSupported(f"{self.file.arch} models have no hidden states here")

    def logits(self, ids):
        raise NotSupported(f"{self.file.arch} models have no logits; load a llama model")
