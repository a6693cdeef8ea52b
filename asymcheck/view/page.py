"""Assemble the page: with links to its files for the server, or with everything inside for a static file."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources

_POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
SERVED_POLICY = f"{_POLICY}; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"
"""Content security policy of the served page: only its own files, and no inline code."""
FILES = {"page.js": "text/javascript", "page.css": "text/css"}
"""Files of the page and their media types."""


def read(name: str) -> str:
    """Return one of the files beside this module."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def static_page(documents: dict[str, object]) -> str:
    """Return the page as one file with its documents. The file loads nothing and runs only its own script."""
    style, script = read("page.css"), read("page.js")
    # A name that contains "</script>" must not end the element. JSON allows the escape in any string.
    data = json.dumps(documents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = f"{_POLICY}; script-src {_source_of(script)}; style-src {_source_of(style)}"
    page = read("page.html")
    for mark, text in (
        ("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ('<link rel="stylesheet" href="page.css">', f"<style>{style}</style>"),
        ('<script src="page.js" defer></script>', ""),
        ("<!-- data -->", f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'),
    ):
        page = page.replace(mark, text, 1)
    return page


def _source_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
