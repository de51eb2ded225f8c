"""The parser of `ggjit`: the table of commands, and argparse's parser made from it.

Only the module of the command asked for is imported; `ggjit --help` needs none of them.
"""
import argparse
import importlib
import re
import textwrap

from ggjit import __version__
from ggjit.core.arguments import nearest
from ggjit.ops.core.printable import printable

# {command: its line of help}, in the order of `ggjit --help`; the module is the file of that name in `commands`
COMMANDS = {
    "demo": "the main job: real sentences through the real MiniLM, nearest neighbours, speed, memory plan",
    "embed": "sentence embeddings",
    "rerank": "which of some texts answer a query best, by a reranker",
    "generate": "continue a text",
    "chat": "a conversation with a model",
    "serve": "a model over HTTP: OpenAI's chat, completions, embeddings, and llama.cpp's tokenize, metrics, slots",
    "finetune": "train a LoRA adapter beside the frozen, also quantised, weights of a model",
    "bench": "speed of a model, as llama-bench: pp = prompt processing, tg = text generation",
    "transcribe": "text from a recording, with times (Whisper)",
    "vad": "where there is speech in a recording (Silero VAD)",
    "quantize": "a model's matrices in smaller types: llama-quantize's mixtures, byte for byte",
    "convert": "a Hugging Face folder (safetensors, config, tokenizer) as a GGUF file",
    "edit": "keys and tensors of a GGUF changed, renamed or removed; models split into several files, or joined",
    "imatrix": "how much each column of each matrix matters on a text, for quantize",
    "control-vector": "a direction from one side of pairs of texts to the other, for --control-vector",
    "perplexity": "how well a model predicts a text; KL divergence from a better model",
    "peak": "peak memory of a model, measured without allocating or reading weights",
    "fit": "the best setting of a model that stays within so much memory, and why not the others",
    "plan": "place buffers with given lifetimes (MiniMalloc's CSV: id,lower,upper,size)",
    "ops": "the op suite of ggml's test-backend-ops: check, time or list the cases",
    "info": "version, processor, devices, and which types and ops each device supports; one op; or what is in a GGUF",
    "warm-up": "compile the kernels a model needs into the cache, and measure once which tiles make its tokens fastest "
               "on this machine",
    "cache": "list what is kept for the next time; export compiled kernels into one file, or import them: nothing is "
             "compiled on the next machine",
    "worker": "lend this machine to others: gg.cluster.connect there makes it a device",
    "completion": "print the script that completes commands and options in a shell",
}
_NEGATIVE = re.compile(r"-\.?\d")
TRY_FIRST = (("ggjit demo", "real sentences: neighbours, speed, memory"),
             ('ggjit embed "a cat" "a dog"', "two vectors of 384 numbers"),
             ("ggjit peak llama-7b --n-ctx 4096", "what a model would take, without having it"))


def _examples(title, pairs):
    width = max(len(line) for line, _ in pairs)
    return "\n".join([f"{title}:", *(f"  {line:<{width}}   {what}".rstrip() for line, what in pairs)])


def try_first():
    """What `ggjit` alone prints."""
    return (f"usage: ggjit COMMAND ...\n\n{_examples('try first', TRY_FIRST)}\n\n"
            "`ggjit --help` lists the commands, `ggjit COMMAND --help` explains one with examples.")


class WholeNames(argparse.ArgumentParser):
    """argparse's parser, of options in full: `--n-pre` and `-ng` are unknown."""

    def __init__(self, **kw):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kw)

    def error(self, message):
        """One line, and status 2: the usage of a command with many options would hide it."""
        self.exit(2, f"{self.prog}: {printable(message)}; `{self.prog} --help` explains\n")

    def _get_option_tuples(self, option_string):
        # allow_abbrev is about long options alone; of short ones argparse keeps also those that only begin like it
        return [found for found in super()._get_option_tuples(option_string) if option_string.startswith(found[1])]


class CommandParser(WholeNames):
    """The parser of one command.  file_actions: its arguments that are paths, for shell completion."""

    def __init__(self, **kw):
        super().__init__(**kw)
        self.file_actions = []

    def add_file(self, *names, **kw):
        self.file_actions.append(self.add_argument(*names, **kw))

    def add_model(self, help, required=True):
        """A model by place or by option: `MODEL` or `-m MODEL`."""
        one = self.add_mutually_exclusive_group(required=required)
        self.file_actions += [
            one.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help),
            one.add_argument("-m", "--model", metavar="MODEL", help="the same")]


class Arguments:
    """parser: argparse's, of the whole command line; the arguments of a command are declared when it is asked for."""

    def __init__(self):
        self.parser = WholeNames(
            prog="ggjit", description="ggml's engine as a Numba JIT: run, measure and inspect models.",
            epilog=_examples("try first", TRY_FIRST) + "\n\nmore: ggjit COMMAND --help")
        self.parser.add_argument("--version", action="version", version=f"ggjit {__version__}")
        add = self.parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=CommandParser)
        self._commands = {name: add.add_parser(name, help=help, description=textwrap.fill(help, 80))
                          for name, help in COMMANDS.items()}
        self._modules = {}              # {name of a declared command: its module}

    def command(self, name):
        """The parser of one command, with its arguments."""
        c = self._commands[name]
        if name not in self._modules:
            module = self._modules[name] = importlib.import_module(
                f"ggjit.tools.command.commands.{name.replace('-', '_')}")
            c.epilog = _examples("examples", module.EXAMPLES)
            if getattr(module, "JSON", True):
                c.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
            module.add_arguments(c)
        return c

    def parse(self, argv):
        """(the function that runs the command, its namespace); argparse's exit with status 2 for wrong usage."""
        name = next((a for a in argv if not a.startswith("-")), None)
        if name in COMMANDS:
            self.command(name)
            argv = self._values_kept(name, argv)
        elif name == argv[0]:
            self.parser.error(f"no COMMAND {name!r}{nearest(name, COMMANDS)}; there are {', '.join(COMMANDS)}")
        args, rest = self.parser.parse_known_args(argv)
        if rest:
            self._commands[args.command].error(self._unknown(args.command, rest))
        return self._modules[args.command].run, args

    def _values_kept(self, name, argv):
        """argv with "--memory", "-3G" as "--memory=-3G", which argparse takes for an option of its own: what begins
        with a minus and a digit is the value of the option before it."""
        options, out = self._commands[name]._option_string_actions, []
        for text in argv:
            before = options.get(out[-1]) if out else None
            if before is not None and before.nargs is None and text not in options and _NEGATIVE.match(text):
                out[-1] += "=" + text
            else:
                out.append(text)
        return out

    def _unknown(self, name, rest):
        text = next((a for a in rest if a.startswith("-")), rest[0])
        hint = nearest(text.partition("=")[0], self._commands[name]._option_string_actions)
        return f"unknown: {' '.join(rest)}{hint}"
