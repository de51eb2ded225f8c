"""`ggjit transcribe`: text from a recording."""
import sys
import time

from ggjit.display.progress import bar, compiling
from ggjit.models.networks.sounds.silero import load_vad
from ggjit.models.speech.speech import TASKS, load_speech
from ggjit.tools.command.common import add_threads, positive

EXAMPLES = (("ggjit transcribe talk.wav -m ggml-base.bin", "segments as they come, with their times"),
            ("ggjit transcribe talk.mp3 -m base.gguf --srt > talk.srt", "subtitles"),
            ("ggjit transcribe rede.wav -m base.gguf --task translate --words --json",
             "in English, whatever is spoken; every word with its time, as JSON"))


def add_arguments(c):
    c.add_file("sound", metavar="FILE", help="WAV, or what PyAV reads (pip install 'ggjit[audio]')")
    c.add_file("-m", "--model", required=True, metavar="PATH", help="a Whisper model: whisper.cpp's .bin, or a GGUF; "
               "or a GGUF of Moonshine")
    c.add_argument("--language", metavar="CODE", help="what is spoken: en, de, ... (what is heard in the first 30 s)")
    c.add_argument("--task", choices=TASKS, default="transcribe", help="translate: into English")
    c.add_argument("--beam", type=positive, default=1, metavar="N", help="texts that are followed at once (1)")
    c.add_argument("-p", "--prompt", metavar="TEXT", help="names and spellings, as if they had been said before")
    c.add_argument("--words", action="store_true", help="when each word was said")
    form = c.add_mutually_exclusive_group()
    form.add_argument("--srt", action="store_true", help="print SubRip subtitles")
    form.add_argument("--vtt", action="store_true", help="print WebVTT subtitles")
    c.add_file("--vad", metavar="PATH", help="a Silero model (one beside the model)")
    c.add_argument("--no-vad", action="store_true", help="hear silence too, in which models invent text")
    c.add_argument("--temperature", type=float, metavar="T", help="one, without trying others (0, 0.2 ... 1)")
    c.add_argument("--audio-ctx", type=lambda text: text if text == "auto" else int(text), metavar="N",
                   help="frames of 20 ms the encoder hears at once, or auto: as many as there are (1500)")
    add_threads(c)


def run(args):
    with compiling():
        model = load_speech(args.model, n_threads=args.threads)
        vad = load_vad(args.vad) if args.vad and not args.no_vad else not args.no_vad
        options = {} if args.temperature is None else {"temperature": args.temperature}
        t0, step = time.perf_counter(), [lambda n: None]
        heard = [0.0]

        def progress(seconds):
            step[0](seconds - heard[0])
            heard[0] = seconds
        r = model.transcribe(args.sound, language=args.language, task=args.task, beam=args.beam, prompt=args.prompt,
                             word_timestamps=args.words, vad=vad, audio_ctx=args.audio_ctx, progress=progress,
                             **options)
        for note in r.notes:
            print(note, file=sys.stderr)
        plain = not (args.json or args.srt or args.vtt)
        with bar("transcribing, seconds", r.seconds, drawn=not plain) as step[0]:
            for segment in r:
                if plain:
                    _print(segment, args.words)
        seconds = time.perf_counter() - t0
    if args.srt or args.vtt:
        print(r.to_srt(args.words) if args.srt else r.to_vtt(args.words), end="")
    if plain:
        print(f"{r.seconds:.1f} s of {r.language}, took {seconds:.2f} s", file=sys.stderr)
    return r.as_dict() | {"seconds": seconds, "load_seconds": model.network.load_seconds}


def _print(segment, words):
    print(f"{segment.start:9.2f} - {segment.end:8.2f}  {segment.text.strip()}", flush=True)
    for w in segment.words if words else ():
        print(f"{'':8}{w.start:9.2f} - {w.end:8.2f}  {w.text}", flush=True)
