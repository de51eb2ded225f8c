"""Makes texts of files, names and vocabularies safe to print, since a terminal obeys control characters.

    printable("a\\x1b[2J")                the escape character becomes \\ x 1 b
    printable("two\\nlines", keep=TEXT)   line feeds and tabs stay

Escaped are the C0 and C1 controls, DEL, the line and paragraph separators and what reverses the direction of writing
(Unicode Annex 9); also lone surrogates, which no stream can encode.
"""
import re

TEXT = "\n\t"                   # control characters that running text may hold
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(x, keep=""):
    """str(x) with the characters a terminal would obey as Python's escapes, except those of `keep`."""
    def escape(match):
        c = match[0]
        return c if c in keep else c.encode("unicode_escape").decode()
    return _UNSAFE.sub(escape, str(x))


def shown_file(file):
    """"cell" for the code of a notebook's cell, whose file name is a number; else the file's name."""
    return "cell" if "ipykernel_" in file or file.startswith("<ipython") else file
