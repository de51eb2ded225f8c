"""`ggjit completion`: completion scripts for shells, generated from the parser."""
from ggjit.ops.core.errors import extra
from ggjit.tools.command.parser import COMMANDS, Arguments

EXAMPLES = (("ggjit completion bash > ~/.local/share/bash-completion/completions/ggjit", ""),
            ("ggjit completion zsh > ~/.zfunc/_ggjit", "a folder of $fpath"),
            ("ggjit completion fish > ~/.config/fish/completions/ggjit.fish", ""))
JSON = False
SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(c):
    c.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args):
    print(script(args.shell))
    return {}


def script(shell):
    """The script for one of SHELLS.  Errors: MissingExtra without the library shtab."""
    shtab, arguments = extra("shtab", "models"), Arguments()
    for name in COMMANDS:
        for action in arguments.command(name).file_actions:
            action.complete = shtab.FILE
    return shtab.complete(arguments.parser, shell)
