"""llama-quantize's mixtures: the type of each tensor when a model is quantised.

    "Q4_K_M"  ->  base type Q4_K; attn_v and ffn_down of some layers Q6_K, the output matrix Q6_K, norms as they are

Types go up where rounding hurts most (values of attention, ffn_down, first and last layers, the output) and down
where it hurts least.  Rows that are no multiple of a type's block get a type with shorter blocks.
Source: llama.cpp's llama-quant.cpp, whose choices these are tensor by tensor.
"""
import dataclasses
import functools
import re

from ggjit.core.arguments import nearest
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.types import BY_NAME, F16, I8, I16, I32, I64, Type

# {name: (general.file_type, base type)}
FILE_TYPES = {
    "F32": (0, "f32"), "F16": (1, "f16"), "BF16": (32, "bf16"),
    "Q4_0": (2, "q4_0"), "Q4_1": (3, "q4_1"), "Q5_0": (8, "q5_0"), "Q5_1": (9, "q5_1"), "Q8_0": (7, "q8_0"),
    "Q2_K": (10, "q2_K"), "Q2_K_S": (21, "q2_K"), "Q3_K_S": (11, "q3_K"), "Q3_K_M": (12, "q3_K"),
    "Q3_K_L": (13, "q3_K"), "Q4_K_S": (14, "q4_K"), "Q4_K_M": (15, "q4_K"), "Q5_K_S": (16, "q5_K"),
    "Q5_K_M": (17, "q5_K"), "Q6_K": (18, "q6_K"),
    "IQ1_S": (24, "iq1_s"), "IQ1_M": (31, "iq1_m"), "IQ2_XXS": (19, "iq2_xxs"), "IQ2_XS": (20, "iq2_xs"),
    "IQ2_S": (28, "iq2_xs"), "IQ2_M": (29, "iq2_s"), "IQ3_XXS": (23, "iq3_xxs"), "IQ3_XS": (22, "iq3_s"),
    "IQ3_S": (26, "iq3_s"), "IQ3_M": (27, "iq3_s"), "IQ4_NL": (25, "iq4_nl"), "IQ4_XS": (30, "iq4_xs"),
    "TQ1_0": (36, "tq1_0"), "TQ2_0": (37, "tq2_0"), "MXFP4_MOE": (38, "mxfp4"),
    "Q1_0": (40, "q1_0"), "Q2_0": (41, "q2_0")}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# a row that is no multiple of the block on the left: this type instead; F16 if that does not fit either, and for blocks
# of 32
SHORTER_BLOCKS = {**dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"),
                                  "iq4_nl"),
                  **dict.fromkeys(("q2_0", "q2_K", "q3_K", "tq1_0", "tq2_0"), "q4_0"),
                  "q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}
# types for weights: integers would cut real numbers off, Q8_1 and Q8_K are for activations
WEIGHT_TYPES = tuple(t for t in BY_NAME.values() if t not in (I8, I16, I32, I64)
                     and t.name not in ("q8_1", "q8_K"))
# types that need importances (ggml also writes some of them without, and poorly)
NEED_IMPORTANCES = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
# parts of names of tensors that stay as they are
KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
        "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight",
        *(f"time_mix_{n}.weight" for n in ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2",
                                           "decay_w1", "decay_w2", "lerp_fused")),
        "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
        ".patch_merger", "a.rvq.codebook", "mm.a.code_embd")
KEPT_WHOLE = ("position_embd.weight", "token_types.weight")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
ROLES = {"attn_qkv.weight": "qkv", "attn_kv_b.weight": "kv_b", "attn_v.weight": "v", "attn_k.weight": "k",
         "attn_q.weight": "q", "attn_output.weight": "attn_output", "ffn_up": "ffn_up", "ffn_gate": "ffn_gate",
         "ffn_down": "ffn_down"}
