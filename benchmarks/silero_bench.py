"""Silero VAD, microseconds a window, beside whisper.cpp's own libwhisper of the pywhispercpp wheel.

    python -m benchmarks.silero_bench MODEL.bin SOUND.wav [--threads N] [--rounds N] [--clock cpu] [--nodes]

Both sides take the whole recording (whisper_vad_detect_speech, vad.probabilities), one window after the other, and
take turns; medians with minimum and maximum over the rounds.  ratio = libwhisper's time / ours: above 1 we are faster.
--nodes: where our time goes, node by node.
"""
import argparse
import ctypes as C
import glob
import importlib.util
import os
import statistics

import numpy as np

from benchmarks.engines.engine import CLOCKS
from benchmarks.machine import cpu_model, idle_check
from benchmarks.profile import node_times, once
from benchmarks.report import Spread
from ggjit.models import load_vad
from ggjit.models.files.wav import read_wav
from ggjit.ops.native import isa


class _ContextParams(C.Structure):
    _fields_ = [("n_threads", C.c_int), ("use_gpu", C.c_bool), ("gpu_device", C.c_int)]


class VadParams(C.Structure):
    """struct whisper_vad_params"""
    _fields_ = [("threshold", C.c_float), ("min_speech_duration_ms", C.c_int), ("min_silence_duration_ms", C.c_int),
                ("max_speech_duration_s", C.c_float), ("speech_pad_ms", C.c_int), ("samples_overlap", C.c_float)]


def libwhisper_path():
    """Of the wheel's library, or None."""
    spec = importlib.util.find_spec("pywhispercpp")
    found = glob.glob(f"{os.path.dirname(spec.origin)}/../pywhispercpp.libs/libwhisper*") if spec else []
    return found[0] if found else None


class Libwhisper:
    """The few functions this needs.  RTLD_LOCAL: another ggml in the process stays apart."""

    def __init__(self, model, n_threads=1):
        self.lib = lib = C.CDLL(libwhisper_path(), mode=C.RTLD_LOCAL)
        p, i, floats = C.c_void_p, C.c_int, C.POINTER(C.c_float)
        for name, result, args in (
                ("whisper_vad_default_params", VadParams, []), ("whisper_log_set", None, [p, p]),
                ("whisper_vad_init_from_file_with_params", p, [C.c_char_p, _ContextParams]),
                ("whisper_vad_detect_speech", C.c_bool, [p, p, i]), ("whisper_vad_n_probs", i, [p]),
                ("whisper_vad_probs", floats, [p]), ("whisper_vad_segments_from_probs", p, [p, VadParams]),
                ("whisper_vad_segments_n_segments", i, [p]), ("whisper_vad_free_segments", None, [p]),
                ("whisper_vad_segments_get_segment_t0", C.c_float, [p, i]), ("whisper_vad_free", None, [p]),
                ("whisper_vad_segments_get_segment_t1", C.c_float, [p, i])):
            f = getattr(lib, name)
            f.restype, f.argtypes = result, args
        self._silent = C.CFUNCTYPE(None, C.c_int, C.c_char_p, p)(lambda *message: None)
        lib.whisper_log_set(C.cast(self._silent, p), None)
        self.ctx = lib.whisper_vad_init_from_file_with_params(os.fsencode(model), _ContextParams(n_threads, False, 0))
        if not self.ctx:
            raise RuntimeError(f"libwhisper cannot load {model}")

    def probabilities(self, samples):
        """The library's own array, valid until the next call."""
        if not self.lib.whisper_vad_detect_speech(self.ctx, samples.ctypes.data, samples.size):
            raise RuntimeError("whisper_vad_detect_speech failed")
        return np.ctypeslib.as_array(self.lib.whisper_vad_probs(self.ctx), (self.lib.whisper_vad_n_probs(self.ctx),))

    def segments(self, **params):
        """[(start, end)] in seconds out of the array that `probabilities` gave."""
        lib, chosen = self.lib, self.lib.whisper_vad_default_params()
        for name, value in params.items():
            setattr(chosen, name, value)
        s = lib.whisper_vad_segments_from_probs(self.ctx, chosen)
        n = lib.whisper_vad_segments_n_segments(s)
        ends = lib.whisper_vad_segments_get_segment_t0, lib.whisper_vad_segments_get_segment_t1
        found = [tuple(end(s, i) / 100 for end in ends) for i in range(n)]
        lib.whisper_vad_free_segments(s)
        return found

    def free(self):
        self.lib.whisper_vad_free(self.ctx)


def compare(model, samples, n_threads, rounds, now):
    """({name: Spread of microseconds a window}, {name: probabilities}), the sides taking turns."""
    sides = {f"ggjit {t}": load_vad(model, n_threads=n_threads, conv_type=t) for t in ("F32", "F16")}
    if libwhisper_path():
        sides["libwhisper"] = Libwhisper(model, n_threads)
    found = {name: side.probabilities(samples).copy() for name, side in sides.items()}      # plans, kernels, caches
    times = {name: [] for name in sides}
    for r in range(rounds):
        for name in list(sides) if r % 2 == 0 else list(sides)[::-1]:
            seconds = once(lambda name=name: sides[name].probabilities(samples), now)
            times[name].append(seconds / len(found[name]) * 1e6)
    for side in sides.values():
        side.free()
    return {name: Spread(t, "us") for name, t in times.items()}, found


def print_nodes(model, n_threads, now):
    with load_vad(model, n_threads=n_threads) as vad:
        for t, kernel, seconds in node_times(vad.plan, 5, now):
            print(f"{seconds * 1e6:8.2f} us  {t.op.name:14} {str(list(t.shape)):12} {kernel}")


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.silero_bench", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", metavar="MODEL.bin", help="a Silero VAD model in whisper.cpp's file form")
    p.add_argument("wav", metavar="SOUND.wav", help="16 kHz")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=31)
    p.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, where the machine is not idle")
    p.add_argument("--nodes", action="store_true")
    args = p.parse_args(argv)
    samples = read_wav(args.wav)
    print(f"{cpu_model()}; kernels {isa.ISA}; {idle_check('before', 0.3)}")
    spreads, found = compare(args.model, samples, args.threads, args.rounds, CLOCKS[args.clock])
    peer = spreads.get("libwhisper")
    for name, spread in spreads.items():
        ratio = f", ratio {peer.median / statistics.median(spread.values):.2f}" if peer and spread is not peer else ""
        far = np.abs(found[name] - found["libwhisper"]).max() if peer and spread is not peer else None
        print(f"{name:12} {spread} a window{ratio}" + ("" if far is None else f", {far:.1e} from libwhisper at most"))
    if peer is None:
        print("libwhisper: missing (pip install pywhispercpp)")
    if args.nodes:
        print_nodes(args.model, args.threads, CLOCKS[args.clock])
    print(idle_check("after", 0.3))


if __name__ == "__main__":
    main()
