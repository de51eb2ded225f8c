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
    "demo": "compute embeddings of real sentences with MiniLM: nearest neighbours, speed, memory plan",
    "embed": "compute sentence embeddings",
    "rerank": "sort texts by how well they answer a query",
    "generate": "continue a text",
    "chat": "talk with a model",
    "serve": "serve a model over HTTP: OpenAI's chat, completions and embeddings, llama.cpp's tokenize, metrics, slots",
    "finetune": "train a LoRA adapter; the weights of the model, also quantised ones, stay as they are",
    "bench": "measure the speed of a model, as llama-bench does: pp = prompt processing, tg = text generation",
    "transcribe": "write the text of a recording, with times (Whisper)",
    "vad": "find speech in a recording (Silero VAD)",
    "quantize": "write a model with smaller types; the bytes equal llama-quantize's",
    "convert": "write a Hugging Face folder (safetensors, config, tokenizer) as a GGUF file",
    "edit": "change, rename or remove keys and tensors of a GGUF file; split a model into several files, or join them",
    "imatrix": "compute the importance of each column of each matrix on a text, for quantize",
    "control-vector": "compute the direction from negative to positive texts, for --control-vector",
    "perplexity": "measure how well a model predicts a text; KL divergence from a better model",
    "peak": "compute the peak memory of a model without allocating it or reading weights",
    "fit": "find the best settings of a model that stay within a memory limit, and say why others do not",
    "plan": "place buffers with given lifetimes (MiniMalloc's CSV: id,lower,upper,size)",
    "ops": "check, time or list the cases of ggml's test-backend-ops",
    "info": "describe this installation (version, processor, devices, types, ops), one op, or a GGUF file",
    "warm-up": "compile the kernels of a model into the cache, and measure the fastest ones for this processor",
    "cache": "list the compiled kernels and repacked weights in the cache; export kernels to a file, or import them",
    "worker": "let other machines compute on this one: gg.cluster.connect makes it a device there",
    "completion": "print the completion script of a shell",
}
_NEGATIVE = re.compile(r"-\.?\d")
TRY_FIRST = (("ggjit demo", "real sentences: neighbours, speed, memory"),
             ('ggjit embed "a cat" "a dog"', "two vectors of 384 numbers"),
             ("ggjit peak llama-7b --n-ctx 4096", "memory of a model, computed without its file"))


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
