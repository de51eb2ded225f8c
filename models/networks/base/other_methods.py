"""Names of other libraries' model methods with their equivalents in ggjit, for the message of an AttributeError."""
import difflib

from ggjit.ops.core.errors import TypeMismatch

OF_MODELS = {
    "perplexity": "ggjit.models.perplexity(m, text)", "loss": "m.score(text).logprob",
    **dict.fromkeys(("finetune", "train", "fit"), "ggjit.models.finetune(PATH, data=text, out=\"adapter.gguf\")"),
    **dict.fromkeys(("create_completion", "complete", "completion", "predict"), "m.generate(prompt, n_predict=64)"),
    **dict.fromkeys(("create_chat_completion", "chat_completion", "apply_chat_template"), "m.chat(messages)"),
    **dict.fromkeys(("create_embedding", "get_embeddings"), "m.embed(texts)"),
    "encode": "m.tokenize(text)", "convert_ids_to_tokens": "m.detokenize(ids)",
    **dict.fromkeys(("config", "hparams", "summary"), "m.description, or m at the end of a cell"),
    **dict.fromkeys(("metadata", "arch"), "m.file.metadata"),
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "get_tensor"),
                    "m.weights[\"blk.0.attn_q.weight\"].numpy()"),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "device", "dtype"),
                    "load_model(path, backend=\"CUDA0\"); a model stays where it was loaded"),
    "eval": "nothing: networks here only compute, m.logits(text)", "forward": "m.logits(text)",
    **dict.fromkeys(("run_with_cache", "trace", "activations", "hooks", "register_forward_hook", "add_hook"),
                    "m.capture(\"blk.*.l_out\", text)"),
    **dict.fromkeys(("intervene", "run_with_hooks", "edit"), "with m.patch({\"blk.3.ffn_out\": f}): ..."),
    "lens": "m.logit_lens(text)", "attentions": "m.attention(text)", "layers": "m.names()",
    **dict.fromkeys(("peak", "memory", "measure", "memory_footprint"), "gg.measure(m)"),
    "plan": "gg.explore(m)", **dict.fromkeys(("save", "save_pretrained"), "m.save_state(path) for the text so far"),
    **dict.fromkeys(("close", "unload"), "m.free()"), "stats": "m.generate(prompt).stats",
    "vocab": "m.tokenizer",
    **dict.fromkeys(("n_params", "n_layer", "n_layers", "num_layers", "n_embd", "d_model", "hidden_size", "n_head",
                     "n_vocab", "vocab_size"), "m.description, or m at the end of a cell"),
    **dict.fromkeys(("keys", "values", "past_key_values", "kv_cache"), "m.kv(layer)"),
    **dict.fromkeys(("lora", "adapters", "set_adapter", "load_adapter", "load_lora", "set_lora_scale"),
                    "m.set_lora([(path, 0.5)])"),
    **dict.fromkeys(("control_vector", "control_vectors", "steer", "set_control_vector"),
                    "m.set_control_vectors([(path, 1.5)])"),
    **dict.fromkeys(("batch", "generate_batch", "generate_many", "generate_all", "generate_texts"),
                    "m.generate([prompt, prompt], n_predict=64)"),
    "similarity": "m.embed(texts) @ m.embed(texts).T", "blk": "m.weights[\"blk.0.attn_q.weight\"]",
    "cache": "m.kv(layer)", "saliency": "m.attribution(text).saliency", "gradients": "m.attribution(text)",
}


def no_items(model, name):
    """Errors: TypeMismatch, always: a model has several kinds of items."""
    raise TypeMismatch(f"a model has no items: m.weights[{name!r}] is a weight, m.capture({name!r}, text) a value of a "
                       f"step, m.file.metadata[{name!r}] an entry of the file")


def of_a_model(model, name):
    """"; write ..." for a name that a model lacks, the nearest of its own, or ""."""
    if name in OF_MODELS:
        return f"; write {OF_MODELS[name]}"
    close = difflib.get_close_matches(name, [n for n in dir(type(model)) if not n.startswith("_")], 1, 0.7)
    return f" (did you mean {close[0]}?)" if close else ""
