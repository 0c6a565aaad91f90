"""README.md and docs/: every block runs or is checked, links lead somewhere, the site builds.

What kinds of blocks there are and how a page marks them: docs_blocks.py.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import docs_blocks
import pytest
import torch
from docs_blocks import (
    PAGES,
    ROOT,
    Block,
    BlockError,
    blocks_of,
    check_output,
    extras_here,
    load_toml,
    python_blocks,
    run_page,
)
from docs_names import check_names
from docs_shell import check_shell, commands_of, run_if_cheap, shown_files
from gpu_cases import real_ranks

import tl_megamoe
from tl_megamoe import MegaMoeTimeout, Problem, Recipe, Schedule, SymmBuffer
from tl_megamoe.selection import KERNEL_VARIABLE, THRESHOLD_VARIABLE, schedule_intervals
from tl_megamoe.timeouts import REPORT_FIELDS, REPORT_SLOT

GPU_LIMIT_S = 600.0
each_page = pytest.mark.parametrize("page", PAGES)
BLOCKS = {page: blocks_of(page) for page in PAGES}
ON_GPU = [
    page
    for page, found in BLOCKS.items()
    if any(b.kind == "python" and ("sm90" in b.needs or "MegaMoE(" in b.text) for b in found)
]
"""Pages that need a GPU, or where a layer takes one if it is there."""
ON_RANKS = sorted(
    {(b.page, b.num_ranks) for found in BLOCKS.values() for b in found if b.num_ranks}
)


# ---- blocks


@each_page
def test_python_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that need no GPU, without one: a layer then runs its reference."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    have = extras_here()
    expected = [b for b in BLOCKS[page] if b.kind == "python" and b.needs <= have]
    assert run_page(page, have) == len(expected)


@each_page
def test_python_names_what_exists(page: str) -> None:
    check_names(python_blocks(page))


@each_page
def test_shell_names_what_exists(page: str) -> None:
    for block in BLOCKS[page]:
        if block.kind == "shell":
            assert check_shell(block, shown_files(page)), f"{block.where}: no command"


COMMANDS = {
    " ".join(words): words
    for found in BLOCKS.values()
    for block in found
    if block.kind == "shell"
    for words in commands_of(block)
    if words[0] == "tl-megamoe"
}


@pytest.mark.parametrize("command", COMMANDS)
def test_cheap_commands_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    printed = run_if_cheap(COMMANDS[command])
    assert printed is None or printed.strip()


def test_toml_loads(tmp_path: Path) -> None:
    found = [b for blocks in BLOCKS.values() for b in blocks if b.kind == "toml"]
    assert found
    for block in found:
        load_toml(block)


@each_page
def test_text_is_held_to_something(page: str) -> None:
    """A text block follows the block that prints it, or names the test that checks it."""
    tests = {n.name for n in ast.parse(Path(__file__).read_text()).body if hasattr(n, "name")}
    before = None
    for block in BLOCKS[page]:
        if block.kind == "text" and block.tested:
            assert block.tested in tests, f"{block.where}: there is no test {block.tested}"
        elif block.kind == "text":
            assert before is not None, f"{block.where}: no block before it"
            assert before.kind == "python", f"{block.where}: what prints this?"
        before = block


def test_timeout_text() -> None:
    """The message that docs/timeouts.md shows is the one of such a report."""
    problem = Problem(
        name="t", hidden=128, intermediate=128, num_experts=4, num_topk=1, num_ranks=1
    )
    buffer = SymmBuffer(problem, 16, "cpu")
    waits = (
        {"tag": 2, "rank": 0, "block": 0, "thread": 3, "peer": 3, "have": 4, "want": 5},
        {"tag": 4, "rank": 0, "block": 7, "thread": 96, "pool_block": 0, "expert": 0, "tile": 0},
    )
    for wait in waits:
        values = [wait.get(name, -1) for name in REPORT_FIELDS]
        start = wait["tag"] * REPORT_SLOT
        buffer.report[start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(MegaMoeTimeout) as caught:
        buffer.check_report()
    block = next(b for b in BLOCKS["docs/timeouts.md"] if b.tested == "test_timeout_text")
    check_output(block, str(caught.value))


@pytest.mark.sm90
@pytest.mark.parametrize("page", ON_GPU)
def test_gpu_blocks_run(page: str) -> None:
    """All blocks of a page but those of several ranks, in a process of their own."""
    found = run_child(page)
    assert f"{page}: " in found.stdout, found.stdout + found.stderr
    assert found.returncode == 0, found.stdout + found.stderr


if not real_ranks():  # a job of its own: under torchrun every process would start one

    @pytest.mark.parametrize(
        ("page", "num_ranks"),
        [pytest.param(*case, marks=pytest.mark.multi_gpu(case[1])) for case in ON_RANKS],
    )
    def test_blocks_of_ranks_run(page: str, num_ranks: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children = [
            start_child(page, "--ranks", str(num_ranks), RANK=rank, LOCAL_RANK=rank, **job)
            for rank in range(num_ranks)
        ]
        try:
            for child in children:
                out, said = child.communicate(timeout=GPU_LIMIT_S)
                assert child.returncode == 0, out + said
        finally:
            for child in children:
                child.kill()


def start_child(page: str, *options: str, **environment: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(docs_blocks.__file__)), page, *options],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_child(page: str, *options: str) -> subprocess.CompletedProcess[str]:
    child = start_child(page, *options)
    try:
        out, said = child.communicate(timeout=GPU_LIMIT_S)
    finally:
        child.kill()
    return subprocess.CompletedProcess(child.args, child.returncode, out, said)


# ---- pages against the code


def shown_functions(page: str) -> dict[str, str]:
    """The functions of a page's visible blocks, without annotations and docstrings."""
    found = [b for b in BLOCKS[page] if b.kind == "python"]
    return functions_of("\n".join(block.text for block in found))


