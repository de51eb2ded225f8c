"""llama.cpp's own samplers and grammars (the xllamacpp wheel); a process of its own, so that no two ggml
libraries meet.

    python llamacpp_oracle.py < jobs.json > answers.json        jobs: [[name of a function below, its arguments], ...]
"""
import ctypes as C
import glob
import importlib.util
import json
import math
import os
import platform
import sys

P, I, F, S = C.c_void_p, C.c_int32, C.c_float, C.c_size_t
NO_SEED = 1


class Token(C.Structure):
    _fields_ = [("id", I), ("logit", F), ("p", F)]


class Tokens(C.Structure):
    _fields_ = [("data", C.POINTER(Token)), ("size", S), ("selected", C.c_int64), ("sorted", C.c_bool)]


class Blob(C.Structure):
    _fields_ = [("b", C.c_uint8 * 512)]


@C.CFUNCTYPE(None, C.c_int, C.c_char_p, P)
def quiet(level, text, data):
    pass


def library():
    folder = importlib.util.find_spec("xllamacpp").submodule_search_locations[0]
    lib = C.CDLL(glob.glob(os.path.join(folder, "xllamacpp*.so"))[0])
    for name, args in {
            "penalties": (I, I, F, F, F), "dry": (P, F, F, I, I, P, S), "top_n_sigma": (F,), "top_k": (I,),
            "typical": (F, S), "top_p": (F, S), "min_p": (F, S), "xtc": (F, F, S, C.c_uint32),
            "temp_ext": (F, F, F), "temp": (F,), "mirostat": (I, C.c_uint32, F, F, I),
            "mirostat_v2": (C.c_uint32, F, F), "adaptive_p": (F, F, C.c_uint32),
            "logit_bias": (I, I, P), "grammar": (P, C.c_char_p, C.c_char_p),
            "grammar_lazy_patterns": (P, C.c_char_p, C.c_char_p, P, S, P, S)}.items():
        f = getattr(lib, f"llama_sampler_init_{name}")
        f.restype, f.argtypes = P, args
    for name, result, args in (
            ("llama_sampler_apply", None, (P, P)), ("llama_sampler_accept", None, (P, I)),
            ("llama_sampler_free", None, (P,)), ("llama_sampler_clone", P, (P,)),
            ("llama_model_default_params", Blob, ()), ("llama_model_load_from_file", P, (C.c_char_p, Blob)),
            ("llama_model_get_vocab", P, (P,)),
            ("llama_vocab_n_tokens", I, (P,)), ("llama_log_set", None, (P, P)), ("llama_backend_init", None, ())):
        f = getattr(lib, name)
        f.restype, f.argtypes = result, args
    lib.llama_log_set(C.cast(quiet, P), None)
    lib.llama_backend_init()
    return lib


LIB = library()
MODELS = {}


def vocabulary(path):
    """The vocabulary of a GGUF file, nothing else of it loaded."""
    if path not in MODELS:
        params = LIB.llama_model_default_params()
        assert bytes(params.b[72:76]) == b"\0\0\1\0", "llama_model_params moved"
        params.b[72] = 1                                        # vocab_only
        MODELS[path] = LIB.llama_model_load_from_file(os.fsencode(path), params)
    return LIB.llama_model_get_vocab(MODELS[path])


def chain(o, n_vocab, path=None):
    """Samplers in the order of llama.cpp's default chain."""
    new = {name: getattr(LIB, f"llama_sampler_init_{name}") for name in (
        "penalties", "dry", "top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc", "temp_ext")}
    texts = [t.encode() for t in o["dry_sequence_breakers"]] if path else []
    breakers = (C.c_char_p * len(texts))(*texts)
    return [new["penalties"](n_vocab, o["penalty_last_n"], o["repeat_penalty"], o["frequency_penalty"],
                             o["presence_penalty"]),
            new["dry"](vocabulary(path) if path else None, o["dry_multiplier"], o["dry_base"],
                       o["dry_allowed_length"], o["dry_penalty_last_n"], breakers, len(texts)),
            new["top_n_sigma"](o["top_n_sigma"]), new["top_k"](o["top_k"]), new["typical"](o["typical_p"], 0),
            new["top_p"](o["top_p"], 0), new["min_p"](o["min_p"], 0),
            new["xtc"](o["xtc_probability"], o["xtc_threshold"], 0, NO_SEED),
            new["temp_ext"](o["temp"], o["dynatemp_range"], o["dynatemp_exponent"])]


def tokens(logits):
    data = (Token * len(logits))(*(Token(i, x, 0) for i, x in enumerate(logits)))
    return Tokens(C.cast(data, C.POINTER(Token)), len(logits), -1, False), data


