"""The arguments of `ggjit`: every command with its options and examples."""
import argparse
import textwrap

from ggjit.core.arguments import nearest

TRY_FIRST = (("ggjit demo", "real sentences: neighbours, speed, memory"),
             ('ggjit embed "a cat" "a dog"', "two vectors of 384 numbers"),
             ("ggjit peak llama-7b --n-ctx 4096", "what a model would take, without having it"))
SHELLS = ("bash", "zsh", "fish", "tcsh")


def _positive(text):
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return n


def _count(text):
    n = int(text)
    if n < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return n


def _layers(text):
    n = int(text)
    if n < -1:
        raise argparse.ArgumentTypeError("must be a number of layers, or -1 for all")
    return n


_positive.__name__ = "positive integer"                 # as argparse names them in its errors
_count.__name__ = _layers.__name__ = "integer"


def _examples(title, pairs):
    width = max(len(line) for line, _ in pairs)
    return "\n".join([f"{title}:", *(f"  {line:<{width}}   {what}".rstrip() for line, what in pairs)])


def try_first():
    """What `ggjit` alone says."""
    return (f"usage: ggjit COMMAND ...\n\n{_examples('try first', TRY_FIRST)}\n\n"
            "`ggjit --help` lists the commands, `ggjit COMMAND --help` explains one with examples.")


