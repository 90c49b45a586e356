"""The HTML of a report: one file, with its style inside, readable at any width."""

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["card", "cards", "details", "escape", "figure", "gap", "number", "page", "section", "table"]

CSS = """
:root { --ink: #1d2429; --soft: #5b6770; --line: #dfe4e8; --paper: #ffffff; --accent: #2c6fbb; --bad: #b03a48 }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1180px; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
h1 { font-size: 1.5rem; margin: .3rem 0 1rem } h2 { font-size: 1.15rem; margin: 1.2rem 0 .5rem }
h3 { font-size: 1.05rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 2px solid var(--line) }
.cards { display: flex; flex-wrap: wrap; gap: .6rem }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .45rem .8rem; min-width: 6.5rem }
.card b { display: block; font-size: 1.1rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere } .card span { color: var(--soft); font-size: .8rem }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); gap: 1rem }
figure { margin: 0; min-width: 0; max-width: 620px } figure.wide { max-width: 860px } figure svg { width: 100%; height: auto; display: block }
figcaption { color: var(--soft); font-size: .8rem; text-align: center }
.scroll { overflow-x: auto; margin: .6rem 0 } table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 600; white-space: nowrap } td.n { text-align: right; white-space: nowrap } td { max-width: 46rem; overflow-wrap: anywhere; white-space: pre-line }
td:first-child { white-space: nowrap; overflow-wrap: normal }
.gap { border: 1px dashed var(--soft); border-radius: 8px; padding: .8rem 1rem; color: var(--soft) } code { background: #f1f4f6; padding: 0 .25rem; border-radius: 3px }
.note { color: var(--soft); font-size: .86rem } .bad { color: var(--bad); font-weight: 600 } summary { cursor: pointer; color: var(--accent) }
"""


def page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def section(title: str, body: str) -> str:
    return f"<section><h3>{escape(title)}</h3>\n{body}\n</section>"


def gap(what: str, command: str) -> str:
    """In the place of a picture of what was not recorded."""
    return f'<p class="gap">Not recorded: {escape(what)}. To record it: <code>{escape(command)}</code></p>'


def figure(svg: str, caption: str, wide: bool = False) -> str:
    return f"<figure{' class=wide' if wide else ''}>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def card(name: str, value: object) -> str:
    return f'<div class="card"><b>{escape(str(value))}</b><span>{escape(name)}</span></div>'


def cards(found: Iterable[str]) -> str:
    return f'<div class="cards">{"".join(found)}</div>'


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Scrolls sideways where it is wider than the page; cells that begin with a digit stand to the right."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(_cell(str(c)) for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    is_number = text.lstrip("-")[:1].isdigit() and " " not in text
    return f"<td{' class=n' if is_number else ''}>{escape(text)}</td>"


def details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