def kept(array):
    """{id: probability} of what is left, in float64."""
    found = {array.data[i].id: array.data[i].logit for i in range(array.size)}
    top = max(found.values())
    e = {i: math.exp(x - top) for i, x in found.items()}
    total = math.fsum(e.values())
    return {i: x / total for i, x in e.items() if x}


def probabilities(options, logits, last, path=None):
    """What llama.cpp's chain leaves of a row of logits, after the ids `last`."""
    samplers, (array, _data) = chain(options, len(logits), path), tokens(logits)
    for s in samplers:
        for id in last:
            LIB.llama_sampler_accept(s, id)
        LIB.llama_sampler_apply(s, C.byref(array))
        LIB.llama_sampler_free(s)
    return kept(array)


def mirostat(options, rows):
    """The candidates of each draw and the one drawn: [({id: probability}, id)]."""
    o = options
    s = LIB.llama_sampler_init_mirostat(len(rows[0]), NO_SEED, o["mirostat_tau"], o["mirostat_eta"], 100) \
        if o["mirostat"] == 1 else LIB.llama_sampler_init_mirostat_v2(NO_SEED, o["mirostat_tau"], o["mirostat_eta"])
    out = []
    for row in rows:
        array, _data = tokens([x / o["temp"] for x in row])
        LIB.llama_sampler_apply(s, C.byref(array))
        out.append((kept(array), array.data[array.selected].id))
    LIB.llama_sampler_free(s)
    return out


def adaptive_p(options, rows):
    """The candidates of each draw and the one drawn: [({id: probability}, id)]."""
    s, out = LIB.llama_sampler_init_adaptive_p(options["adaptive_target"], options["adaptive_decay"], NO_SEED), []
    for row in rows:
        array, _data = tokens(row)
        LIB.llama_sampler_apply(s, C.byref(array))
        out.append((kept(array), array.data[array.selected].id))
        LIB.llama_sampler_accept(s, out[-1][1])
    LIB.llama_sampler_free(s)
    return out


class Text(C.Structure):
    """What a std::string of GCC's older layout points to, its characters at the end."""
    _fields_ = [("size", S), ("capacity", S), ("n_more_owners", I)]


def schema(text):
    """llama.cpp's GBNF of a JSON Schema; None where the wheel's C++ functions are not those known here.

    They are called as GCC does on x86-64: a class is returned by a pointer that comes first.
    """
    parse, convert = (getattr(LIB, name, None) for name in (
        "_ZN11common_json5parseERKSs", "_Z22json_schema_to_grammarRK11common_jsonb"))
    if not parse or not convert or platform.machine() != "x86_64":
        return None
    parse.restype, parse.argtypes, convert.restype, convert.argtypes = None, (P, P), None, (P, P, C.c_bool)
    data, json_, found = text.encode(), (C.c_uint8 * 256)(), P()
    raw = C.create_string_buffer(bytes(Text(len(data), len(data), 0)) + data + b"\0")
    given = P(C.addressof(raw) + C.sizeof(Text))
    parse(json_, C.byref(given))
    convert(C.byref(found), json_, True)
    n = Text.from_address(found.value - C.sizeof(Text)).size
    return C.string_at(found.value, n).decode()


def grammar(path, text, ids, patterns=(), trigger_ids=()):
    """The ids that a grammar allows at first and after each of `ids`, up to one that it does not allow, which would end
    the process.  patterns, trigger_ids: of a lazy grammar."""
    vocab, out = vocabulary(path), []
    n = LIB.llama_vocab_n_tokens(vocab)
    if patterns or trigger_ids:
        texts = (C.c_char_p * len(patterns))(*(p.encode() for p in patterns))
        s = LIB.llama_sampler_init_grammar_lazy_patterns(vocab, text.encode(), b"root", texts, len(patterns),
                                                         (I * len(trigger_ids))(*trigger_ids), len(trigger_ids))
    else:
        s = LIB.llama_sampler_init_grammar(vocab, text.encode(), b"root")
    for id in [None, *ids]:
        if out and id not in out[-1]:
            break
        if id is not None:
            LIB.llama_sampler_accept(s, id)
        array, _data = tokens([0.0] * n)
        LIB.llama_sampler_apply(s, C.byref(array))
        out.append([array.data[i].id for i in range(array.size) if array.data[i].logit > -math.inf])
    LIB.llama_sampler_free(s)
    return out


if __name__ == "__main__":
    json.dump([globals()[name](*args) for name, args in json.load(sys.stdin)], sys.stdout)
