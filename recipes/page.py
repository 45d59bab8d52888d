"""Pieces of a page that needs nothing else: no links, no scripts, everything in it escaped."""

import html
import unicodedata

CSS = """body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}img{max-width:100%}
h2{margin:2em 0 .5em;border-bottom:2px solid #eee}h3{margin:1.5em 0 .3em}h4{margin:1em 0 .3em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .9em .2em 0;text-align:right;border-bottom:1px solid #ddd;vertical-align:top}
td:first-child,th:first-child{text-align:left}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f5f5f5;padding:.5em;margin:.3em 0;text-align:left}
code{background:#f5f5f5;padding:0 .2em;white-space:pre-wrap;overflow-wrap:anywhere}caption{text-align:left;font-weight:600}
.beside{display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 4em}.beside td,.beside th{padding-right:.6em}.faint{color:#666}"""


class Html(str):
    """Text that is HTML already; all other text is escaped where it is put in."""


def escape(text: object) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(printable(str(text))))


def printable(text: str) -> str:
    """With controls, which could reorder or hide text, and halves of characters, which cannot be written, as escapes; but for
    white space and the joiners of letters."""
    return "".join(c if c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) == "Zs" else repr(c)[1:-1] for c in text)


def table(header: list[str], rows: list[list[str]], caption: str = "") -> Html:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    caption = f"<caption>{escape(caption)}</caption>" if caption else ""
    return Html(f"<table>{caption}{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>")


def document(title: str, css: str, body: list[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{css}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'