def functions_of(text: str) -> dict[str, str]:
    out = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        arguments = node.args
        for argument in (*arguments.args, arguments.kwarg):
            if argument is not None:
                argument.annotation = None
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        out[node.name] = ast.unparse(node)
    return out


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("README.md", ("use_mega_moe",)),
        ("docs/module.md", ("empty_model", "made_wide", "load_rest")),
    ],
)
def test_pages_show_the_functions_of_the_example(page: str, names: tuple[str, ...]) -> None:
    """Their tests are those of the example."""
    example = functions_of((ROOT / "examples/transformers_deepseek.py").read_text())
    shown = shown_functions(page)
    for name in names:
        wanted = example[name].replace("Tensor)", "torch.Tensor)")  # by the page's imports
        assert shown[name] == wanted


def test_operators_have_the_signatures_shown() -> None:
    import tl_megamoe.library  # noqa: F401

    block = next(
        b for b in BLOCKS["docs/api.md"] if b.tested == "test_operators_have_the_signatures_shown"
    )
    schemas = [
        str(getattr(torch.ops.tl_megamoe, name).default._schema).partition("::")[2]
        for name in ("mega_moe", "fp8_mega_moe")
    ]
    check_output(block, "\n\n".join(schemas))


def test_readme_counts_the_kernels_of_its_quick_start() -> None:
    problem = Problem(
        name="q", hidden=512, intermediate=256, num_experts=8, num_topk=2, num_ranks=1
    )
    found = schedule_intervals(problem, "NVIDIA H200", 1024, rank_mode="real", recipe=Recipe())
    assert len({schedule.kernel_key() for _, schedule in found}) == 3
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "compiles three fused kernels and a small one" in text
    assert "MegaMoE(hidden=512, intermediate=256, num_experts=8, top_k=2, capacity=1024)" in text


def page_text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_reference_has_every_public_name() -> None:
    text = page_text("api.md")
    shown = re.findall(r"^::: tl_megamoe\.(\w+)$", text, re.M)
    aliases = re.findall(r"^`(\w+)` is another name", text, re.M)
    assert len(shown) == len(set(shown))
    assert {*shown, *aliases} == set(tl_megamoe.__all__) - {"__version__"}


