"""Whisper beside faster-whisper and whisper.cpp: an encoder window, a token, whole recordings.

    python -m benchmarks.speech FOLDER SOUND.wav [--whisper-cpp BIN] [--threads 1,2] [--rounds N] > TABLE.md

FOLDER: ggml-base.bin, ct2/, and for whisper.cpp ggml-base-q8_0.bin of its `quantize`; our own types are made there.
BIN: the folder of whisper-bench and whisper-cli, built for this processor.  The page that the program prints (ABOUT)
explains its columns.
"""
import argparse
import pathlib
import re
import subprocess
import sys
import time
import wave

import numpy as np

from benchmarks.machine import cpu_model, idle_check
from benchmarks.report import Spread
from benchmarks.worker import Missing, Worker
from ggjit.models import load_speech, quantize_gguf
from ggjit.models.files.wav import read_wav
from ggjit.models.speech.decoding import TextBatch, TokenRules

ABOUT = """\
The table compares the speed of ggjit with whisper.cpp, built for this processor, and with faster-whisper (`python -m
benchmarks.speech FOLDER SOUND.wav --whisper-cpp BIN`). All engines use Whisper base, decode greedily with timestamps,
and never retry a window with another temperature. Each engine runs in a process of its own; they take turns. Each time
is a median, with the minimum and the maximum in brackets. The ratio is the peer's time divided by ggjit's: above 1,
ggjit is faster. The recording of 60 s repeats the short recording."""
N_TOKENS = 64
LONG_SECONDS = 60
OURS = {"F16": "ggml-base.bin", "F32": "base-f32.gguf", "Q8_0": "base-q8_0.gguf"}
WHISPER_CPP = {"F16": "ggml-base.bin", "Q8_0": "ggml-base-q8_0.bin"}
PROMPT, END = [50258, 50259, 50359], 50257              # start, English, transcribe
PEERS = {"F16": ("whisper.cpp F16", "faster-whisper float32"), "F32": ("faster-whisper float32",),
         "Q8_0": ("whisper.cpp Q8_0", "faster-whisper int8")}
WORKS = {"encoder": "encoder, window of 30 s", "token": "one token", "short": "whole recording",
         "long": f"whole recording, {LONG_SECONDS} s"}


class Ours:
    def __init__(self, folder, kind, n_threads):
        self.model = load_speech(pathlib.Path(folder) / OURS[kind], n_threads=int(n_threads))

    def start(self, sound):
        self.mel = self.model.log_mel(sound)

    def encoder(self):
        self.model.encode(self.mel)

    def prompt(self):
        v = self.model.vocab
        self.text = TextBatch(self.model.network, TokenRules(v, suppressed=[v.eot]),
                              v.prompt("en", "transcribe", True))

    def tokens(self):
        for _ in range(N_TOKENS):
            self.text.append([int(self.text.next(0).argmax())])
            self.text.feed()

    def transcribe(self, sound):
        return self.model.transcribe(sound, language="en", temperature=0.0, vad=False).text


class FasterWhisper:
    def __init__(self, folder, kind, n_threads):
        try:
            from faster_whisper import WhisperModel
        except ImportError as e:
            raise Missing("faster-whisper is not installed (pip install faster-whisper)") from e
        self.model = WhisperModel(str(pathlib.Path(folder) / "ct2"), compute_type=kind, cpu_threads=int(n_threads))

    def start(self, sound):
        mel = self.model.feature_extractor(sound)
        self.mel = np.pad(mel, ((0, 0), (0, 3000)))[:, :3000].astype(np.float32)

    def encoder(self):
        self.heard = self.model.encode(self.mel)

    def prompt(self):
        self.encoder()

    def tokens(self):
        found = self.model.model.generate(self.heard, [PROMPT], beam_size=1, suppress_tokens=[-1, END],
                                          max_length=2 * N_TOKENS)          # half of it are new
        assert len(found[0].sequences_ids[0]) == N_TOKENS, f"{len(found[0].sequences_ids[0])} tokens"

    def transcribe(self, sound):
        segments, _ = self.model.transcribe(sound, language="en", beam_size=1, temperature=0.0,
                                            condition_on_previous_text=True)
        return "".join(s.text for s in segments)


class Engine:
    """The far end of a Worker: times in seconds."""

    def __init__(self, name, *args):
        self.engine = {"ours": Ours, "faster-whisper": FasterWhisper}[name](*args)

    def about(self):
        return {}

    def load(self, short, long):
        self.sounds = {"short": read_wav(short), "long": read_wav(long)}
        self.engine.start(self.sounds["short"])

    def seconds(self, work):
        if work == "token":
            self.engine.prompt()
        run = {"encoder": self.engine.encoder, "token": self.engine.tokens}.get(
            work, lambda: self.engine.transcribe(self.sounds[work]))
        t0 = time.perf_counter()
        run()
        return (time.perf_counter() - t0) / (N_TOKENS if work == "token" else 1)

    def text(self):
        return self.engine.transcribe(self.sounds["short"])


