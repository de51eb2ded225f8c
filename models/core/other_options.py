"""Names that other libraries use for ggjit's options: one table for each kind of call.

    max_new_tokens=64       n_predict=64                    transformers; the same meaning: taken
    do_sample=False         temp=0                          taken
    num_beams=4             ParamError with what to write   no such thing here: told

Libraries: llama.cpp and llama-cpp-python, Ollama, OpenAI's API, transformers and PEFT, vLLM.
"""
import functools
import inspect

from ggjit.ops.core.errors import ParamError


def _named(name):
    return lambda value: {name: value}


def _only(harmless, instead):
    """An option of which some values have no effect here and are accepted; others are errors that say what to write
    instead."""
    def taken(value):
        if not any(value is x or type(value) is type(x) and value == x for x in harmless):
            raise ParamError(instead)
        return {}
    return taken


def _refused(instead):
    def taken(value):
        raise ParamError(instead)
    return taken


def _sampled(value):
    return {} if value else {"temp": 0.0}


def _format(value):
    kind = value.get("type") if isinstance(value, dict) else None
    schema = value.get("json_schema", value.get("schema", {})) if kind else {}
    if kind == "text":
        return {}
    if kind not in ("json_object", "json_schema"):
        raise ParamError("json_schema={...} makes answers fit a JSON Schema, json_schema={} any JSON, grammar=TEXT a "
                         "GBNF grammar")
    return {"json_schema": schema.get("schema", schema) or {}}


ONE_TEXT = "one call gives one text: m.generate([prompt] * 3, temp=0.8) gives three, of seeds of their own"
# {name elsewhere: function of the value -> {name here: value}}
GENERATION = {
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_completion_tokens", "num_predict", "n_tokens_predict"),
                    _named("n_predict")),
    "temperature": _named("temp"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_token_ids", "eos_token_id"), _named("stop")),
    "repetition_penalty": lambda value: {"repeat_penalty": value, "penalty_last_n": -1},
    "repeat_last_n": _named("penalty_last_n"),
    "mirostat_mode": _named("mirostat"), "mirostat_ent": _named("mirostat_tau"), "mirostat_lr": _named("mirostat_eta"),
    **dict.fromkeys(("random_seed", "rng_seed"), _named("seed")),
    "do_sample": _sampled,
    "top_logprobs": _named("logprobs"),
    "response_format": _format,
    "guided_json": _named("json_schema"), "guided_grammar": _named("grammar"),
    **dict.fromkeys(("stream", "use_cache", "verbose", "return_dict_in_generate", "pad_token_id"), lambda value: {}),
    "num_beams": _only((1, None), "there is no beam search: temp=0 takes the likeliest token at each step, and "
                                  "logprobs=5 tells the others"),
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"),
                    _refused("it belongs to beam search, which there is not; temp=0 takes the likeliest token")),
    **dict.fromkeys(("n", "num_return_sequences", "best_of"), _only((1, None), ONE_TEXT)),
    **dict.fromkeys(("system", "system_prompt", "system_message"), _refused(
        "it is a message: m.chat([{'role': 'system', 'content': TEXT}, {'role': 'user', 'content': QUESTION}])")),
    "max_length": _refused("max_length counts the prompt too; n_predict=64 counts new tokens"),
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"),
                    _refused("ignore_eos=True goes on to n_predict tokens, whatever the model's own end is")),
    "no_repeat_ngram_size": _refused("dry_multiplier=0.8 makes repeated sequences less likely, repeat_penalty=1.1 "
                                     "repeated tokens"),
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens"),
                    _refused("logit_bias={id: -math.inf} never lets a token out")),
    **dict.fromkeys(("output_scores", "output_logits", "echo"),
                    _refused("logprobs=5 gives the log-probabilities of g.tokens, m.score(text) those of a text")),
    **dict.fromkeys(("output_hidden_states", "output_attentions"),
                    _refused("m.hidden_states(text), m.attention(text) and m.capture(names, text) give them")),
    **dict.fromkeys(("stopping_criteria", "callback", "streamer"),
                    _refused("generate gives an iterator: `for piece in m.generate(prompt):` prints, or breaks")),
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn"),
                    _refused("grammar= and logit_bias= choose what comes; m.patch({'logits': f}) changes logits")),
    "skip_special_tokens": _only((True, None), "control tokens are not part of the text; "
                                               "m.detokenize(ids, special=True) shows them"),
    "tfs_z": _only((1, 1.0, None), "llama.cpp has taken tail-free sampling out; top_p, min_p and typical_p filter"),
    "chat_template": _named("template"),
}


def _device(value):
    text = str(value)
    for theirs, ours in (("cuda:", "CUDA"), ("cuda", "CUDA0"), ("cpu", "CPU")):
        if text.lower() == theirs or theirs.endswith(":") and text.lower().startswith(theirs):
            return {"backend": ours + text[len(theirs):]}
    return {"backend": value}


