"""Shell completion: a script made from the parser, so that it knows every command and option there is."""
from ggjit.models.parser import Arguments
from ggjit.ops.errors import extra


def script(shell):
    """The script for "bash", "zsh", "fish" or "tcsh".  Errors: MissingExtra without the library shtab."""
    shtab = extra("shtab", "models")
    return shtab.complete(Arguments(file_completion=shtab.FILE).parser, shell)
