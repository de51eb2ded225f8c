"""GPT-2's mapping of bytes to characters: visible characters of Latin-1 map to themselves, others to U+0100 onwards."""


def _byte_of_char():
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()
CHAR_OF_BYTE = [char for _, char in sorted((byte, char) for char, byte in BYTE_OF_CHAR.items())]
