"""What the source may not do, who may write to caches, and what hostile text does to a page."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from fake_rows import BASE, VIEW
from report_rows import result_row, synthetic_rows, write_table
from test_page import Page

from tl_megamoe import native
from tl_megamoe.explorer import bundle
from tl_megamoe.explorer.document import Figure, Heading, Table, Terms, Words, to_html, to_markdown
from tl_megamoe.explorer.farm import Farm
from tl_megamoe.explorer.page import write_page

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for folder in ("tl_megamoe", "explorer") for p in (ROOT / folder).rglob("*.py"))
SOURCES.append(ROOT / "schedules" / "__init__.py")
NAMES = [path.relative_to(ROOT).as_posix() for path in SOURCES]

# ---- the source

FORBIDDEN = {
    "pickle": "runs code of what it reads",
    "cloudpickle": "runs code of what it reads",
    "dill": "runs code of what it reads",
    "joblib": "pickle",
    "shelve": "pickle",
    "marshal": "runs code of what it reads",
    "yaml": "JSON and TOML do",
    "xml": "expands entities",
    "requests": "network",
    "httpx": "network",
    "urllib": "network",
    "http": "network",
    "ftplib": "network",
    "smtplib": "network",
    "ssl": "network",
    "asyncio": "network",
    "huggingface_hub": "network",
}
ALLOWED_IMPORTS = {
    # The name of this host, to tell ranks on one machine from others.
    ("tl_megamoe/handshake.py", "socket"),
    # Pipes to processes that this one has started: nobody else can write to them.
    ("explorer/child.py", "multiprocessing"),
    ("explorer/real_ranks.py", "multiprocessing"),
}
CHECKED_IMPORTS = ("socket", "multiprocessing")
ALLOWED_OBJECTS = {
    # Between ranks of one layer, which write to each other's memory anyway.
    "tl_megamoe/handshake.py",
    "explorer/ranks.py",
}
WRITERS = {
    # In a temporary folder that is renamed, or removed.
    "tl_megamoe/native.py": 2,
    "tl_megamoe/exported.py": 1,
    "tl_megamoe/kernel.py": 1,
    "explorer/bundle.py": 1,
    "explorer/doctor.py": 1,
    # The one place that replaces files, or writes to pipes; and appended lines under a lock.
    "explorer/files.py": 3,
    "explorer/table.py": 2,
    # Cuts a torn line off.
    "explorer/strategy.py": 1,
    # A picture in memory.
    "explorer/figures.py": 1,
    # Nothing is written: the standard output of a reader who left.
    "explorer/cli.py": 1,
}
WRITE_METHODS = {"write_text", "write_bytes", "to_csv", "savefig", "fdopen"}
WRITE_METHODS |= {"NamedTemporaryFile", "mkstemp", "dump", "save_file", "savez", "touch"}


@lru_cache(maxsize=1)
def trees() -> tuple[tuple[str, ast.Module], ...]:
    """The parsed sources by name."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCES)
    return tuple(zip(NAMES, map(ast.parse, texts), strict=True))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression; names that cannot be told are empty."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def imports(tree: ast.Module) -> Iterator[str]:
    """First parts of what is imported, by `import_module` of a word too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]
    for name, call in calls(tree):
        if name.split(".")[-1] in ("import_module", "__import__") and call.args:
            word = call.args[0]
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                yield word.value.split(".")[0]


def keyword(call: ast.Call, name: str) -> Any:
    value = next((k.value for k in call.keywords if k.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else value


def test_nothing_is_unpickled_and_nothing_uses_the_network() -> None:
    found = []
    for name, tree in trees():
        for module in imports(tree):
            if module in FORBIDDEN:
                found.append(f"{name} imports {module}: {FORBIDDEN[module]}")
            elif module in CHECKED_IMPORTS and (name, module) not in ALLOWED_IMPORTS:
                found.append(f"{name} imports {module}")
    assert not found


def test_no_call_runs_a_text() -> None:
    found = []
    for name, tree in trees():
        for function, call in calls(tree):
            last = function.split(".")[-1]
            if function in ("eval", "exec", "compile", "__import__") or function in (
                "os.system",
                "os.popen",
                "subprocess.getoutput",
                "subprocess.getstatusoutput",
                "tempfile.mktemp",
                "torch.hub.load",
                "pd.read_pickle",
            ):
                found.append(f"{name}:{call.lineno} {function}")
            if keyword(call, "shell") not in (None, False):
                found.append(f"{name}:{call.lineno} {function}(shell=)")
            if function == "torch.load" and keyword(call, "weights_only") is not True:
                found.append(f"{name}:{call.lineno} torch.load without weights_only=True")
            if keyword(call, "allow_pickle") not in (None, False):
                found.append(f"{name}:{call.lineno} {function}(allow_pickle=)")
            if last in ("extractall", "extract") and "tar" in function:
                found.append(f"{name}:{call.lineno} {function}")
            if last.endswith("_object") and last != "is_object" and name not in ALLOWED_OBJECTS:
                found.append(f"{name}:{call.lineno} {function}")
    assert not found


def opens_to_write(function: str, call: ast.Call) -> bool:
    """Whether a call may make or change a file."""
    last = function.split(".")[-1]
    if function == "os.open":
        flags = ast.unparse(call.args[1])
        return any(word in flags for word in ("O_WRONLY", "O_RDWR", "O_CREAT"))
    if last == "open" and function not in ("tarfile.open", "ExportedKernels.open", "cls.open"):
        place = 1 if function == "open" else 0
        mode = keyword(call, "mode") or (call.args[place] if len(call.args) > place else None)
        mode = mode.value if isinstance(mode, ast.Constant) else mode
        return isinstance(mode, str) and any(letter in mode for letter in "wax+")
    return last in WRITE_METHODS


def test_files_are_written_in_few_places() -> None:
    """A new place must show that a kill or a full disk leaves no half of a file: test_faults.py."""
    found: dict[str, int] = {}
    for name, tree in trees():
        in_memory = {"explorer/trace_command.py", "explorer/diff.py"}  # to_csv() as a text
        places = {
            call.lineno
            for function, call in calls(tree)
            if opens_to_write(function, call)
            and not (name in in_memory and function.endswith(".to_csv"))
            and not (function == "write_bytes" or function == "json.dump")
        }
        if places:
            found[name] = len(places)
    assert found == WRITERS


# ---- the kernel cache


def test_the_cache_is_made_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "deep" / "cache"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(root))
    assert native.private_cache() == root
    assert root.stat().st_mode & 0o777 == 0o700
    assert native.private_cache() == root
    root.chmod(0o755)  # as tilelang makes it
    assert native.private_cache() == root


@pytest.mark.parametrize("kind", ["open", "foreign", "file", "under a file"])
def test_a_cache_that_others_may_fill_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    root = tmp_path / "cache"
    message = {
        "open": r"mode 0777: everybody can put code there.*Remove the folder, or set TILELANG",
        "foreign": r"belongs to user \d+, and this process runs as user 4242.*Change its owner",
        "file": r"cannot be made: .*cache: File exists\. Put that right, or set TILELANG",
        "under a file": r"cannot be made: .*cache/x: Not a directory\. Put that right",
    }[kind]
    if kind == "open":
        root.mkdir()
        root.chmod(0o777)
    elif kind == "foreign":
        root.mkdir()
        real = Path.stat(root)

        class Foreign:
            st_uid, st_mode = real.st_uid + 1000, real.st_mode

        stat = Path.stat
        monkeypatch.setattr(
            Path, "stat", lambda p, **k: Foreign if p == root else stat(p, **k), raising=True
        )
        monkeypatch.setattr(native.os, "geteuid", lambda: 4242)
    else:
        root.write_text("")
    path = root / "x" if kind == "under a file" else root
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(path))
    for use in (native.private_cache, native.cached_native, native.native_module.__wrapped__, Farm):
        with pytest.raises(ValueError, match=rf"kernel cache {re.escape(str(path))} .*{message}"):
            use()
    archive = tmp_path / "k.tar.xz"
    archive.write_text("")
    with pytest.raises(ValueError, match=message):
        bundle.use_cache(archive)
    monkeypatch.undo()


def test_a_process_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ValueError, match="no home directory .*Set TILELANG_CACHE_DIR"):
        native.private_cache()


def test_a_module_of_another_user_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    built: list[Path] = []

    def build(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"ours")
        built.append(path)

    monkeypatch.setattr(native, "build_native", build)
    path = native.cached_native()
    assert native.cached_native() == path
    assert len(built) == 1
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 4321, -1)
    native.cached_native()
    assert len(built) == 2


def test_root_owns_what_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    if tmp_path.stat().st_uid == 0:
        monkeypatch.setattr(native.os, "geteuid", lambda: 4242)
        assert native.private_cache() == tmp_path


# ---- pages

HOSTILE = (
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "javascript:alert(1)",
    "&lt;script&gt;",
    "<!--",
    "]]>",
    "</title><base href=//evil.example>",
    "`</code><svg onload=alert(1)>`",
    "``<b>``",
    "[x](javascript:alert(1))",
    "![x](//evil.example/x.png)",
    "| a | b |",
    "\x00\x07\x1b[31m",
    "‮evil",
    "a\n\n# heading",
    "{{7*7}}${7*7}",
)


class Tags(Page):
    """Also every tag and attribute."""

    def __init__(self, text: str):
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        super().handle_starttag(tag, attrs)


TAGS = set("html head meta title style body main h1 h2 h3 nav ul li a p dl dt dd code".split())
TAGS |= set("figure figcaption div table thead tbody tr th td img".split())
ATTRIBUTES = set("lang charset http-equiv content name aria-label style class href id".split())
ATTRIBUTES |= set("tabindex role scope src alt".split())


@pytest.mark.parametrize("text", HOSTILE)
def test_no_block_lets_markup_through(text: str) -> None:
    blocks = [
        Heading(2, text),
        Words(text),
        Terms(((text, text),)),
        Table((text, "b"), ((text, text),), text, frozenset({"b"})),
        Figure("name", b"png", text, text),
    ]
    page = Tags(to_html(text, blocks))
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert page.cells == [text.replace("\x00", "�"), text.replace("\x00", "�")] or (
        page.cells == [text, text]
    )
    assert page.links == [f"#{page.ids[0]}"]
    outside_code = re.sub(r"(`+).+?\1", "", to_markdown(text, blocks, "figures"))
    outside_code = outside_code.replace(f'<a id="{page.ids[0]}"></a>', "")
    assert not re.search(r"(?<!\\)<|(?<![\\!])\[[^\]]*[^\\]\]\((?!#)", outside_code)


def test_a_page_of_hostile_rows(tmp_path: Path) -> None:
    rows = [row for row in synthetic_rows() if row["num_tokens"] == 16]
    texts = ("candidate", "reason", "routing", "run", "card", "kernel", "commit", "driver")
    for index, row in enumerate(rows):
        for offset, name in enumerate((*texts, "tilelang", "torch", "notes", "baseline")):
            if (index + offset) % 3 == 0:
                row[name] = HOSTILE[(index + offset) % len(HOSTILE)]
    rows += [
        result_row(16, BASE, None, status="timeout", reason=text, run=text, candidate=text)
        for text in HOSTILE
    ]
    folder = write_table(tmp_path / "results", rows).parent
    (folder / "<img src=x>.csv").write_bytes((folder / f"{VIEW.name}.csv").read_bytes())
    write_page(folder, tmp_path / "schedules", draw=False)
    page = Tags((folder / "report.html").read_text())
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert all(link.startswith("#") for link in page.links)
    assert any("<script>alert(1)</script>" in cell for cell in page.cells)
