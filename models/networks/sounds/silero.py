"""Silero VAD: the probability of speech in each window of 512 samples (32 ms at 16 kHz).

    window [512] -> mirrored at both ends [640] -> STFT as a convolution [4, 258] -> magnitudes [4, 129]
                 -> 4 x (convolution of 3 taps + bias, ReLU), strides 1 2 2 1 -> [1, 128]
                 -> LSTM cell (128) -> ReLU -> product with one row + bias -> sigmoid

The LSTM's state lies in two tensors that the graph itself writes, so one plan is replayed for every window:

          h, c ----> gates -----> c' = f c + i g,  h' = o tanh(c') ----> probability
           ^                        |
           +------------ cpy -------+                       i, f, o = sigmoid, g = tanh of Wi x + bi + Wh h + bh

Network and file form are whisper.cpp's: it mirrors every window at its ends instead of prepending the last 64 samples
of the window before.
"""
import os
import pathlib

import numpy as np

import ggjit as gg
from ggjit.api.registry import init_backend
from ggjit.core.arguments import typed_call
from ggjit.core.backend import Backend
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.models.core.checks import one_of
from ggjit.models.files.silero_file import read_silero
from ggjit.models.networks.base.network import Step
from ggjit.models.networks.inside.hooks import TensorSpec, named_nodes
from ggjit.models.networks.inside.inside import Names, matched
from ggjit.models.networks.sounds.speech import find_segments
from ggjit.ops.core.errors import ModelError, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.host_memory import empty, oom_guard, zeros
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.printable import printable
from ggjit.tensors.context import Context
from ggjit.tensors.summary import op_name

USAGE_WEIGHTS = 1
PIECE = 1 << 12                         # windows of a long recording at a time
SAMPLE_RATE = 16000
VERSIONS = (5, 6)
N_CONTEXT = 64                      # samples before a window; other numbers belong to other networks (see above)
STRIDES = (1, 2, 2, 1)              # of the encoder's layers; the file does not say
CONV_TYPES = {"F16": gg.F16, "F32": gg.F32}


def find_silero(folder):
    """A Silero file: the one that GGJIT_VAD names in the environment, else the last by name of the folder's files
    *silero*.bin; None where there is none."""
    named = os.environ.get("GGJIT_VAD")
    return named or max((str(p) for p in pathlib.Path(folder).glob("*silero*.bin")), default=None)


