"""Prompts with pictures and sounds: their positions in the text, and the ids of all.

    "What is <__media__> and <__media__>?"      a mark for each; without marks they come before the text
    {"role": "user", "content": [{"type": "image", "image": path or array}, {"type": "text", "text": "..."}]}
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}        OpenAI's form
    {"type": "audio", "audio": path or samples}
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}        OpenAI's form
"""
import base64
import binascii
import dataclasses
import os
from typing import Any

import numpy as np

from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.whole_numbers import is_whole

MARK = "<__media__>"
PICTURES, SOUNDS = ("image", "image_url", "input_image"), ("audio", "input_audio")


@dataclasses.dataclass(frozen=True)
class Heard:
    """A sound among pictures: a source that read_sound takes."""
    source: Any


def pictures_and_sounds(images, audio):
    """[pictures, and Heard of sounds]; one of them needs no list.  Errors: TypeMismatch."""
    return [*_several("images", images), *map(Heard, _several("audio", audio))]


def _several(name, x):
    if x is None:
        return []
    is_array = isinstance(x, np.ndarray)
    has_rate = isinstance(x, tuple) and len(x) == 2 and is_whole(x[1])          # (samples, rate)
    if isinstance(x, str | os.PathLike | bytes | bytearray) or hasattr(x, "convert") or has_rate or \
            is_array and x.ndim < 4:
        return [x]
    if not is_array and not isinstance(x, list | tuple):
        raise TypeMismatch(f"{name} is a list of {'pictures' if name == 'images' else 'sounds'}, got "
                           f"{type(x).__name__}")
    return list(x)


def ids_with_pictures(m, text, pictures, special=False):
    """Token ids of a text with pictures, and sounds as Heard, at its marks; special: its special tokens are written
    out.

    Errors: NotSupported for a model without a part that sees or hears, ParamError for another number of marks.
    """
    for x in pictures:
        sense, verb, what = (m.hearing, "hears", "sounds") if isinstance(x, Heard) else (m.vision, "sees", "pictures")
        if sense is None:
            raise NotSupported(f"{m.file.path} reads no {what} without a part that {verb}; "
                               f"load_model(path, vision=\"mmproj.gguf\")")
    parts = text.split(MARK) if MARK in text else [*[""] * len(pictures), text]
    if len(parts) != len(pictures) + 1:
        raise ParamError(f"{len(parts) - 1} marks {MARK} in the text, {len(pictures)} pictures and sounds")
    t, ids = m.tokenizer, []
    if t.add_bos and not special:
        ids.append(t.bos_id)
    for i, part in enumerate(parts):
        ids += t.encode(part, False, special)
        if i < len(pictures):
            for piece in _pieces(m, pictures[i]):
                ids += t.encode(piece, False, True) if isinstance(piece, str) else m.pictures.ids_of(piece).tolist()
    return ids


def _pieces(m, x):
    return m.hearing.pieces(x.source) if isinstance(x, Heard) else m.vision.pieces(x)


def without_pictures(messages):
    """(messages with marks in place of pictures and sounds, [pictures, and Heard of sounds])."""
    out, pictures = [], []
    for m in messages:
        content = m.get("content") if isinstance(m, dict) else None
        if isinstance(content, list) and any(_is_medium(part) for part in content):
            texts = []
            for part in content:
                if _is_medium(part):
                    pictures.append(_sound(part) if part["type"] in SOUNDS else _picture(part))
                    texts.append(MARK)
                else:
                    texts.append(_unmarked(_text(part)))
            m = m | {"content": "".join(map(str, texts))}
        elif isinstance(content, str):
            _unmarked(content)
        out.append(m)
    return out, pictures


def _text(part):
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ParamError(f"a part of a message is {kind!r}, which is not text, picture or sound: "
                         f"{{\"type\": \"text\", \"text\": \"...\"}}")
    return text


def _unmarked(text):
    if MARK in str(text):
        raise ParamError(f"a message holds the text {MARK}, which stands for a picture or a sound; give these as "
                         f"parts: {{\"type\": \"image\", \"image\": path}}")
    return text


def _is_medium(part):
    return isinstance(part, dict) and part.get("type") in PICTURES + SOUNDS


def _decoded(data, what):
    """The bytes of a text in base64."""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError, TypeError) as e:
        raise ParamError(f"{what} is damaged: {e}") from None


def _sound(part):
    """The Heard of a part of a message."""
    found = part.get(part["type"])
    if part["type"] == "input_audio":           # bytes only: a path would name a file of the server
        found = _decoded(found.get("data") if isinstance(found, dict) else found, "the data of input_audio")
    if found is None or (isinstance(found, str) and found.startswith(("http://", "https://"))):
        raise ParamError(f"a part of a message has no sound here: {{\"type\": \"audio\", \"audio\": path or samples}}, "
                         f"got the keys {sorted(part)}")
    return Heard(found)


def _picture(part):
    """The picture of a part of a message, in a form that read_picture takes."""
    found = part.get("image" if part["type"] == "image" else "image_url")
    found = found.get("url") if isinstance(found, dict) else found
    if isinstance(found, str) and found.startswith("data:"):
        return _decoded(found.partition(",")[2], "a data: address of a picture")
    if isinstance(found, str) and found.startswith(("http://", "https://")):
        raise ParamError(f"{found[:60]}: pictures are not fetched; load it, and give its path or bytes")
    if found is None:
        raise ParamError(f"a part of a message has no picture: {{\"type\": \"image\", \"image\": path or array}}, got "
                         f"the keys {sorted(part)}")
    return found
