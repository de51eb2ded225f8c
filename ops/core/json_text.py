"""JSON from outside: whatever is wrong with it is a ValueError."""
import json


def parse_json(text):
    """What json.loads makes of a text.  Errors: ValueError, for text that nests too deeply too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many values in each other") from None
