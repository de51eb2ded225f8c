"""Texts that a decoder generates and scores.  Functions of `self` are methods of Decoder."""
from ggjit.core.arguments import lists_options
from ggjit.models.core.other_options import GENERATION, takes_other_names
from ggjit.models.text import chat_template
from ggjit.models.text.generation import GENERATION_OPTIONS, Generation
from ggjit.models.text.generations import Generations, is_many
from ggjit.models.text.infill import infill_ids
from ggjit.models.text.logprobs import ScoredText, checked_count, token_of
from ggjit.models.text.picture_prompt import ids_with_pictures, pictures_and_sounds, without_pictures
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import ParamError, TypeMismatch


@lists_options(GENERATION_OPTIONS)
@takes_other_names(GENERATION)
def generate(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, images=(), audio=(), **options):
    """Iterator over pieces of text that continue `prompt`; `.stats` afterwards, with "stop_reason".

    n_predict: tokens at most, -1 for no limit.  temp: temperature; 0 always takes the likeliest token.  stop: texts
    or ids that end it; no part of such a text comes out.  ignore_eos: the model's own ends are never chosen.
    Others: llama.cpp's options and defaults of sampling (top_k=40, top_p=0.95, min_p=0.05, seed ...), listed in
    models/text/sampling.py.
    grammar: GBNF text that the answer fits; json_schema: a JSON Schema that it fits, as a dict or text;
    grammar_triggers: texts, compiled patterns and ids from which on it fits (before the first all is allowed).
    logprobs: a number k; then every one of `.tokens` has the log-probability that the model gave it, before
    sampling and grammars, and the k likeliest tokens there; stats["logprobs"] holds them for JSON.
    `.text`: the whole text, `.tokens`: its tokens (models/text/generation.py); in a notebook cell both are shown.
    speculative: "lookup" (the text itself), "mtp" (a layer of the model's own that was trained to guess, where the
    file has one), a smaller Decoder of the same vocabulary or a Drafter (EAGLE-3, DFlash, Gemma 4's assistant) guess
    what follows; several tokens are computed at once, and those that are right are kept: the text is the same, faster
    where guesses come true; where they do not pay, they end.  stats["drafted_tokens"] and stats["accepted_tokens"]
    count them.
    cache_prompt=False: what the prompt shares with the text before it is read again, too.  context_shift=True: when
    the context is full, half of what follows the first n_keep (0) tokens is dropped; else the text ends there.
    A list of prompts: an iterator over (number, piece), up to n_seqs texts at once; `runs[i].stats`, `runs.texts`.
    images: pictures, as encode_image takes them, at the marks "<__media__>" of the prompt, or before it.
    audio: sounds, as encode_audio takes them, behind the pictures at these marks, or before the prompt.
    """
    if media := pictures_and_sounds(images, audio):
        if not isinstance(prompt, str):
            raise TypeMismatch(f"pictures and sounds belong to a text, got {type(prompt).__name__}; a call for each "
                               f"prompt")
        prompt = ids_with_pictures(self, prompt, media)
    kind = Generations if is_many(prompt) else Generation
    return kind(self, prompt, n_predict, stop, ignore_eos, temp=temp, **options)


def infill(self, before, after, n_predict=64, others=(), suffix_first=False, **options):
    """Iterator over pieces of the text between `before` and `after`, by a model that was trained to fill in the
    middle (mostly of code).

        m.infill("def add(a, b):\\n    return ", "\\n\\nprint(add(1, 2))").text

    others: (name, text) of other files that it may look at.  suffix_first: the order in which some models were
    trained.  options: as in `generate`.
    Errors: those of `generate`; NotSupported for a vocabulary without the tokens for it.
    """
    ids = infill_ids(self.tokenizer, before, after, others, suffix_first, self.file.path)
    return self.generate(ids, n_predict, **options)


def score(self, texts, logprobs=0):
    """A ScoredText of each text: `.tokens` with the log-probability of each given all before it, `.logprob`, their
    sum in nats, `.perplexity`.  The first token has none: nothing is before it.  The text so far is forgotten.

    texts: a list of texts or of lists of token ids; one text or list of ids gives one ScoredText.
    logprobs: how many alternatives each token has, 0 for none.
    Errors: ParamError for an empty list and a text that is longer than the context, TypeMismatch, IndexRangeError.

        m.score(["It was a truth", "It truth a was"])[0].logprob
    """
    n_alternatives = checked_count(0 if logprobs is None else logprobs)
    many = is_many(texts)
    if not isinstance(texts, str | list | tuple) or not len(texts):
        raise ParamError("score takes a text that is not empty, or a list of texts or token ids with at least one")
    all_ids = [self._checked_ids(x, self.n_ctx) for x in (texts if many else [texts])]
    scored = [_scored(self, ids, n_alternatives) for ids in all_ids]
    return scored if many else scored[0]


def _scored(self, ids, n_alternatives):
    tokens = [token_of(self.tokenizer, int(ids[0]))]
    with self._lock:
        self.reset()
        for start in range(0, len(ids), self.n_batch):
            logits = self._finite(self.decode(ids[start:start + self.n_batch], all_logits=True), "the logits")
            following = ids[start + 1:start + 1 + len(logits)].tolist()
            tokens += [token_of(self.tokenizer, id, row, n_alternatives)
                       for id, row in zip(following, logits, strict=False)]
    return ScoredText(tokens)


def chat_prompt(self, messages, tools=None, add_generation_prompt=True, template=None, **variables):
    """(text, ids) of a conversation, a list of {"role": ..., "content": ...}, by the chat template in the file.

    tools, variables: passed on to it.  template: another one, as Jinja text or by name ("chatml", one in the file).
    A message may hold pictures and sounds among the parts of its content: {"type": "image", "image": path or array},
    {"type": "audio", "audio": path or samples}.
    Errors: ParamError for messages that do not fit, ModelError for a template that is missing or fails.
    """
    messages, pictures = without_pictures(messages) if isinstance(messages, list | tuple) else (messages, [])
    prompt = chat_template.chat_prompt(self.file, self.tokenizer, messages, tools, add_generation_prompt, template,
                                       **variables)
    if not pictures:
        return prompt
    ids = ids_with_pictures(self, prompt.text, pictures, special=True)
    bos = [self.tokenizer.bos_id] if self.tokenizer.add_bos else []
    return prompt._replace(ids=ids if ids[:1] == bos else bos + ids)


@lists_options(GENERATION_OPTIONS)
@takes_other_names(GENERATION)
def chat(self, messages, n_predict=-1, tools=None, template=None, variables=None, **options):
    """Iterator over the pieces of the answer to a conversation, as `generate` gives them.

    messages, tools, template, variables: as in `chat_prompt`.  options: as in `generate`, but that the temperature
    is llama.cpp's 0.8 unless given.
    """
    ids = self.chat_prompt(messages, tools, template=template, **(variables or {})).ids
    return self.generate(ids, n_predict, **{"temp": OPTIONS["temp"].default, **options})
