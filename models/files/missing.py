"""Error messages for a path without a model file: a web address, a name of the Hugging Face hub, a folder, a wrong
name."""
import os
import re

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MOST_LISTED = 5


def instead_of(path):
    """What the user can do where `path` is no regular file."""
    text = os.fspath(path)
    if re.match(r"https?://", text):
        name = text.split("?")[0].rsplit("/", 1)[-1]
        return f"a web address: ggjit reads files; download it (curl -L -O {text}), then give {name!r}"
    folder, name = os.path.split(text)
    if os.path.isdir(text):
        return _of_a_folder(text)
    if text.startswith("~"):
        return f"a shell reads ~ as your home folder, Python does not: give {os.path.expanduser(text)!r}"
    if HUB_NAME.fullmatch(text) and not os.path.isdir(folder) and not name.endswith(".gguf"):
        return (f"it looks like a name of the Hugging Face hub, and ggjit reads files: download it (hf download {text} "
                f"--local-dir {name}), make a file of it (ggjit convert {name} {name}.gguf), then give '{name}.gguf'; "
                f"a GGUF file from the hub needs no convert")
    if folder and not os.path.isdir(folder):
        return f"there is no folder {folder!r}; check the path"
    return f"check the path and the permissions{_files_of(folder or os.getcwd(), os.path.splitext(name)[1])}"


def _of_a_folder(text):
    if os.path.exists(os.path.join(text, "config.json")):
        return (f"a folder with config.json is a Hugging Face model: make a file of it (ggjit convert {text} "
                f"model.gguf), then give 'model.gguf'")
    return f"give the path of a .gguf file{_files_of(text, '.gguf')}"


def _files_of(folder, suffix):
    """"; DIR has a.gguf, b.gguf", or that it has none."""
    suffix = suffix or ".gguf"
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(suffix))
    except OSError:
        return ""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"; {folder} has {', '.join(names[:MOST_LISTED])}{more}" if names else f"; {folder} has no {suffix} file"
