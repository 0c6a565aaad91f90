"""What the site takes from elsewhere: files outside docs/, and the help texts of the commands.

Pages link to the repository's files by relative paths, which work where the repository is browsed.
In the site the files of `OUTSIDE` are pages, under the names given here, and others are named only.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

OUTSIDE = {
    "README.md": "readme.md",
    "DESIGN.md": "design.md",
    "results/README.md": "measuring.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the repository -> its page in the site."""
FOLDERS = {page: posixpath.dirname(source) for source, page in OUTSIDE.items()}
COMMANDS = "<!-- every command's help -->"
"""Where cli.md shows what `tl-megamoe COMMAND --help` prints."""
COLUMNS = "88"
ROW = re.compile(r"^\|.*$", re.M)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[([^]]+)]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files from outside the folder."""
    root = os.path.dirname(config.config_file_path)
    for source, page in OUTSIDE.items():
        with open(os.path.join(root, source), encoding="utf-8") as file:
            files.append(File.generated(config, page, content=file.read()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into those of the site, and fill in the help texts."""
    folder = FOLDERS.get(page.file.src_uri, "docs")
    markdown = LINK.sub(lambda link: relinked(link, folder), markdown)
    markdown = ROW.sub(lambda row: CODE.sub(unescaped, row[0]), markdown)
    return markdown.replace(COMMANDS, help_of_commands()) if COMMANDS in markdown else markdown


def unescaped(code: re.Match[str]) -> str:
    """Code in a row of a table: where the repository is browsed its pipes need an escape."""
    return code[0].replace(r"\|", "|")


def relinked(link: re.Match[str], folder: str) -> str:
    """A link of a file in `folder` of the repository, as the site has it."""
    text, path, anchor = link[1], posixpath.normpath(posixpath.join(folder, link[2])), link[3] or ""
    if path in OUTSIDE:
        return f"[{text}]({OUTSIDE[path]}{anchor})"
    if path.startswith("docs/"):
        return f"[{text}]({path.removeprefix('docs/')}{anchor})"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"


def help_of_commands() -> str:
    """A section a command: the text of its --help, from the parser that the command runs."""
    from tl_megamoe.explorer.cli import make_parser

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS  # argparse wraps to it
    try:
        parser = make_parser()
        choices = next(
            action.choices
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        sections = [
            f"### {name}\n\n```text\n{re.sub(r'[ ]+$', '', sub.format_help(), flags=re.M)}```\n"
            for name, sub in choices.items()
        ]
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n".join(sections)