class WhisperCpp:
    """whisper.cpp's own programs, which print their times; the same calls as a Worker's."""

    def __init__(self, programs, model, n_threads):
        self.programs, self.model, self.n_threads = pathlib.Path(programs), model, str(n_threads)
        if not (self.programs / "whisper-bench").exists() or not pathlib.Path(model).exists():
            raise Missing(f"{self.programs}/whisper-bench or {model} is not there")

    def ask(self, what, *args):
        return getattr(self, what)(*args)

    def load(self, short, long):
        self.sounds = {"short": short, "long": long}

    def _milliseconds(self, program, *args):
        r = subprocess.run([self.programs / program, "-m", self.model, "-t", self.n_threads, *args], text=True,
                           capture_output=True, check=True)
        return {m[1]: float(m[3] or m[2]) for m in re.finditer(
            r"(\w+) time = +([\d.]+) ms(?: / +\d+ runs \( +([\d.]+) ms per run\))?", r.stderr + r.stdout)}

    def seconds(self, work):
        if work in ("encoder", "token"):
            return self._milliseconds("whisper-bench")["encode" if work == "encoder" else "decode"] / 1e3
        t = self._milliseconds("whisper-cli", "-l", "en", "-bs", "1", "-bo", "1", "-nf", "-f", self.sounds[work])
        return (t["total"] - t["load"]) / 1e3

    def text(self):
        command = [self.programs / "whisper-cli", "-m", self.model, "-nt", "-np", "-f", self.sounds["short"]]
        return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()

    def close(self):
        """Nothing stays open."""


def prepare(folder, sound):
    """Make our types of the model, and the long recording, where they are not there yet; its path."""
    for kind in ("F32", "Q8_0"):
        if not (folder / OURS[kind]).exists():
            quantize_gguf(folder / OURS["F16"], folder / OURS[kind], kind, progress=False)
    long = folder / f"{pathlib.Path(sound).stem}-{LONG_SECONDS}s.wav"
    with wave.open(sound) as short, wave.open(str(long), "wb") as out:
        out.setparams(short.getparams())
        samples = short.readframes(short.getnframes())
        n = LONG_SECONDS * short.getframerate() * short.getsampwidth() * short.getnchannels()
        out.writeframes((samples * (n // len(samples) + 1))[:n])
    return str(long)


def engines(args, n_threads):
    """{name: what answers `ask`}, and why others are not there."""
    folder, out, missing = pathlib.Path(args.folder), {}, []
    long = prepare(folder, args.sound)

    def start(name, make):
        try:
            out[name] = make()
            out[name].ask("load", args.sound, long)
        except Missing as e:
            missing.append(f"{name}: {e}")
    for kind in OURS:
        start(f"ggjit {kind}", lambda kind=kind: Worker("speech", "ours", str(folder), kind, str(n_threads)))
    for kind in ("float32", "int8"):
        start(f"faster-whisper {kind}", lambda kind=kind: Worker(
            "speech", "faster-whisper", str(folder), kind, str(n_threads), OMP_NUM_THREADS=str(n_threads)))
    if args.whisper_cpp:
        for kind, file in WHISPER_CPP.items():
            start(f"whisper.cpp {kind}", lambda file=file: WhisperCpp(args.whisper_cpp, folder / file, n_threads))
    return out, missing


def rows(args, n_threads, found, log):
    """Lines of the table: each work by each of our types beside its peers."""
    for work, text in WORKS.items():
        times = {name: [] for name in found}
        for r in range(args.rounds + 1):                    # the first warms
            for name, engine in found.items():
                seconds = engine.ask("seconds", work)
                if r:
                    times[name].append(seconds * 1e3)
        log(f"{n_threads} thread(s), {work}: " + ", ".join(f"{n} {Spread(t, 'ms')}" for n, t in times.items()))
        for kind, peers in PEERS.items():
            if f"ggjit {kind}" not in times:
                continue
            ours = Spread(times[f"ggjit {kind}"], "ms")
            for peer in (p for p in peers if p in times):
                theirs = Spread(times[peer], "ms")
                yield (f"| {text} | {n_threads} | {kind} | {ours} | {peer} | {theirs} | "
                       f"{theirs.median / ours.median:.2f} |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("sound")
    parser.add_argument("--whisper-cpp")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)

    def log(line):
        print(line, file=sys.stderr, flush=True)
    print(f"# Whisper base beside its peers\n\n{ABOUT}\n\n{cpu_model()}. {idle_check('At the start')}.\n\n"
          "| work | threads | type | ggjit | peer | its time | ratio |\n|---|---|---|---|---|---|---|")
    said = []
    for n_threads in map(int, args.threads.split(",")):
        found, said = engines(args, n_threads)
        try:
            for name, engine in found.items():
                log(f"{name}: {engine.ask('text')}")
            for line in rows(args, n_threads, found, log):
                print(line, flush=True)
        finally:
            for engine in found.values():
                engine.close()
    print(f"\n{idle_check('At the end')}." + "".join(f" Not measured: {why}." for why in said))


if __name__ == "__main__":
    main()