VALUES = ("qkv", "kv_b", "v")           # roles of matrices that hold the values of attention
# (architecture, layers) that llama.cpp takes for a model of 70 billion weights
SEVENTY_B = {("llama", 80), ("qwen2", 80), ("olmo", 80), ("deci", 80), ("jais2", 68)}
LAYER = re.compile(r"blk\.(\d+)\.")


def file_type(name):
    """(name as llama.cpp writes it, general.file_type, base Type) of "q4_k_m".  Errors: ParamError."""
    known = str(getattr(name, "name", name)).upper()
    known = ALIASES.get(known, known)
    if known not in FILE_TYPES:
        raise ParamError(f"no type {name!r} of a file{nearest(known, FILE_TYPES)}; there are {', '.join(FILE_TYPES)}")
    number, base = FILE_TYPES[known]
    return known, number, BY_NAME[base]


def tensor_type(name):
    """The Type of weights that "q4_K" names, in any case, or a Type.  Errors: ParamError."""
    types = {n.lower(): t for n, t in BY_NAME.items() if t in WEIGHT_TYPES}
    if isinstance(name, Type) and name.is_own:
        raise ParamError(f"{name!r} is a type of your own, which no file holds; m.quantize(type) gives a model in "
                         f"memory")
    name = name.name if isinstance(name, Type) else name
    if not isinstance(name, str) or name.lower() not in types:
        raise ParamError(f"no tensor type {name!r}{nearest(str(name).lower(), types)}; there are {', '.join(types)}")
    return types[name.lower()]


@functools.lru_cache(1 << 14)
def role_of(name):
    """The role of a tensor: output, embd, one of ROLES' values, or other."""
    if name == "output.weight":
        return "output"
    if name in EMBEDDINGS:
        return "embd"
    return next((role for part, role in ROLES.items() if part in name), "other")


def is_quantised(info, leave_output):
    """Does this tensor of a model change its type?  Vectors, norms, routers and small matrices do not."""
    return n_dims(info.ne) > 1 and _changes(info.name) and not (leave_output and info.name == "output.weight")


@functools.lru_cache(1 << 14)
def _changes(name):
    return name.endswith("weight") and name not in KEPT_WHOLE and not any(part in name for part in KEPT)


def n_dims(ne):
    """Dimensions less the last ones of length 1."""
    return max((i + 1 for i, n in enumerate(ne) if n != 1), default=1)


def needs_importances(name, type, mixture):
    """Does a tensor of that type need importances?"""
    return role_of(name) not in ("output", "embd") and (
        type.name in NEED_IMPORTANCES or (type.name == "q2_K" and mixture == "Q2_K_S"))


@dataclasses.dataclass
class QuantizeParams:
    """Options of a quantisation besides the mixture."""
    tensor_types: tuple = ()            # ((compiled pattern, Type), ...): the first that matches a name decides
    output: Type | None = None
    embedding: Type | None = None
    leave_output: bool = False
    pure: bool = False


def choose_types(file, tensors, mixture, choice, has_importances):
    """{name: Type} for `tensors`, TensorInfos of `file` in llama.cpp's order: the n-th attn_v counts as layer n.

    mixture: a name of FILE_TYPES.  Errors: ModelError (metadata), ParamError (a type that no row fits).
    """
    rules = _Rules(file, tensors, mixture, choice, has_importances)
    return {info.name: rules.type_of(info) if is_quantised(info, choice.leave_output) else info.type
            for info in tensors}


def _first(value):
    """The value of the first layer, where there is one for each."""
    return int(value[0] if hasattr(value, "__len__") and len(value) else value)


