"""Prompts with pictures: where they stand in a text, and the ids of both.

    "What is <__media__> and <__media__>?"      a mark for each picture; without marks they come before the text
    {"role": "user", "content": [{"type": "image", "image": path or array}, {"type": "text", "text": "..."}]}
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}        OpenAI's form
"""
import base64
import binascii

from ggjit.ops.core.errors import NotSupported, ParamError

MARK = "<__media__>"


def ids_with_pictures(m, text, pictures, special=False):
    """Token ids of a text with pictures at its marks; special: its special tokens are written out.

    Errors: NotSupported for a model without a vision part, ParamError for another number of marks than of pictures.
    """
    if m.vision is None:
        raise NotSupported(f"{m.file.path} reads no pictures alone; load_model(path, vision=\"mmproj.gguf\")")
    parts = text.split(MARK) if MARK in text else [*[""] * len(pictures), text]
    if len(parts) != len(pictures) + 1:
        raise ParamError(f"{len(parts) - 1} marks {MARK} in the text, {len(pictures)} pictures")
    t, ids = m.tokenizer, []
    if t.add_bos and not special:
        ids.append(t.bos_id)
    for i, part in enumerate(parts):
        ids += t.encode(part, False, special)
        if i < len(pictures):
            for piece in m.vision.pieces(pictures[i]):
                ids += t.encode(piece, False, True) if isinstance(piece, str) else m.pictures.ids_of(piece).tolist()
    return ids


def without_pictures(messages):
    """(messages with marks in place of pictures, [pictures])."""
    out, pictures = [], []
    for m in messages:
        content = m.get("content") if isinstance(m, dict) else None
        if isinstance(content, list) and any(_is_picture(part) for part in content):
            texts = []
            for part in content:
                if _is_picture(part):
                    pictures.append(_picture(part))
                    texts.append(MARK)
                else:
                    texts.append(_unmarked(part.get("text", "") if isinstance(part, dict) else part))
            m = m | {"content": "".join(map(str, texts))}
        elif isinstance(content, str):
            _unmarked(content)
        out.append(m)
    return out, pictures


def _unmarked(text):
    if MARK in str(text):
        raise ParamError(f"a message holds the text {MARK}, which stands for a picture; give pictures as parts: "
                         f"{{\"type\": \"image\", \"image\": path}}")
    return text


def _is_picture(part):
    return isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image")


def _picture(part):
    """The picture of a part of a message, in a form that read_picture takes."""
    found = part.get("image", part.get("image_url"))
    found = found.get("url") if isinstance(found, dict) else found
    if isinstance(found, str) and found.startswith("data:"):
        try:
            return base64.b64decode(found.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as e:
            raise ParamError(f"a data: address of a picture is damaged: {e}") from None
    if isinstance(found, str) and found.startswith(("http://", "https://")):
        raise ParamError(f"{found[:60]}: pictures are not fetched; load it, and give its path or bytes")
    if found is None:
        raise ParamError(f"a part of a message has no picture: {{\"type\": \"image\", \"image\": path or array}}, got "
                         f"the keys {sorted(part)}")
    return found
