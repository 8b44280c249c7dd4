"""Texts that a model wrote, made safe to look at: control characters are shown, not sent to a terminal."""

VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
"""For ``str.translate``: control characters to their pictures. Tab and newline stay."""
VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def quoted(text: str) -> str:
    """A token as it is seen: in quotes (double ones around an apostrophe), line breaks and control characters visible."""
    mark = '"' if "'" in text and '"' not in text else "'"
    return mark + text.replace("\n", "\\n").translate(VISIBLE) + mark