class _Rules:
    def __init__(self, file, tensors, mixture, choice, has_importances):
        self.mixture, self.choice, self.has_importances = mixture, choice, has_importances
        self.base = BY_NAME[FILE_TYPES[mixture][1]]
        self.arch, self.path = file.arch, file.path
        heads = _first(file.arch_get("attention.head_count", 0))
        kv_heads = _first(file.arch_get("attention.head_count_kv", heads))
        self.n_gqa = heads // kv_heads if kv_heads else 0
        self.n_expert = file.arch_get("expert_count", 0, int)
        self.n_layer = file.arch_get("block_count", kind=int)
        self.big = (self.arch, self.n_layer) in SEVENTY_B and not (self.arch == "llama" and heads == kv_heads)
        self.falcon = self.arch == "falcon"
        self.n_values = sum(role_of(info.name) in VALUES for info in tensors)
        self.tied = all(info.name != "output.weight" for info in tensors)
        self.seen = dict.fromkeys(("values", "ffn_down", "ffn_gate", "ffn_up"), 0)

    def type_of(self, info):
        """The type of a tensor; asked in the order of the file.  Errors: ParamError."""
        role, choice = role_of(info.name), self.choice
        if role == "embd" and choice.embedding is not None:
            return choice.embedding
        if role == "output" and choice.output is not None:
            return choice.output
        if not self.base.quantized:
            return self.base
        chosen = next((t for pattern, t in choice.tensor_types if pattern.search(info.name)), None)
        if chosen is None:
            chosen = self.base if choice.pure else BY_NAME[self._mixed(info, role) or self.base.name]
        return self._fitting(info, chosen)

    def _fitting(self, info, t):
        """`t`; where its block does not divide the row, the type of SHORTER_BLOCKS, or F16."""
        if info.ne[0] % t.block == 0:
            return t
        if t.name not in SHORTER_BLOCKS and t.block > 32:
            raise ParamError(f"{self.path}: tensor {info.name!r}: rows of {info.ne[0]} are not multiples of {t!r}'s "
                             f"block of {t.block}, and no other type stands in for it; give it one with --tensor-type")
        t = BY_NAME[SHORTER_BLOCKS.get(t.name, t.name)]
        return t if info.ne[0] % t.block == 0 else F16

    # ------------------------------------------------------------ the mixture: names of types; None: the base type
    def _mixed(self, info, role):
        if role == "output" or (role == "embd" and self.tied):
            return self._output(info)
        if self.mixture == "MXFP4_MOE":
            experts = info.ne[2:3] > (1,) and (self.arch != "bailingmoe3" or role.startswith("ffn_"))
            return "mxfp4" if experts else "q8_0"
        if role == "embd":
            return self._embedding()
        if self.mixture in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M"):
            return self._two_bits(role)
        if role in VALUES:
            return self._values()
        if role in ("k", "q"):
            return self._keys(role)
        if role == "ffn_down":
            return self._down(*self._layer(info, role))
        if role == "attn_output":
            return self._attn_output()
        if role in ("ffn_up", "ffn_gate"):
            i, n = self._layer(info, role)
            return "iq3_xxs" if self.mixture == "IQ3_XS" and n // 8 <= i < 7 * n // 8 else None
        return None

    def _count(self, what):
        """How many tensors of this role came before."""
        self.seen[what] += 1
        return self.seen[what] - 1

    def _layer(self, info, role):
        """(number of the layer, number of layers).  With experts from the name, otherwise they are counted."""
        i = self._count(role)
        if self.n_expert > 1:
            named = LAYER.match(info.name)
            if named is None or int(named[1]) >= self.n_layer:
                raise ModelError(f"{self.path}: tensor {info.name!r} belongs to none of the {self.n_layer} layers; "
                                 f"convert the model again")
            i = int(named[1])
        return i, self.n_layer

    def _output(self, info):
        if self.choice.output is not None:
            return self.choice.output.name
        if self.mixture == "MXFP4_MOE" or self.falcon or info.ne[0] % self.base.block:
            return "q8_0"
        if self.mixture in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS"):
            return "q5_K"
        return None if self.base.name == "q8_0" else "q6_K"

    def _embedding(self):
        return {**dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "q2_K"),
                **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "iq3_s"),
                **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "q4_K")}.get(self.mixture)

    def _two_bits(self, role):
        better = "iq3_s" if self.mixture in ("IQ2_S", "IQ2_M") else "q2_K"
        if role in VALUES:
            return "q4_K" if self.n_gqa >= 4 or self.n_expert >= 4 else better
        if role == "k" and self.n_expert == 8:
            return "q4_K"
        if role == "ffn_down":
            return better if self._count(role) < self.n_layer // 8 else None
        if role == "attn_output":
            if self.n_expert == 8:
                return "q5_K"
            return {"IQ1_S": "iq2_xxs", "IQ1_M": "iq2_xxs", "IQ2_S": "iq3_s", "IQ2_M": "iq3_s"}.get(self.mixture)
        return None

    def _values(self):
        i = self._count("values")
        chosen = self._plain_values(i)
        if self.big and (chosen or self.base.name) in ("q3_K", "q4_K"):
            chosen = "q5_K"             # eight heads share these values: they are small
        return "q8_0" if self.n_expert == 8 else chosen

    def _plain_values(self, i):
        shared = self.n_gqa >= 4
        match self.mixture:
            case "Q2_K":
                return "q4_K" if shared else "q3_K"
            case "Q2_K_S" | "IQ3_XS" | "IQ3_S":
                return "q4_K" if shared else None
            case "IQ3_XXS":
                return "q4_K" if shared else None if self.has_importances else "iq3_s"
            case "IQ3_M":
                return "q4_K"
            case "Q3_K_M":
                return "q5_K" if i < 2 else "q4_K"
            case "Q3_K_L":
                return "q5_K"
            case "IQ4_NL" | "IQ4_XS":
                return "q5_K" if shared else None
            case "Q4_K_M" | "Q5_K_M":
                return "q6_K" if _more_bits(i, self.n_values) else None
            case "Q4_K_S":
                return "q5_K" if i < 4 else None
        return None

    def _keys(self, role):
        if role == "k" and self.n_expert == 8:
            return "q8_0"
        return {"IQ3_XS": "iq3_xxs", "IQ3_XXS": "iq2_s"}.get(self.mixture)

    def _down(self, i, n):
        first, more = i < n // 8, _more_bits(i, n)
        match self.mixture:
            case "Q2_K":
                return "q3_K"
            case "Q2_K_S":
                return "q4_K" if first else None
            case "IQ3_XXS":
                return None if self.has_importances else "q4_K" if first else "q3_K"
            case "Q3_K_M":
                if i < n // 16:
                    return "q5_K"
                return "q4_K" if not self.falcon or more else "q3_K"
            case "IQ3_M":
                return "q4_K" if first or (self.n_expert == 8 and more) else None
            case "Q3_K_L":
                return "q4_K" if self.falcon else "q5_K"
            case "Q4_K_M" if self.falcon:
                return "q6_K" if i < n // 16 else "q5_K" if more else None
            case "Q4_K_M" | "Q5_K_M":
                return "q6_K" if more else None
            case "IQ4_NL" | "IQ4_XS":
                return "q5_K" if first and not self.has_importances else None
            case "Q4_K_S":
                return "q5_K" if first and not self.falcon else None
            case "Q4_0" | "Q5_0":
                return self.base.name[:-1] + "1" if first and self.has_importances else None
        return None

    def _attn_output(self):
        if self.falcon:
            return "q4_K" if self.mixture == "Q3_K_L" else None
        if self.n_expert == 8:
            return "q5_K" if self.mixture in ("Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S",
                                              "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS") else None
        return {"Q2_K": "q3_K", "IQ3_XXS": "iq3_s", "Q3_K_M": "q4_K", "Q3_K_L": "q5_K",
                "IQ3_M": "q4_K"}.get(self.mixture)


def _more_bits(i, n):
    """The first and the last eighth of n layers, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
