"""Shell completion: a script made from the parser, so that it knows every command and option there is."""
from ggjit.ops.core.errors import extra
from ggjit.tools.command.parser import Arguments


def script(shell):
    """The script for "bash", "zsh", "fish" or "tcsh".  Errors: MissingExtra without the library shtab."""
    shtab = extra("shtab", "models")
    return shtab.complete(Arguments(file_completion=shtab.FILE).parser, shell)
