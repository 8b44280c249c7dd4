"""Floor 7: the playground, the page that ``foretell serve`` shows at ``/``.

``index.html`` names ``style.css`` and six plain scripts, each of which reads the ones before it: ``stream.js`` talks to
the server, ``tree.js`` draws a step, ``pane.js`` shows one run, ``learn.js`` what was learned, ``apart.js`` one step slowly
and a game, ``app.js`` is the form.
``page`` puts them into the html, so that the page is one response; ``csp`` allows exactly these texts and nothing else.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

_STYLE = re.compile(r'<link rel="stylesheet" href="(?P<name>[a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="(?P<name>[a-z]+\.js)"></script>')


@cache
def page() -> str:
    """The whole page: html with its style and scripts inside, no other file and no other host."""
    html = _STYLE.sub(lambda found: f"<style>{_text(found['name'])}</style>", _text("index.html"))
    return _SCRIPT.sub(lambda found: f"<script>{_text(found['name'])}</script>", html)


@cache
def csp() -> str:
    """The value of the ``Content-Security-Policy`` header under which ``page`` runs.

    Only the page's own texts are style and script, by hash; requests go to its own server alone; and no text ever
    becomes html (trusted types), so that nothing a model writes can become code.
    """
    html = _text("index.html")
    styles, scripts = (
        " ".join(f"'sha256-{_sha256(_text(name))}'" for name in pattern.findall(html)) for pattern in (_STYLE, _SCRIPT)
    )
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {styles}",
            f"script-src {scripts}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _text(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