class Arguments:
    """parser: argparse's, of the whole command line; commands: {name: argparse's of the command}.

    file_completion: the attribute `complete` of arguments that are paths, as the library shtab reads it.
    """

    def __init__(self, file_completion=None):
        from ggjit import __version__
        self._file_completion = file_completion
        self.commands = {}
        self.parser = argparse.ArgumentParser(
            prog="ggjit", description="ggml's engine as a Numba JIT: run, measure and inspect models.",
            epilog=_examples("try first", TRY_FIRST) + "\n\nmore: ggjit COMMAND --help",
            formatter_class=argparse.RawDescriptionHelpFormatter)
        self.parser.add_argument("--version", action="version", version=f"ggjit {__version__}")
        self._sub = self.parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for add in (self._encoder, self._llama, self._speech, self._memory, self._engine):
            add()

    def parse(self, argv):
        """The namespace; argparse's exit with status 2 for wrong usage."""
        if argv and not argv[0].startswith("-") and argv[0] not in self.commands:
            self.parser.error(f"no COMMAND {argv[0]!r}{nearest(argv[0], self.commands)}; "
                              f"there are {', '.join(self.commands)}")
        args, rest = self.parser.parse_known_args(argv)
        if rest:
            self.commands[args.command].error(f"unknown: {' '.join(rest)}; `ggjit {args.command} --help` has examples")
        return args

    def _command(self, name, help, *examples, json=True):
        c = self._sub.add_parser(name, help=help, description=textwrap.fill(help, 80),
                                 epilog=_examples("examples", examples),
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
        if json:
            c.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        self.commands[name] = c
        return c

    def _file(self, c, *names, **kw):
        c.add_argument(*names, **kw).complete = self._file_completion

    def _encoder(self):
        c = self._command("demo", "the main job: real sentences through the real MiniLM, nearest neighbours, speed, "
                          "memory plan", ("ggjit demo", ""), ("ggjit demo --threads 1 --json", "the same as numbers"))
        _threads(c)
        c = self._command("embed", "sentence embeddings", ('ggjit embed "a cat" "a dog"', "MiniLM"),
                          ('ggjit embed --model encoder.gguf "a text"', "a model of yours"),
                          ('ggjit embed --json "a text" > vector.json', "all numbers"))
        self._file(c, "--model", metavar="PATH", help="a bert GGUF (default: MiniLM, made on first use)")
        _threads(c)
        _repack(c)
        c.add_argument("text", nargs="+", metavar="TEXT")

    def _llama(self):
        c = self._command("generate", "continue a text",
                          ('ggjit generate --model m.gguf --prompt "Once upon a time"', ""),
                          ('ggjit generate --model m.gguf --prompt "1, 2, 3" --temp 0', "always the likeliest token"),
                          ('ggjit generate --model m.gguf --prompt "Hi" --seed 7 --n-predict 200', "repeatable"))
        self._file(c, "--model", required=True, metavar="PATH", help="a llama GGUF")
        c.add_argument("--prompt", required=True, metavar="TEXT")
        c.add_argument("--n-predict", type=_count, default=64, metavar="N", help="tokens to generate (64)")
        c.add_argument("--temp", type=float, default=0.8, metavar="T", help="temperature, 0: greedy (0.8)")
        c.add_argument("--top-k", type=_count, default=40, metavar="K", help="of the K likeliest tokens; 0: all (40)")
        c.add_argument("--top-p", type=float, default=0.95, metavar="P",
                       help="of the likeliest that sum to P (0.95)")
        c.add_argument("--seed", type=int, default=None, metavar="N", help="of the draws (a new one each time)")
        c.add_argument("--kv-type", default="F16", metavar="TYPE", help="type of the KV cache: F16 or F32 (F16)")
        c.add_argument("--n-ctx", type=_positive, default=None, metavar="N", help="context size (the model's own)")
        _repack(c)
        _gpu(c)
        _threads(c)
        c = self._command("bench", "speed of a model, as llama-bench: pp = prompt processing, tg = text generation",
                          ("ggjit bench m.gguf", "a prompt of 128, then 64 tokens"),
                          ("ggjit bench m.gguf -p 512 -n 0 -t 1 -r 5", "prompts alone, one thread"))
        self._file(c, "model", metavar="MODEL", help="a llama GGUF; no vocabulary needed")
        c.add_argument("-p", type=_count, default=128, metavar="N", help="prompt tokens, 0 skips (128)")
        c.add_argument("-n", type=_count, default=64, metavar="N", help="generated tokens, 0 skips (64)")
        _gpu(c)
        _threads(c, "-t", "--threads")
        c.add_argument("-r", type=_positive, default=3, metavar="N", help="repetitions (3)")
        c.add_argument("--kv-type", default="F16", metavar="TYPE", help="type of the KV cache: F16 or F32 (F16)")
        _repack(c)

    def _speech(self):
        c = self._command("vad", "where somebody speaks in a recording (Silero VAD)",
                          ("ggjit vad talk.wav --model silero.bin", "start and end of each stretch"),
                          ("ggjit vad talk.wav --model silero.bin --threshold 0.7 --json", "stricter, as JSON"))
        self._file(c, "wav", metavar="FILE.wav", help="16 kHz PCM")
        self._file(c, "--model", required=True, metavar="PATH", help="a Silero VAD model in whisper.cpp's file form")
        c.add_argument("--threshold", type=float, default=0.5, metavar="P", help="probability of speech (0.5)")
        c.add_argument("--min-speech-ms", type=_count, default=250, metavar="MS",
                       help="shorter speech is dropped (250)")
        c.add_argument("--min-silence-ms", type=_count, default=100, metavar="MS",
                       help="silence that ends speech (100)")
        c.add_argument("--max-speech-s", type=float, default=float("inf"), metavar="S",
                       help="longer speech is cut (never)")
        c.add_argument("--pad-ms", type=_count, default=30, metavar="MS", help="added on both sides (30)")
        c.add_argument("--conv-type", choices=("F32", "F16"), default="F32", help="F16: round as ggml does (F32)")
        _threads(c)

    def _memory(self):
        c = self._command("peak", "peak memory of a model, measured without allocating or reading weights",
                          ("ggjit peak llama-70b --n-ctx 4096 --flash", "a shape alone"),
                          ("ggjit peak m.gguf --what-if", "batch sizes, flash attention, planners"),
                          ("ggjit peak m.gguf --png plan.png", "the picture: offset by time"))
        self._file(c, "model", metavar="MODEL", help="a GGUF, or a shape: llama-7b, llama-70b, ...")
        c.add_argument("--n-ctx", type=_positive, default=None, metavar="N", help="context (what it was trained for)")
        c.add_argument("--n-batch", type=_positive, default=512, metavar="N", help="tokens per batch (512)")
        c.add_argument("--flash", action="store_true", help="with flash attention")
        c.add_argument("--planner", choices=("ggml", "ggml-2023", "best"), default="best",
                       help="who places the tensors (best)")
        c.add_argument("--order", choices=("graph", "memory"), default="graph", help="execution order (graph)")
        c.add_argument("--all-logits", action="store_true", help="logits of every token, as llama.cpp reserves them")
        _repack(c)
        c.add_argument("--what-if", action="store_true", help="a table over planner, batch and flash attention")
        self._file(c, "--png", metavar="FILE", help="write the picture: offset by time")
        self._file(c, "--csv", metavar="FILE", help="write one line per tensor")
        c = self._command("plan", "place buffers with given lifetimes (MiniMalloc's CSV: id,lower,upper,size)",
                          ("ggjit plan buffers.csv -o placed.csv", "as low a peak as a second finds"),
                          ("ggjit plan buffers.csv --capacity 1048576 --time-limit 10", "do they fit?"))
        self._file(c, "input", metavar="IN.csv", help="one line per buffer; lower, upper: half-open steps")
        self._file(c, "-o", "--output", metavar="OUT.csv", help="the input with an offset column")
        c.add_argument("--capacity", type=_count, default=None, metavar="BYTES", help="exit 1 if it cannot be met")
        c.add_argument("--time-limit", type=float, default=1.0, metavar="S", help="seconds of search (1)")

    def _engine(self):
        c = self._command("ops", "the op suite of ggml's test-backend-ops: check, time or list the cases",
                          ("ggjit ops test -o soft_max,rope", "against float64 and the real ggml"),
                          ("ggjit ops test --resume ops.jsonl", "the whole suite, in as many runs as it takes"),
                          ("ggjit ops perf -o mul_mat --sample 20", "time next to ggml's"))
        c.add_argument("mode", choices=("test", "perf", "support"))
        c.add_argument("-o", "--op", metavar="OP", help="ops or classes, comma separated, or one whole \"OP(params)\"")
        c.add_argument("-b", "--backend", metavar="DEVICE", default="CPU", help="device (CPU)")
        c.add_argument("-p", "--params", metavar="REGEX", help="cases whose parameters match")
        c.add_argument("--seed", type=_count, default=0, metavar="N", help="of the inputs and the sample (0)")
        c.add_argument("--sample", type=_positive, default=None, metavar="N", help="at most N cases, drawn by the seed")
        c.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads of both sides (1)")
        c.add_argument("-j", "--jobs", type=_positive, default=None, metavar="N",
                       help="processes that share the test (one a core)")
        self._file(c, "--resume", metavar="FILE", help="test: note outcomes in FILE, skip those there that passed")
        c = self._command("info", "version, processor, devices, and which types and ops each device supports",
                          ("ggjit info", ""), ("ggjit info soft_max", "one op: builders, types, files"))
        c.add_argument("op", nargs="?", metavar="OP", help="one op: its builders, types and files (\"soft_max\")")
        c = self._command("warm-up", "compile the kernels a model needs into the cache, and measure once which tiles "
                          "make its tokens fastest on this machine", ("ggjit warm-up", "MiniLM's"),
                          ("ggjit warm-up m.gguf", "of a llama: the first answer comes at once"))
        self._file(c, "model", nargs="?", metavar="MODEL", help="a GGUF (default: MiniLM)")
        _repack(c)
        c = self._command("completion", "print the script that completes commands and options in a shell",
                          ("ggjit completion bash > ~/.local/share/bash-completion/completions/ggjit", ""),
                          ("ggjit completion zsh > ~/.zfunc/_ggjit", "a folder of $fpath"),
                          ("ggjit completion fish > ~/.config/fish/completions/ggjit.fish", ""), json=False)
        c.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _gpu(c):
    c.add_argument("-ngl", "--n-gpu-layers", type=_layers, default=None, metavar="N",
                   help="the last N layers on the first GPU, -1: all and the output (none)")
    c.add_argument("--cpu-moe", action="store_true", help="with -ngl: the weights of experts stay on the CPU")


def _repack(c):
    c.add_argument("--repack", action=argparse.BooleanOptionalAction, default=None,
                   help="F32, Q4_0 and Q8_0 matrices in a layout of their own: faster products of "
                   "several columns for a slower load and memory that is not shared (encoders: yes)")


def _threads(c, *names):
    c.add_argument(*(names or ("--threads",)), type=_positive, default=None, metavar="N",
                   help="threads (default: the cores this process may use)")
