"""A small document, written as one self-contained HTML page or as Markdown.

Everything that comes from a table is escaped on the way out. Words may hold `code` between
backticks, and nothing else is markup.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 2 or 3 (1 is the document's title)."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms and what they mean."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are plain text.

    Attributes:
        columns: heads.
        rows: as many cells each as there are columns.
        caption: what the table says.
        mono: columns of names, shown in a fixed-width font.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    mono: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture.

    Attributes:
        name: of its file, without the ending.
        png: its bytes.
        alt: what it shows, for who cannot see it.
        caption: how to read it.
    """

    name: str
    png: bytes
    alt: str
    caption: str


Block: TypeAlias = Heading | Words | Terms | Table | Figure


def slug(text: str) -> str:
    """A text as part of a file name or an anchor."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "x"


def _anchors(blocks: Sequence[Block]) -> Iterator[tuple[str, Block]]:
    """Each block with its anchor, which is empty unless it is a heading."""
    seen: dict[str, int] = {}
    for block in blocks:
        anchor = ""
        if isinstance(block, Heading):
            anchor = slug(block.text)
            seen[anchor] = seen.get(anchor, 0) + 1
            if seen[anchor] > 1:
                anchor += f"-{seen[anchor]}"
        yield anchor, block


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[-+]?[\d,]*\.?\d+(e[-+]\d+)?( ?%)?", cell) is not None


def _right_aligned(table: Table) -> list[bool]:
    """Whether a column holds numbers and gaps only."""
    out = []
    for index in range(len(table.columns)):
        cells = [row[index] for row in table.rows if row[index] not in ("", "-")]
        out.append(bool(cells) and all(_is_number(cell) for cell in cells))
    return out


# ---- HTML

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --back: #fff;
  --band: #f5f7f9; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa5b1; --line: #3a424b;
  --back: #14181c; --band: #1c2228; --link: #7db8f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main, nav { max-width: 1240px; margin: 0 auto; padding: 0 24px; }
main { padding-bottom: 80px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 36px 0 8px; }
h2 { font-size: 1.45rem; margin: 56px 0 8px; padding-top: 14px; border-top: 2px solid var(--line); }
h3 { font-size: 1.12rem; margin: 34px 0 6px; }
p, dd { max-width: 76ch; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
nav { font-size: .95rem; }
nav ul { margin: 4px 0 20px; padding-left: 0; list-style: none; columns: 2 320px; }
nav li.sub { padding-left: 18px; font-size: .92em; }
dl { display: grid; grid-template-columns: minmax(9em, max-content) 1fr; gap: 6px 20px; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--ink); }
@media (max-width: 640px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 8px; } }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  font-size: .88em; }
code { background: var(--band); padding: 1px 4px; border-radius: 3px; }
figure { margin: 18px 0 28px; }
figcaption { color: var(--soft); font-size: .92rem; max-width: 84ch; margin: 6px 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { padding: 5px 12px; text-align: left; vertical-align: top; white-space: nowrap; }
th { background: var(--band); border-bottom: 1px solid var(--line); font-weight: 600; }
tbody tr + tr td { border-top: 1px solid var(--line); }
td.long { white-space: normal; min-width: 26em; }
.num { text-align: right; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px;
  border: 1px solid var(--line); }
"""
LONG_CELL = 60
"""Characters from which a cell may break into lines."""


def _inline_html(text: str) -> str:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a lone backtick is a character
        return html.escape(text)
    return "".join(
        f"<code>{html.escape(part)}</code>" if index % 2 else html.escape(part)
        for index, part in enumerate(parts)
    )


