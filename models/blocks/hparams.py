"""Hyperparameters of a file, each read from its metadata and checked where it is read."""
import dataclasses
import functools
import math

import numpy as np

from ggjit.models.core.checks import number, one_of
from ggjit.ops.attention.rope_angles import IMROPE, MROPE
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.whole_numbers import is_whole

ROPE_NORMAL, ROPE_NEOX = 0, 2   # pairs of neighbours; pairs half a head apart
MAX_CTX = (1 << 31) - 1         # positions are int32
MAX_EPS = 1.0                   # largest epsilon of a norm; models have 1e-12 to 1e-3
MAX_LAYERS = 1 << 16            # limit of lists with an entry for each layer
ROPE_BASES = 1.0, 1e15          # models have 1e3 to 1e9; up to 1 the angles of later pairs grow instead of shrinking
SCALES = 1e-6, 1e6              # range of the scale factors in files
NON_ROTARY_FACTOR = 1e30        # dividing by it makes an angle 0
MAX_BETA = 1e6                  # largest beta of YaRN, a number of rotations
ROPE_KINDS = "none", "linear", "yarn", "longrope"       # kinds of RoPE scaling
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclasses.dataclass(frozen=True)
class Rope:
    """How queries and keys are rotated: the parameters of gg.rope_ext, in its order, and a tensor of factors."""
    n_dims: int
    mode: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: str = dataclasses.field(default="", metadata={"parameter": False})     # "": none
    unused: tuple = dataclasses.field(default=(), metadata={"parameter": False})    # of other context sizes
    n_factors: int = dataclasses.field(default=0, metadata={"parameter": False})    # in the file; 0: of n_dims
    n_non_rotary: int = dataclasses.field(default=0, metadata={"parameter": False})  # pairs at the end: not rotated
    sections: tuple = dataclasses.field(default=(), metadata={"parameter": False})  # pairs turned by time, row, column,
    interleaved: bool = dataclasses.field(default=False, metadata={"parameter": False})     # 0; in turns?

    @property
    def extra_rotation(self):
        """Parameters that rotate already rotated keys further; YaRN's scale factor, which they have already, is left
        out."""
        grown = 1.0 + 0.1 * math.log(1.0 / self.freq_scale) if self.ext_factor else 1.0
        return dataclasses.replace(self, attn_factor=1.0 / grown).parameters

    @property
    def non_rotary_name(self):
        """Name of the input that holds `non_rotary_factors`."""
        return f"rope_non_rotary_{self.n_non_rotary}"

    @property
    def non_rotary_factors(self):
        """Divisors of the angles; those of the last pairs are so large that these do not rotate."""
        return np.repeat(np.float32([1.0, NON_ROTARY_FACTOR]),
                         [self.n_dims // 2 - self.n_non_rotary, self.n_non_rotary])

    @property
    def parts(self):
        """What gg.rope_multi takes after its tensors, where a position has parts."""
        n_dims, _, *others = self.parameters
        return n_dims, self.sections, IMROPE if self.interleaved else MROPE, *others

    @functools.cached_property
    def parameters(self):
        """The arguments of gg.rope_ext behind its tensors."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("parameter", True))


# {option of load_model: lowest and highest value}
ROPE_NUMBERS = {"rope_freq_base": ROPE_BASES, "rope_freq_scale": SCALES, "rope_scale": SCALES,
                "yarn_ext_factor": (0.0, 1.0), "yarn_attn_factor": SCALES, "yarn_beta_fast": (0.0, 1e6),
                "yarn_beta_slow": (0.0, 1e6)}
ROPE_OPTIONS = ("rope_scaling", *ROPE_NUMBERS, "yarn_orig_ctx")


def rope_options(given):
    """The options of ROPE_OPTIONS that were given, checked; rope_scale becomes 1 / rope_freq_scale.

    Errors: ParamError.
    """
    out = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "rope_scaling":
            out[name] = one_of(name, value, ROPE_KINDS[:-1])
        elif name == "yarn_orig_ctx":
            if not is_whole(value, 1, MAX_CTX):
                raise ParamError(f"yarn_orig_ctx must be an integer from 1 to {MAX_CTX}, got {value!r}")
            out[name] = int(value)
        else:
            low, high = ROPE_NUMBERS[name]
            out[name] = number(name, value)
            if not low <= out[name] <= high:
                raise ParamError(f"{name} must be from {low:g} to {high:g}, got {value!r}")
    if "rope_scale" in out:
        if "rope_freq_scale" in out:
            raise ParamError("rope_scale is 1 / rope_freq_scale: give one of them")
        out["rope_freq_scale"] = 1.0 / out.pop("rope_scale")
    return out


class HParams:
    """`hparams.positive("embedding_length")`; keys are those of the architecture, without its name.

    n_ctx: how many tokens the context will hold, where that is known.  rope: what `rope_options` gives, instead of
    what the file states.  Errors: ModelError, with file and key.
    """

    def __init__(self, file, n_ctx=None, rope=None):
        self.file, self.n_ctx, self._rope = file, n_ctx, rope or {}
        self.n_predicting = 0           # layers at the end that predict later tokens; they are not computed
        self.get = file.arch_get

    def wrong(self, key, value, expected):
        return ModelError(f"{self.file.path}: {self.file.arch}.{key} = {value}, expected {expected}")

    def positive(self, key, default=...):
        """An integer that has to be positive."""
        value = self.get(key, default, int)
        if value is not None and value <= 0:
            raise self.wrong(key, value, "a positive number")
        return value

    def between(self, key, low, high, default=...):
        """A number above low, at most high."""
        value = self.get(key, default, float)
        if not low < value <= high:
            raise self.wrong(key, value, f"a number above {low} and at most {high}")
        return value

    def scale(self, key, default=0.0):
        """A factor, at least SCALES[0]; 0: none."""
        return self.between(key, *SCALES, default) if self.get(key, default, float) else 0.0

    def same(self, key, expected):
        """An integer that may be left out, but has one possible value."""
        value = self.get(key, expected, int)
        if value != expected:
            raise ModelError(f"{self.file.path}: {self.file.arch}.{key} = {value}, only {expected} is served here")

    def one_of(self, key, known, default):
        value = self.get(key, default, type(default))
        if value not in known:
            raise ModelError(f"{self.file.path}: {self.file.arch}.{key} = {value!r} is not supported; supported: "
                             f"{', '.join(map(str, known))}")
        return value

    def has(self, tensor):
        """Does the file hold a tensor of that name?"""
        return tensor in self.file.tensors

    def require(self, tensor):
        """Check that the file has the tensor.  Errors: ModelError."""
        if not self.has(tensor):
            raise ModelError(f"{self.file.path}: tensor {tensor!r} is missing, the {self.file.arch} architecture needs "
                             f"it; convert the model again")

    def ignore(self, *keys):
        """Mark keys as read that say nothing about this architecture."""
        for key in keys:
            self.get(key, None)

    def per_layer(self, key, default=...):
        """[an integer at least 0 for every layer], from a number or an array of all layers of the file."""
        value, n = self.get(key, default), self.n_layer + self.n_predicting
        values = [value] * n if not isinstance(value, np.ndarray) else value.tolist()
        if len(values) != n or not all(type(v) is int and v >= 0 for v in values):
            raise self.wrong(key, value, f"a number at least 0, or {n} of them")
        return values[:self.n_layer]

    def numbers_per_layer(self, key):
        """[a number at least 0 for every layer], from a number or an array of all layers of the file; 0 where none is
        stated."""
        value, n = self.get(key, 0.0), self.n_layer + self.n_predicting
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * n
        if len(values) != n or not all(type(v) in (int, float) and 0 <= v < math.inf for v in values):
            raise self.wrong(key, value, f"a number at least 0, or {n} of them")
        return values[:self.n_layer]

    def flags_per_layer(self, key, default):
        """[true or false for every layer], from an array of all layers of the file."""
        value, n = self.get(key, None), self.n_layer + self.n_predicting
        if value is None:
            return [default] * self.n_layer
        if not isinstance(value, np.ndarray) or len(value) not in (n, self.n_layer):
            raise self.wrong(key, value, f"{n} times true or false")
        return value.astype(bool).tolist()[:self.n_layer]

    def floats_per_layer(self, key):
        """[a number for every layer], from a number or an array under a key without the architecture's name."""
        return self._floats(key, self.file.get(key))

    def floats(self, key, default):
        """[a number for every layer, or minus infinity], from a number or an array."""
        return self._floats(f"{self.file.arch}.{key}", self.get(key, default), -math.inf)

    def _floats(self, key, value, *infinite):
        values = value if isinstance(value, list) else \
            value.tolist() if isinstance(value, np.ndarray) else [value] * self.n_layer
        if len(values) != self.n_layer or not all(type(v) is float and (math.isfinite(v) or v in infinite)
                                              for v in values):
            raise ModelError(f"{self.file.path}: {key} = {value}, expected a number, or {self.n_layer} of them")
        return values

    # ------------------------------------------------------------ what most architectures state
    @property
    def n_embd(self):
        return self.positive("embedding_length")

    @property
    def n_layer(self):
        n = self.positive("block_count")
        if n > MAX_LAYERS:
            raise self.wrong("block_count", n, f"at most {MAX_LAYERS}")
        return n - self.n_predicting

    def leave_predicting(self):
        """The last `nextn_predict_layers` of the file's layers are no part of the network."""
        n = self.get("nextn_predict_layers", 0, int)
        if not 0 <= n < self.positive("block_count"):
            raise self.wrong("nextn_predict_layers", n, f"less than {self.positive('block_count')} layers")
        self.n_predicting = n

    @property
    def n_ff(self):
        return self.positive("feed_forward_length")

    @property
    def n_ctx_train(self):
        return min(self.positive("context_length"), MAX_CTX)

    def eps(self, kind="rms"):
        return self.between("attention.layer_norm_rms_epsilon" if kind == "rms" else "attention.layer_norm_epsilon",
                            0.0, MAX_EPS)

    def heads(self):
        """{n_head, n_head_kv, d_head, d_head_v}: the sizes of Attention."""
        n_head = self.positive("attention.head_count")
        return self._heads(n_head, self.positive("attention.head_count_kv", n_head))

    def heads_per_layer(self, near=(), may_lack=False):
        """[`heads` of every layer], from numbers or arrays.

        may_lack: None stands for a layer with 0 heads of queries or keys, which is refused else.  near: [is it a layer
        with a window?]; those have sizes of their own, where the file states such.
        """
        n_head = self.per_layer("attention.head_count")
        n_head_kv = self.per_layer("attention.head_count_kv", self.get("attention.head_count"))
        for key, counts in (("head_count", n_head), ("head_count_kv", n_head_kv)):
            if 0 in counts and not may_lack:
                raise self.wrong(f"attention.{key}", counts, "a positive number for every layer")
        suffixes = ["_swa" if has_window else "" for has_window in near] or [""] * len(n_head)
        return [self._heads(h, kv, s) if h and kv else None
                for h, kv, s in zip(n_head, n_head_kv, suffixes, strict=True)]

    def _heads(self, n_head, n_head_kv, suffix=""):
        def length(key, default):
            default = self.positive(f"attention.{key}", default) if suffix else default
            return self.positive(f"attention.{key}{suffix}", default)
        if n_head % n_head_kv or (self.n_embd % n_head and not self.get("attention.key_length", 0, int)):
            raise ModelError(f"{self.file.path}: {n_head} heads, {n_head_kv} kv heads and embedding_length "
                             f"{self.n_embd} do not fit together")
        d_head = length("key_length", self.n_embd // n_head)
        return {"n_head": n_head, "n_head_kv": n_head_kv, "d_head": d_head, "d_head_v": length("value_length", d_head)}

    def rope(self, mode, d_head, factors="rope_freqs.weight", kinds=ROPE_KINDS[:-1], n_dims=None,
             beta_fast=None, freq_base=None):
        """The Rope of full attention.  factors: a tensor that may be there (LONG: two, by context size).

        kinds: of scaling that are served.  n_dims: of a head, where it is not what the file says.  beta_fast: of YaRN,
        where the file may state its numbers, and leaves this one out.  freq_base: where it is not what the file says.
        """
        n_dims = n_dims or self.rope_dims("rope.dimension_count", d_head, d_head)
        kind = self.get("rope.scaling.type", "linear", str)     # llama.cpp's: a factor alone counts
        if kind not in kinds:
            raise ModelError(f"{self.file.path}: rope.scaling.type {kind!r} is not supported")
        given, scale = self._rope.get, self.freq_scale
        kind = given("rope_scaling", kind)
        scale = given("rope_freq_scale", scale) if kind != "none" else 1.0
        n_orig = self.get("rope.scaling.original_context_length", self.n_ctx_train, int)
        if not 0 < n_orig <= MAX_CTX:
            raise ModelError(f"{self.file.path}: rope.scaling.original_context_length {n_orig} is out of range")
        n_orig = given("yarn_orig_ctx", n_orig)
        base = given("rope_freq_base", freq_base or self.freq_base)
        attn = self.between("rope.scaling.attn_factor", *SCALES, 1.0) * given("yarn_attn_factor", 1.0)
        ext, fast, slow = 1.0 if kind == "yarn" else 0.0, 32.0, 1.0
        if beta_fast is not None:
            ext = self.scale("rope.scaling.yarn_ext_factor", ext)
            fast, slow = (self.between(f"rope.scaling.yarn_beta_{name}", 0.0, MAX_BETA, value)
                          for name, value in (("fast", beta_fast), ("slow", slow)))
        unused = ()
        if kind == "longrope" or factors == LONG:
            factors, *unused = (LONG, SHORT) if self.n_ctx and self.n_ctx > n_orig else (SHORT, LONG)
        return Rope(n_dims, mode, n_orig, base, scale, given("yarn_ext_factor", ext), attn,
                    given("yarn_beta_fast", fast), given("yarn_beta_slow", slow), factors, tuple(unused))

    def sections(self, n_dims):
        """Pairs of a head that are turned by a token's time, row, column, and a fourth number; (): the file does not
        tell them apart."""
        sections = self.get("rope.dimension_sections", None)
        if not isinstance(sections, np.ndarray) or len(sections) < 4 or not (sections[:2] > 0).all():
            return ()
        sections = tuple(sections[:4].tolist())
        if min(sections) < 0 or sum(sections) != n_dims // 2:
            raise self.wrong("rope.dimension_sections", list(sections), f"four parts of {n_dims // 2} pairs")
        return sections

    def n_non_rotary(self, n_dims):
        """Pairs that RoPE leaves alone in a text: parts of its positions are equal, but the fourth is 0."""
        return (self.sections(n_dims) or (0,))[-1]

    def sectioned(self, rope, interleaved=False):
        """The Rope with the sections of the file; in a text, where their positions are equal, it is the usual one."""
        return dataclasses.replace(rope, sections=self.sections(rope.n_dims), interleaved=interleaved)

    def rope_dims(self, key, default, d_head):
        """How many numbers of a head are rotated."""
        n_dims = self.get(key, default, int)
        if not 0 < n_dims <= d_head or n_dims % 2:
            raise ModelError(f"{self.file.path}: {key} {n_dims} does not fit heads of {d_head}")
        return n_dims

    def window_rope(self, rope, base=None, **changes):
        """The Rope of layers with windows, whose base the file may state.  base: where it does not, default that of
        `rope`; changes: in the other parameters."""
        base = self.between("rope.freq_base_swa", *ROPE_BASES, rope.freq_base if base is None else base)
        return dataclasses.replace(rope, freq_base=base, **changes)

    @property
    def freq_base(self):
        """RoPE's base as the file has it, for layers that options leave alone."""
        return self.between("rope.freq_base", *ROPE_BASES, 10000.0)

    @property
    def freq_scale(self):
        """RoPE's scale as the file has it."""
        factor = self.between("rope.scaling.factor", *SCALES, 1.0)
        return 1.0 / factor if self.get("rope.scaling.type", "linear", str) != "none" else 1.0

    def windows(self, period, dense_first=False, default=0):
        """[how many tokens a layer looks back on, itself included; 0: all].

        `attention.sliding_window_pattern` overrides the period: of so many layers one looks at everything, the last
        (or the first); or an array with true for a window.  ... as period: the file has to state an array.  default: of
        the width; ...: the file has to state one.
        """
        window, n = self.get("attention.sliding_window", default, int), self.n_layer
        if default is ... and window < 1:
            raise self.wrong("attention.sliding_window", window, "a positive number")
        pattern = self.get("attention.sliding_window_pattern", period)
        if isinstance(pattern, np.ndarray):
            flags = pattern.astype(bool).tolist()
            flags = flags[:n] if len(flags) == n + self.n_predicting else flags
        elif type(pattern) is int and pattern >= 0:
            flags = [pattern == 0 or (i % pattern != 0 if dense_first else i % pattern < pattern - 1)
                     for i in range(n)]
        else:
            raise self.wrong("attention.sliding_window_pattern", pattern, "a number at least 0, or an array")
        if len(flags) != n or not 0 <= window <= MAX_CTX:
            raise self.wrong("attention.sliding_window", window, f"0 to {MAX_CTX} with a pattern of {n} layers")
        return [window if flag else 0 for flag in flags]