@typed_call
def load_vad(path, backend="CPU", n_threads=1, conv_type="F32"):
    """Load a Silero VAD model in whisper.cpp's file form; see SileroVad.

        with load_vad("ggml-silero-v5.1.2.bin") as vad:
            print(vad.segments(samples))

    backend: a device name ("CPU") or a Backend; one thread is best, no node is worth a barrier.
    conv_type: "F32", or "F16" to round the convolutions' data as ggml does (probabilities then differ by up to 2e-3).
    Errors: BadFile (a damaged file), ModelError (another network), ParamError; nothing stays loaded after an error.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeMismatch(f"load_vad takes the path of a file, got {type(path).__name__}")
    conv = CONV_TYPES[one_of("conv_type", conv_type, CONV_TYPES)]
    if "NULL" in str(backend).upper():
        raise ParamError("the NULL device computes nothing; load on \"CPU\"")
    return SileroVad(read_silero(path), backend, n_threads, conv)


class SileroVad:
    """`vad.probabilities(samples)` and `vad.segments(samples)` of a whole recording; `vad(window)` while it comes in.

    samples: 16 kHz, mono, floats in [-1, 1].
    """

    def __init__(self, file, backend, n_threads, conv_type):
        self.file, self.n_window, self.conv_type = file, file.n_window, conv_type
        _check_architecture(file)
        if isinstance(backend, Backend):
            backend.n_threads = n_threads
        self.backend = backend if isinstance(backend, Backend) else init_backend(backend, n_threads=n_threads)
        self._lock = ForkLock()
        self._allocator = GraphAllocator(self.backend, planner="best")
        self.ctx = Context()
        self._buffer, self._step = None, None
        try:
            self._load()
            self._plan()
        except BaseException:
            self.free()
            raise

    # ------------------------------------------------------------ making
    def _load(self):
        """Weights and state: leaves of one buffer."""
        n, (n_in, n_hidden) = self.n_window, self.file.lstm
        basis = self._shape("stft.forward_basis_buffer")
        self.n_fft = basis[0]
        n_bins = basis[2] // 2
        if basis[1] != 1 or self.n_fft % 4 or self.n_fft > n or basis[2] != 2 * n_bins:
            self._unfit("stft.forward_basis_buffer", f"[taps <= {n} (a multiple of 4), 1, two for each frequency]")
        conv = self.conv_type
        self.basis = self._want("stft.forward_basis_buffer", basis, conv)
        self.encoder, channels = [], n_bins
        for i, (ic, oc, taps) in enumerate(self.file.encoder):
            if ic != channels:
                raise ModelError(f"{self.file.path}: encoder layer {i} takes {ic} channels, the one before gives "
                                 f"{channels}")
            p, channels = f"encoder.{i}.reparam_conv.", oc
            self.encoder.append((self._want(p + "weight", (taps, ic, oc), conv), self._want(p + "bias", (1, oc))))
        self.w_in = self._want("decoder.rnn.weight_ih", (n_in, 4 * n_hidden))
        self.w_state = self._want("decoder.rnn.weight_hh", (n_hidden, 4 * n_hidden))
        self.b_in, self.b_state = (self._want(f"decoder.rnn.bias_{x}", (4 * n_hidden,)) for x in ("ih", "hh"))
        self.w_out = self._want("decoder.decoder.2.weight", (n_hidden,), conv)
        self.b_out = self._want("decoder.decoder.2.bias", (1,))
        self.h, self.c = (self.ctx.new_tensor(gg.F32, (n_hidden,), name) for name in ("h", "c"))
        self._buffer = gg.alloc_ctx_tensors(self.ctx, self.backend)
        for t in self.ctx.tensors:
            values = self.file.tensors.get("_model." + t.name)
            t.set(np.zeros(t.shape, np.float32) if values is None else values.reshape(t.shape))
        self._window = np.zeros(n, np.float32)
        self.window = gg.from_numpy(self.ctx, self._window, "window")

    def _shape(self, name):
        """The shape of a tensor in the file, in ggml order."""
        a = self.file.tensors.get("_model." + name)
        if a is None:
            raise ModelError(f"{self.file.path}: tensor '_model.{name}' is missing; convert the model again")
        return (*a.shape[::-1], 1, 1, 1)[:max(a.ndim, 3)]

    def _unfit(self, name, expected):
        raise ModelError(f"{self.file.path}: tensor '_model.{name}' has shape {list(self._shape(name))}, expected "
                         f"{expected}; convert the model again")

    def _want(self, name, ne, type=gg.F32):
        """A leaf of shape `ne`, which the tensor of the file must have but for dimensions of length 1."""
        if [n for n in self._shape(name) if n > 1] != [n for n in ne if n > 1]:
            self._unfit(name, list(ne))
        return self.ctx.new_tensor(type, ne, name)

    def _plan(self):
        ctx = Context()
        with ctx:
            probability, *states = self._build()
        graph = Graph(probability, *states)
        self._allocator.alloc_graph(graph)
        self._step = Step(ctx, {}, probability, self.backend.graph_plan_create(graph))

    def _build(self):
        """(probability, the nodes that write c and h back)"""
        edge = self.n_fft // 4
        spectrum = gg.conv_1d(self.basis, gg.pad_reflect_1d(self.window, edge, edge), self.n_fft // 2, 0, 1,
                              self.conv_type)
        n_frames, n_bins = spectrum.ne[0], spectrum.ne[1] // 2
        real, imag = (gg.view_2d(spectrum, n_frames, n_bins, spectrum.nb[1], i * n_bins * spectrum.nb[1])
                      for i in (0, 1))
        x = gg.set_name(gg.sqrt(gg.add(gg.sqr(real), gg.sqr(imag))), "magnitudes")
        for i, ((weight, bias), stride) in enumerate(zip(self.encoder, STRIDES, strict=True)):
            x = gg.relu(gg.add(gg.conv_1d(weight, x, stride, weight.ne[0] // 2, 1, self.conv_type), bias))
            x = gg.set_name(x, f"l_out-{i}")
        h, c = self._lstm(gg.cont_1d(gg.view_2d(x, 1, x.ne[1], x.nb[1], 0), x.ne[1]))
        last = gg.conv_1d(gg.reshape_3d(self.w_out, 1, self.w_out.ne[0], 1),
                          gg.reshape_2d(gg.relu(h), 1, h.ne[0]), 1, 0, 1, self.conv_type)
        probability = gg.set_name(gg.sigmoid(gg.add(gg.reshape_1d(last, 1), self.b_out)), "probability")
        return probability, gg.cpy(c, self.c), gg.cpy(h, self.h)

    def _lstm(self, x):
        """(h', c') of the cell for the input x."""
        gates = gg.add(gg.add(gg.mul_mat(self.w_in, x), self.b_in),
                       gg.add(gg.mul_mat(self.w_state, self.h), self.b_state))
        gg.set_name(gates, "gates")
        n = self.h.ne[0]
        i, f, g, o = (gg.view_1d(gates, n, k * n * gates.nb[0]) for k in range(4))
        c = gg.set_name(gg.add(gg.mul(gg.sigmoid(f), self.c), gg.mul(gg.sigmoid(i), gg.tanh(g))), "c_out")
        return gg.set_name(gg.mul(gg.sigmoid(o), gg.tanh(c)), "h_out"), c

    # ------------------------------------------------------------ using
    def reset(self):
        """Forget earlier windows: the next window is the first of a recording."""
        with self._lock:
            self._check_loaded()
            for t in (self.h, self.c):
                t.set(np.zeros(t.shape, np.float32))

    def __call__(self, window):
        """The probability, a float, of speech in the next n_window samples of a recording.

        The state carries over from call to call.  Errors: ShapeError, TypeMismatch, ParamError (values that are not
        finite: they would stay in the state).
        """
        a = _samples(window)
        if a.size != self.n_window:
            raise ShapeError(f"a window has {self.n_window} samples, got {a.size}; collect samples until a window is "
                             f"full, or give the whole recording to probabilities()")
        with self._lock:
            self._check_loaded()
            return self._next(a)

    def _next(self, window):
        self._window[:] = window
        return float(self._step.run()[0])

    def probabilities(self, samples, reset=True):
        """float32, one probability per window of a recording of any length, the last window filled up with zeros.

        reset=False continues from the state after the earlier samples (whisper_vad_detect_speech_no_reset).
        """
        with oom_guard("probabilities: the samples as float32"):
            a = _samples(samples)
        windows = self._windows(a)
        out = empty(len(windows), np.float32, "probabilities")
        with self._lock:
            self._check_loaded()
            if reset:
                self.reset()
            for i, window in enumerate(windows):
                out[i] = self._next(window)
        return out

    def _windows(self, a):
        """The samples as (n_windows, n_window), the last window filled up with zeros."""
        n = self.n_window
        windows = zeros(-(-a.size // n) * n, np.float32, "probabilities").reshape(-1, n)
        windows.reshape(-1)[:a.size] = a
        return windows

    # ------------------------------------------------------------ inside
    def names(self, pattern="*"):
        """The named tensors of a window that match `pattern`: name, op, shape in NumPy order, backend.

            vad.names()         # magnitudes, blk.0.l_out ... blk.3.l_out, gates, c_out, h_out, probability

        Errors: ParamError where nothing matches, with the nearest name.
        """
        return Names(self._matched(pattern).values())

    def _matched(self, patterns):
        with self._lock, Context():
            self._check_loaded()
            named = named_nodes(self._build())
        return matched({name: TensorSpec(name, op_name(t), t.shape, self.backend.name, None, None, np.dtype(np.float32))
                        for name, t in named.items()}, patterns, self.file.kind)

    def capture(self, patterns, samples):
        """{name: float32 (n_windows, ...)} of the tensors that match, for every window of a recording from its start.

            vad.capture("blk.*.l_out", samples)["blk.3.l_out"]

        What was heard before is forgotten.  Errors: as `names` and `probabilities`.
        """
        specs, windows, ctx = self._matched(patterns), self._windows(_samples(samples)), Context()
        allocator, found = GraphAllocator(self.backend, planner="best"), {name: [] for name in specs}
        with self._lock:
            self.reset()
            with ctx:
                results = self._build()
            named = named_nodes(results)
            graph = Graph(*results, *(named[name] for name in specs))
            try:
                allocator.alloc_graph(graph)
                plan = self.backend.graph_plan_create(graph)
                for window in windows:
                    self._window[:] = window
                    plan.compute()
                    for name in specs:
                        found[name].append(plan.view(named[name]).copy())
            finally:
                allocator.free()
        return {name: np.array(a, np.float32).reshape(-1, *specs[name].shape) for name, a in found.items()}

    def stretches(self, read, n_samples, **params):
        """`segments` of a recording that is read piece by piece: read(first, n) gives samples."""
        piece = PIECE * self.n_window
        with self._lock:
            found = [self.probabilities(read(first, piece), reset=first == 0) for first in range(0, n_samples, piece)]
        return find_segments(np.concatenate([np.zeros(0, np.float32), *found]), self.n_window, SAMPLE_RATE, **params)

    def segments(self, samples, **params):
        """[(start, end), ...] in seconds of the stretches with speech; params as find_segments."""
        return find_segments(self.probabilities(samples), self.n_window, SAMPLE_RATE, **params)

    def _check_loaded(self):
        if self._step is None:
            raise ParamError(f"{self.file.path} was freed; load it again with load_vad")

    @property
    def plan(self):
        """The plan that is replayed for every window."""
        self._check_loaded()
        return self._step.plan

    def free(self):
        """Give weights, state and plan back; a second call does nothing."""
        with self._lock:
            self._step = None
            self._allocator.free()
            self.ctx.free()
            if self._buffer is not None:
                self._buffer.free()
                self._buffer = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.free()

    def __repr__(self):
        return f"<SileroVad {printable(self.file.path)} on {self.backend!r}>"


def _check_architecture(file):
    n_hidden = file.lstm[1]
    problem = (f"kind {file.kind!r}, expected 'silero-16k'" if file.kind != "silero-16k" else
               f"version {'.'.join(map(str, file.version))}, expected 5 or 6"
               if file.version[0] not in VERSIONS or not all(0 <= n < 100 for n in file.version) else
               f"n_window {file.n_window}, expected a multiple of 64 up to 4096"
               if file.n_window % 64 or not 64 <= file.n_window <= 4096 else
               f"n_context {file.n_context}, expected {N_CONTEXT}" if file.n_context != N_CONTEXT else
               f"{len(file.encoder)} encoder layers, expected {len(STRIDES)}" if len(file.encoder) != len(STRIDES) else
               f"an LSTM of {file.lstm}, the encoder gives {file.encoder[-1][1]} channels"
               if file.lstm[0] != file.encoder[-1][1] or n_hidden < 1 else
               f"a last convolution of {file.final}, expected {(n_hidden, 1)}" if file.final != (n_hidden, 1) else "")
    if problem:
        raise ModelError(f"{file.path}: {problem}; this is not the network we know, use Silero VAD v5 or v6 at 16 kHz")


def _samples(samples):
    """As float32, one dimension, finite."""
    try:
        a = np.asarray(samples)
    except ValueError:                      # a ragged list
        a = np.empty(0, object)
    if a.dtype.kind != "f":
        raise TypeMismatch(f"samples must be floats in [-1, 1], got {a.dtype}; divide 16-bit integers by 32768")
    if a.ndim != 1:
        raise ShapeError(f"samples must be one row of one channel, got shape {a.shape}")
    a = a.astype(np.float32, copy=False)
    if not np.isfinite(a).all():
        raise ParamError(f"sample {int(np.flatnonzero(~np.isfinite(a))[0])} is not a finite number")
    return a