def _table_html(table: Table) -> str:
    right = _right_aligned(table)

    def classes(index: int, cell: str) -> str:
        mono = table.columns[index] in table.mono
        long = len(cell) >= LONG_CELL and not mono
        words = [("num", right[index]), ("mono", mono), ("long", long)]
        found = " ".join(word for word, holds in words if holds)
        return f' class="{found}"' if found else ""

    heads = "".join(
        f'<th scope="col"{" class=num" if right[i] else ""}>{html.escape(name)}</th>'
        for i, name in enumerate(table.columns)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{classes(i, cell)}>{html.escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    return (
        f"<figure><figcaption>{_inline_html(table.caption)}</figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div></figure>"
    )


def _block_html(block: Block, anchor: str) -> str:
    if isinstance(block, Heading):
        text = _inline_html(block.text)
        return f'<h{block.level} id="{html.escape(anchor)}">{text}</h{block.level}>'
    if isinstance(block, Words):
        return f"<p>{_inline_html(block.text)}</p>"
    if isinstance(block, Terms):
        items = "\n".join(
            f"<dt>{_inline_html(term)}</dt><dd>{_inline_html(text)}</dd>"
            for term, text in block.items
        )
        return f"<dl>\n{items}\n</dl>"
    if isinstance(block, Table):
        return _table_html(block)
    data = base64.b64encode(block.png).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(block.alt)}">'
        f"<figcaption>{_inline_html(block.caption)}</figcaption></figure>"
    )


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One page that loads nothing: style and figures are inside."""
    anchored = list(_anchors(blocks))
    contents = "\n".join(
        f"<li{' class=sub' if block.level > 2 else ''}>"
        f'<a href="#{html.escape(anchor)}">{_inline_html(block.text)}</a></li>'
        for anchor, block in anchored
        if isinstance(block, Heading)
    )
    body = "\n".join(_block_html(block, anchor) for anchor, block in anchored)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>{html.escape(title)}</h1>\n"
        f'<nav aria-label="contents" style="padding:0">\n<ul>\n{contents}\n</ul>\n</nav>\n'
        f"{body}\n</main>\n</body>\n</html>\n"
    )


# ---- Markdown


def escape_markdown(text: str) -> str:
    """Text in which Markdown and HTML find no markup, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~$])", r"\\\1", text)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)


def _code_markdown(text: str) -> str:
    clean = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{clean}`" if clean else ""


def _inline_markdown(text: str) -> str:
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape_markdown(text)
    out = []
    for index, part in enumerate(parts):
        if index % 2:
            out.append(f"`{part}`")
        else:  # the spaces beside code stay
            lead, tail = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
            out.append(f"{lead}{escape_markdown(part)}{tail if part.strip() else ''}")
    return "".join(out)


def _table_markdown(table: Table) -> str:
    right = _right_aligned(table)
    heads = [escape_markdown(name) for name in table.columns]
    lines = [
        f"| {' | '.join(heads)} |",
        f"|{'|'.join('---:' if r else '---' for r in right)}|",
    ]
    for row in table.rows:
        cells = [
            _code_markdown(cell)
            if name in table.mono and cell not in ("", "-")
            else escape_markdown(cell)
            for name, cell in zip(table.columns, row, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([_inline_markdown(table.caption), "", *lines])


def to_markdown(title: str, blocks: Sequence[Block], figures: str) -> str:
    """The same as Markdown, with figures as links.

    Args:
        title: of the document.
        blocks: its content.
        figures: folder of the figures' files, relative to the document.
    """
    anchored = list(_anchors(blocks))
    out = [f"# {escape_markdown(title)}"]
    out.append(
        "\n".join(
            f"{'  ' * (block.level - 2)}- [{_inline_markdown(block.text)}](#{anchor})"
            for anchor, block in anchored
            if isinstance(block, Heading)
        )
    )
    for anchor, block in anchored:
        if isinstance(block, Heading):
            text = _inline_markdown(block.text)
            out.append(f'<a id="{anchor}"></a>\n\n{"#" * block.level} {text}')
        elif isinstance(block, Words):
            out.append(_inline_markdown(block.text))
        elif isinstance(block, Terms):
            lines = (f"- **{_inline_markdown(t)}**: {_inline_markdown(d)}" for t, d in block.items)
            out.append("\n".join(lines))
        elif isinstance(block, Table):
            out.append(_table_markdown(block))
        else:
            alt = escape_markdown(block.alt)
            caption = _inline_markdown(block.caption)
            out.append(f"![{alt}]({figures}/{block.name}.png)\n\n{caption}")
    return "\n\n".join(out) + "\n"
