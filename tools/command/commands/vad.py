"""`ggjit vad`: finds the parts of a recording that contain speech."""
import sys
import time

from ggjit.display.progress import compiling
from ggjit.models.files.wav import read_wav
from ggjit.models.networks.sounds.silero import SAMPLE_RATE, load_vad
from ggjit.models.networks.sounds.speech import find_segments
from ggjit.tools.command.common import add_threads, count

EXAMPLES = (("ggjit vad talk.wav -m silero.bin", "start and end of each stretch"),
            ("ggjit vad talk.wav -m silero.bin --threshold 0.7 --json", "stricter, as JSON"))


def add_arguments(c):
    c.add_file("wav", metavar="FILE.wav", help="16 kHz PCM")
    c.add_file("-m", "--model", required=True, metavar="PATH", help="a Silero VAD model in whisper.cpp's file form")
    c.add_argument("--threshold", type=float, default=0.5, metavar="P", help="probability of speech (0.5)")
    c.add_argument("--min-speech-ms", type=count, default=250, metavar="MS", help="shorter speech is dropped (250)")
    c.add_argument("--min-silence-ms", type=count, default=100, metavar="MS", help="silence that ends speech (100)")
    c.add_argument("--max-speech-s", type=float, default=float("inf"), metavar="S", help="longer speech is cut (never)")
    c.add_argument("--pad-ms", type=count, default=30, metavar="MS", help="added on both sides (30)")
    c.add_argument("--conv-type", choices=("F32", "F16"), default="F32", help="F16: round as ggml does (F32)")
    add_threads(c)


def run(args):
    samples = read_wav(args.wav, SAMPLE_RATE)
    with compiling():
        model = load_vad(args.model, n_threads=args.threads or 1, conv_type=args.conv_type)
        t0 = time.perf_counter()
        p = model.probabilities(samples)
        seconds = time.perf_counter() - t0
    found = find_segments(p, model.n_window, SAMPLE_RATE, args.threshold, args.min_speech_ms, args.min_silence_ms,
                          args.max_speech_s, args.pad_ms)
    length = len(samples) / SAMPLE_RATE
    if not args.json:
        for start, end in found:
            print(f"{start:9.2f} - {end:8.2f} s")
        print(f"{len(found)} stretches of speech, {sum(e - s for s, e in found):.2f} of {length:.2f} s; took "
              f"{seconds:.3f} s", file=sys.stderr)
    return {"segments": [{"start": start, "end": end} for start, end in found], "probabilities": p.tolist(),
            "window_seconds": model.n_window / SAMPLE_RATE, "seconds": seconds, "audio_seconds": length}