QUANTISED = "the file's own types are computed: `ggjit quantize IN.gguf OUT.gguf Q8_0` makes another file"
LOADING = {
    **dict.fromkeys(("context_length", "ctx_size", "max_seq_len", "max_seq_length", "max_model_len", "num_ctx",
                     "n_context"), _named("n_ctx")),
    **dict.fromkeys(("threads", "num_threads", "num_thread", "n_thread"), _named("n_threads")),
    **dict.fromkeys(("batch_size", "num_batch", "n_ubatch"), _named("n_batch")),
    **dict.fromkeys(("gpu_layers", "ngl", "num_gpu"), _named("n_gpu_layers")),
    **dict.fromkeys(("flash_attn", "flash_attention"), _named("flash")),
    "n_seq_max": _named("n_seqs"), "device": _device, "model_path": _named("path"),
    **dict.fromkeys(("cache_type", "kv_cache_dtype"), _named("kv_type")),
    **dict.fromkeys(("cache_type_k", "cache_type_v", "type_k", "type_v"),
                    _refused("kv_type=\"Q8_0/Q4_0\" says the type of keys and that of values")),
    **dict.fromkeys(("lora_path", "lora_adapter", "adapter"),
                    lambda value: {"lora": value if isinstance(value, list) else [(value, 1.0)]}),
    **dict.fromkeys(("verbose", "trust_remote_code", "low_cpu_mem_usage", "logits_all", "embedding"), lambda value: {}),
    **dict.fromkeys(("use_mmap", "mmap"), _only((True, None), "weights are mapped, always; m.weights[name].numpy() "
                                                              "is a copy")),
    **dict.fromkeys(("use_mlock", "mlock"), _only((False, None), "weights are not locked in memory; repack=True keeps "
                                                                 "matrices in memory of the process")),
    **dict.fromkeys(("dtype", "torch_dtype", "load_in_4bit", "load_in_8bit", "quantization_config"),
                    _refused(QUANTISED)),
    "device_map": _refused("n_gpu_layers=20 puts layers on a GPU, devices=[...] spreads them over several"),
    "seed": _refused("a seed is an option of m.generate(prompt, temp=0.8, seed=1)"),
    **dict.fromkeys(("temp", "temperature", "top_p", "top_k", "max_tokens", "n_predict"),
                    _refused("it is an option of m.generate(prompt, n_predict=64, temp=0.8)")),
    **dict.fromkeys(("control_vector", "control_vectors"),
                    _refused("m.set_control_vectors([(path, 1.5)]) adds them to a model that was loaded")),
    "chat_format": _refused("m.chat(messages, template='chatml') takes another template than the file's"),
}
FINETUNING = {
    "learning_rate": _named("lr"),
    **dict.fromkeys(("num_train_epochs", "n_epochs", "num_epochs"), _named("epochs")),
    **dict.fromkeys(("max_steps", "n_steps"), _named("steps")),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), _named("batch")),
    **dict.fromkeys(("lora_r", "r"), _named("rank")), "lora_alpha": _named("alpha"),
    "target_modules": _named("targets"), "threads": _named("n_threads"),
    **dict.fromkeys(("max_seq_length", "max_length", "block_size", "context_length"), _named("n_ctx")),
    **dict.fromkeys(("train_dataset", "dataset", "text"), _named("data")),
    **dict.fromkeys(("output", "output_dir", "output_path"), _named("out")),
    "overwrite_output_dir": _named("force"), "verbose": _named("progress"),
    "lora_dropout": _only((0, 0.0, None), "adapters are trained without dropout"),
    "warmup_steps": _refused("lr= takes a function of the step: lr=lambda step: 2e-4 * min(1, step / 20)"),
    "weight_decay": _refused("AdamW's decay is not set here; fewer epochs or a smaller rank keep an adapter small"),
}


def takes_other_names(table):
    """Decorator: keyword arguments may have the names of `table`.

    Errors: ParamError for one that means nothing here, with what to write, and for one given twice.
    """
    def decorate(function):
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if not table.keys().isdisjoint(kwargs):
                kwargs = _own_names(function.__name__, table, kwargs, names[:len(args)])
            return function(*args, **kwargs)
        return call
    return decorate


def _own_names(what, table, given, positional):
    own = {name: value for name, value in given.items() if name not in table}
    for name in given.keys() - own.keys():
        try:
            taken = table[name](given[name])
        except ParamError as e:
            raise ParamError(f"{what}: {name}={given[name]!r}: {e}") from None
        for here, value in taken.items():
            if here in positional or here in own:
                raise ParamError(f"{what}: {name} is {here}, which is given, too; leave out {name}")
            own[here] = value
    return own