def test_every_field_of_a_schedule_is_explained() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", page_text("schedules.md"), re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(field.name for field in fields(Schedule))


def test_variables_are_named() -> None:
    for name in (KERNEL_VARIABLE, THRESHOLD_VARIABLE):
        assert name in page_text("multi-gpu.md"), name
        assert name in page_text("schedules.md"), name


# ---- links


def headings(path: Path) -> set[str]:
    """The anchors of a Markdown file: its headings, and of the reference its objects."""
    text = path.read_text(encoding="utf-8")
    out = set(re.findall(r"^::: ([\w.]+)$", text, re.M))
    for title in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M):
        words = re.sub(r"[^\w\s-]", "", title.lower()).strip()
        out.add(re.sub(r"\s+", "-", words))
    return out


@each_page
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{page}: there is no {target}"
        if anchor and file.suffix == ".md":
            assert anchor in headings(file), f"{page}: {target}: {sorted(headings(file))}"


# ---- the site


def test_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    """`mkdocs build --strict` has no warnings, and no page loads anything from elsewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loads = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for path in pages:
        assert loads.findall(path.read_text(encoding="utf-8")) == [], path.name
    for path in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path
    cli = (tmp_path / "site/cli.html").read_text(encoding="utf-8")
    assert "usage: tl-megamoe search" in cli
    assert "usage: tl-megamoe export" in cli
    readme = (tmp_path / "site/readme.html").read_text(encoding="utf-8")
    assert "grid|halving|optuna" in readme
    assert "\\|" not in readme
    api = (tmp_path / "site/api.html").read_text(encoding="utf-8")
    for name in tl_megamoe.__all__:
        assert name in api or name == "__version__", name


# ---- the reader of blocks


def kinds(text: str, page: str = "docs/p.md") -> list[str]:
    return [block.kind for block in blocks_of(page, text)]


def test_blocks_are_found() -> None:
    text = """# Page
<!-- needs: sm90 -->
<!-- file: a.py -->
```python
x = 1
```
Text.

    make demo   # not in a page of docs/
"""
    first, second = blocks_of("README.md", text)
    assert first == Block("README.md", 5, "python", "x = 1\n", frozenset({"sm90"}), "a.py")
    assert second == Block("README.md", 9, "shell", "make demo   # not in a page of docs/\n")
    assert commands_of(second) == [["make", "demo"]]
    assert (first.on_gpu, first.num_ranks, second.on_gpu) == (True, 0, False)
    prelude, block = blocks_of(
        "docs/p.md", "<!-- prelude\nx = 1\n-->\n<!-- needs: ranks=2 -->\n```python\ny = x\n```\n"
    )
    assert (prelude.kind, prelude.line, prelude.text, prelude.num_ranks) == (
        "prelude",
        2,
        "x = 1",
        2,
    )
    assert block.line == 6
    assert kinds("::: tl_megamoe.x\n    options:\n      a: 1\n") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```js\n1\n```\n", "a block of kind 'js' must be one of python, shell, text, toml"),
        ("```\n1\n```\n", "a block of kind ''"),
        ("```python\n1\n", "the last fence is open"),
        ("- list\n  ```python\n  1\n  ```\n", "must be ```kind at the line's start"),
        ("text\n\n    make demo\n", "an indented block: fence it"),
        ("<!-- needs: a100 -->\n```python\n1\n```\n", "needs: a100 must be sm90, dev or ranks=N"),
        ("<!-- wants: sm90 -->\n```python\n1\n```\n", "marker 'wants' must be one of"),
        ("<!-- needs: sm90 -->\ntext\n", "must stand in front of a block"),
        ("<!-- prelude\nx = 1\n-->\n```shell\nmake\n```\n", "in front of a python block"),
        ("<!-- needs: sm90\n", "a comment does not end"),
    ],
)
def test_blocks_that_nothing_checks_are_refused(text: str, message: str) -> None:
    with pytest.raises(BlockError, match=re.escape(message)):
        blocks_of("docs/p.md", text)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from tl_megamoe import Nothing", "tl_megamoe has no 'Nothing'"),
        ("import tl_megamoe\ntl_megamoe.op.nothing", "tl_megamoe.op has no 'nothing'"),
        ("import no_such_module_x", "there is no module 'no_such_module_x'"),
        ("print(undefined)", "no block above defines 'undefined'"),
        ("x = = 1", "invalid syntax"),
        ("from tl_megamoe import Problem\nProblem(name='a', width=3)", "keyword argument 'width'"),
        (
            "from tl_megamoe import SymmBuffer\n"
            "b = SymmBuffer.from_process_group(1, 2)\n"
            "b.filll(1)",
            "SymmBuffer has no 'filll'",
        ),
    ],
)
def test_names_that_do_not_exist_are_found(code: str, message: str) -> None:
    block = Block("docs/p.md", 3, "python", code + "\n", frozenset({"sm90"}))
    with pytest.raises(BlockError, match=message):
        check_names([block])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rm -rf build", "'rm' is none of the commands that are checked"),
        ("make nothing", "the Makefile has no target 'nothing'"),
        ("make test NOTHING=1", "the Makefile has no variable 'NOTHING'"),
        ("pip install 'tl_megamoe[nothing]'", "pyproject.toml has no extra 'nothing'"),
        ("python nothing.py", "there is no file nothing.py"),
        ("torchrun --nproc_per_node=2 nothing.py", "there is no file nothing.py"),
        ("torchrun --nproc_per_node 2 a.py", "write --nproc_per_node of torchrun with its value"),
        ("python -m pytest -m nothing tests", "there is no marker 'nothing'"),
        ("python -m pytest tests/nothing.py", "there is no tests/nothing.py"),
        ("TL_MEGAMOE_NOTHING=1 tl-megamoe doctor", "nothing in the project reads"),
        ("tl-megamoe nothing", "there is no command 'nothing'"),
        ("tl-megamoe why --problem deepseek-v4-flash", "--tokens"),
        ("tl-megamoe list --problem nothing", "problem 'nothing' is neither"),
        ("make 'demo", "No closing quotation"),
    ],
)
def test_commands_that_do_not_exist_are_found(line: str, message: str) -> None:
    with pytest.raises(BlockError, match=re.escape(message)):
        check_shell(Block("docs/p.md", 3, "shell", line + "\n"))


def test_commands_that_exist() -> None:
    lines = """TL_MEGAMOE_KERNEL=pingpong tl-megamoe why --problem mimo-v2.5 \\
    --tokens 5 && make demo TORCH=torch==2.13.0   # a comment
pip install -e '.[dev,gpu]'
torchrun --nproc_per_node=2 -m tl_megamoe.explorer check --problem deepseek-v4-flash
torchrun --nproc_per_node=2 mine.py
"""
    block = Block("docs/p.md", 3, "shell", lines)
    assert [words[0] for words in check_shell(block, files=["mine.py"])] == [
        "TL_MEGAMOE_KERNEL=pingpong",
        "make",
        "pip",
        "torchrun",
        "torchrun",
    ]


def test_output_is_compared() -> None:
    block = Block("docs/p.md", 3, "text", "a ... c\nd\n")
    check_output(block, "a b   c\nd\n")
    with pytest.raises(BlockError, match="says\na ... c\nd\nand the block before it prints\na b\n"):
        check_output(block, "a b\n")


def test_given_names_follow_the_page() -> None:
    names = docs_blocks.Given()
    names.code = "layer(x, topk_idx)"
    assert (names["x"].dtype, tuple(names["x"].shape)) == (torch.bfloat16, (24, 256))
    names = docs_blocks.Given(
        problem=Problem(
            name="p", hidden=512, intermediate=256, num_experts=4, num_topk=3, num_ranks=1
        )
    )
    names.code = "buffer.fill(x, x_sf)"
    assert names["x"].dtype == torch.float8_e4m3fn
    assert tuple(names["topk_idx"].shape) == (24, 3)
    assert tuple(names["w1"].shape) == (4, 512, 512)
    with pytest.raises(KeyError):
        names["nothing"]
