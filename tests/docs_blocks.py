"""The code blocks of README.md and docs/: found, checked without a GPU, and run.

What a block is follows from its fence, or in README.md from four spaces of indent (shell).

- `python`: run, all blocks of a page in one namespace, in order. A name that no block defines comes
  from `GIVEN` below, made for the problem or layer that the page has defined by then.
- `shell`: commands. Those of `tl-megamoe` are parsed by its own parser and the cheap ones run; what
  others name (targets, files, extras, modules, variables) must exist.
- `text`: what the block before it prints, with `...` for what varies; or marked `tested`.
- `toml`: a problem or a space, loaded.

Comments in front of a fence are markers, which readers of the page do not see:

    <!-- needs: sm90 -->          runs on a GPU only; here its names and keywords are checked
    <!-- needs: ranks=2 -->       the same in two processes with a GPU each
    <!-- needs: dev -->           runs where the packages of the dev extra are, as transformers
    <!-- file: layer.py -->       this block is a file of that name, for shell blocks of the page
    <!-- tested: test_name -->    text: the test of test_docs.py that compares it with the code
    <!-- prelude                  python that runs before the block, for names it does not define
    x = 1
    -->

`python tests/docs_blocks.py PAGE [--ranks N]` runs a page's blocks on a GPU; with ranks, as one of
their processes, those marked `ranks=N` and the unmarked ones.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib.util
import io
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_megamoe.handshake import disable_multicast

ROOT = Path(__file__).parents[1]
KINDS = ("python", "shell", "text", "toml")
MARKERS = ("needs", "file", "tested")
NEEDS = re.compile(r"sm90|dev|ranks=\d+")
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page.

    Attributes:
        page: relative to the repository.
        line: of its first line of text, from 1.
        kind: one of `KINDS`, or `prelude`.
        text: without the fence.
        needs: `sm90`, `dev`, `ranks=N`; a prelude has those of its block.
        file: the file that the page says it is, else empty.
        tested: the test that holds a text to the code, else empty.
    """

    page: str
    line: int
    kind: str
    text: str
    needs: frozenset[str] = frozenset()
    file: str = ""
    tested: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def num_ranks(self) -> int:
        """Processes that run it; 0 where it is not for several."""
        return max((int(n[6:]) for n in self.needs if n.startswith("ranks=")), default=0)

    @property
    def on_gpu(self) -> bool:
        return "sm90" in self.needs or self.num_ranks > 0


class BlockError(AssertionError):
    """A page has something that no test can look at, or that is wrong."""


# ---- finding them


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page in order, preludes in front of their blocks.

    Args:
        page: relative to the repository; README.md has indented blocks.
        text: of the page; read when None.

    Raises:
        BlockError: a block of an unknown kind, a marker that is unknown or belongs to no block, or
            an open fence.
    """
    lines = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    return list(_Reader(page, lines.splitlines()).blocks())


class _Reader:
    def __init__(self, page: str, lines: list[str]) -> None:
        self.page, self.lines, self.at = page, lines, 0
        self.markers: dict[str, str] = {}
        self.prelude: tuple[int, str] | None = None

    def error(self, what: str) -> BlockError:
        return BlockError(f"{self.page}:{self.at + 1}: {what}")

    def blocks(self) -> Iterator[Block]:
        directive = False
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith("<!--"):
                self.comment()
            elif re.match(r" *(```|~~~)", line):
                yield from self.fenced()
            elif line.startswith("    ") and not directive and self.starts_paragraph():
                yield from self.indented()
            elif line.strip():
                self.text_between()
            directive = line.startswith(":::") or (directive and line.startswith("    "))
            self.at += 1
        self.text_between()

    def starts_paragraph(self) -> bool:
        return self.at == 0 or not self.lines[self.at - 1].strip()

    def text_between(self) -> None:
        if self.markers or self.prelude:
            raise self.error(f"markers {self.markers or 'prelude'} must stand in front of a block")

    def comment(self) -> None:
        first, text = self.at, self.lines[self.at]
        while "-->" not in text:
            self.at += 1
            if self.at == len(self.lines):
                raise self.error("a comment does not end")
            text += "\n" + self.lines[self.at]
        inside = text.strip()[4:-3].strip()
        if re.match(r"prelude\s*\n", inside):
            self.prelude = (first + 2, inside.partition("\n")[2])
        elif found := re.fullmatch(r"(\w+): *([^\n]+)", inside):
            if found[1] not in MARKERS:
                raise self.error(f"marker {found[1]!r} must be one of {', '.join(MARKERS)}")
            self.markers[found[1]] = found[2].strip()

    def fenced(self) -> Iterator[Block]:
        found = re.fullmatch(r"(```+)(\w*)", self.lines[self.at])
        if found is None:
            raise self.error(f"fence {self.lines[self.at]!r} must be ```kind at the line's start")
        fence, kind = found.groups()
        if kind not in KINDS:
            raise self.error(f"a block of kind {kind!r} must be one of {', '.join(KINDS)}")
        first = self.at + 1
        self.at = first
        while self.at < len(self.lines) and self.lines[self.at] != fence:
            self.at += 1
        if self.at == len(self.lines):
            raise self.error("the last fence is open")
        yield from self.made(first, kind, self.lines[first : self.at])

    def indented(self) -> Iterator[Block]:
        if self.page != "README.md":
            raise self.error("an indented block: fence it, so that it has a kind")
        first = self.at
        while self.at < len(self.lines) and self.lines[self.at].startswith("    "):
            self.at += 1
        yield from self.made(first, "shell", [line[4:] for line in self.lines[first : self.at]])
        self.at -= 1

    def made(self, first: int, kind: str, lines: list[str]) -> Iterator[Block]:
        text, markers = "\n".join(lines) + "\n", self.markers
        needs = frozenset(re.split(r"[,\s]+", markers.get("needs", ""))) - {""}
        if wrong := [need for need in needs if not NEEDS.fullmatch(need)]:
            raise self.error(f"needs: {wrong[0]} must be sm90, dev or ranks=N")
        if self.prelude is not None:
            line, code = self.prelude
            if kind != "python":
                raise self.error("a prelude must stand in front of a python block")
            yield Block(self.page, line, "prelude", code, needs)
        found = markers.get("file", ""), markers.get("tested", "")
        yield Block(self.page, first + 1, kind, text, needs, *found)
        self.markers, self.prelude = {}, None


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.kind in ("python", "prelude")]


def compiled(block: Block) -> Any:
    """Code whose tracebacks name the page's lines.

    Raises:
        BlockError: it is no Python.
    """
    text = "\n" * (block.line - 1) + block.text
    try:
        return compile(text, str(ROOT / block.page), "exec")
    except SyntaxError as error:
        raise BlockError(f"{block.where}: {error}") from error


# ---- names that a page does not define

NUM_TOKENS = 24
SEED = 1


class Given(dict[str, Any]):
    """A page's namespace; what is missing in it is made by `GIVEN`."""

    code: str = ""
    """The block that runs, whose names say in which form its inputs come."""

    def __missing__(self, name: str) -> Any:
        if name not in GIVEN:
            raise KeyError(name)
        self[name] = GIVEN[name](self)
        return self[name]


def _problem(names: Given) -> Any:
    """The layer that the page speaks of: `problem`, a module's, or a small one."""
    from tl_megamoe import Problem

    if "problem" in names:
        return names["problem"]
    sizes = {"hidden": 256, "intermediate": 128, "num_experts": 8, "num_topk": 2}
    sizes["num_topk"] = names.get("top_k", sizes["num_topk"])
    sizes |= {name: names[name] for name in sizes if name in names}
    return Problem(name="page", num_ranks=1, **sizes)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _experts(word: str) -> Callable[[Given], Any]:
    def make(names: Given) -> Any:
        from tl_megamoe.synthetic import random_weights

        plain = random_weights(_problem(names), _device(), SEED, names.get("rank", 0))
        for name, value in zip(
            ("w1", "w1_sf", "w2", "w2_sf"),
            (plain.l1, plain.l1_sf, plain.l2, plain.l2_sf),
            strict=True,
        ):
            names.setdefault(name, value)
        return names[word]

    return make


def _input(word: str) -> Callable[[Given], Any]:
    """e4m3 rows where the block also names their scales, else bfloat16 ones."""

    def make(names: Given) -> Any:
        from tl_megamoe.scaling import dequantize
        from tl_megamoe.synthetic import random_inputs

        found = random_inputs(_problem(names), names["n"], seed=SEED, device=_device())
        if word == "x" and "x_sf" not in names.code:
            return dequantize(found.x, found.x_sf).bfloat16()
        return getattr(found, word)

    return make


def _each_rank(make: Callable[[Any, int], Any]) -> Callable[[Given], Any]:
    def all_ranks(names: Given) -> Any:
        problem = _problem(names)
        return [make(problem, rank) for rank in range(problem.num_ranks)]

    return all_ranks


def _rank_inputs(problem: Any, rank: int) -> Any:
    from tl_megamoe.synthetic import random_inputs

    found = random_inputs(problem, NUM_TOKENS + rank, seed=SEED + rank, device=_device())
    return found.x, found.x_sf, found.topk_idx, found.topk_weights


def _rank_weights(problem: Any, rank: int) -> Any:
    from tl_megamoe import transform_weights
    from tl_megamoe.synthetic import random_weights

    plain = random_weights(problem, _device(), SEED, rank)
    return transform_weights((plain.l1, plain.l1_sf), (plain.l2, plain.l2_sf), problem)


GIVEN: dict[str, Callable[[Given], Any]] = {
    "n": lambda names: NUM_TOKENS,
    "x": _input("x"),
    "x_sf": _input("x_sf"),
    "topk_idx": _input("topk_idx"),
    "topk_weights": _input("topk_weights"),
    "w1": _experts("w1"),
    "w1_sf": _experts("w1_sf"),
    "w2": _experts("w2"),
    "w2_sf": _experts("w2_sf"),
    "inputs": _each_rank(_rank_inputs),
    "weights": _each_rank(_rank_weights),
}
"""Name -> its maker: `n` tokens, inputs and row-major expert weights of the page's problem on the
GPU if there is one, and by rank `inputs` (four tensors) and `weights` of all ranks."""


# ---- running


def run_page(page: str, have: Collection[str] = (), num_ranks: int = 0) -> int:
    """Run the blocks of a page in one namespace; the number of blocks that ran.

    They run in a folder of their own, in which results/ is the repository's.

    Args:
        page: relative to the repository.
        have: needs that are met: `sm90`, `dev`.
        num_ranks: processes of this job, which run blocks for so many and the unmarked ones.

    Raises:
        BlockError: a block printed something else than the text block behind it says.
    """
    names = Given(__name__="__main__")
    with own_folder():
        return _run_blocks(page, names, have, num_ranks)


@contextlib.contextmanager
def own_folder() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="tl_megamoe_docs_") as folder:
        (Path(folder) / "results").symlink_to(ROOT / "results")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _run_blocks(page: str, names: Given, have: Collection[str], num_ranks: int) -> int:
    printed: str | None = None
    count = 0
    for block in blocks_of(page):
        if block.kind == "text":
            if printed is not None and not block.tested:
                check_output(block, printed)
            printed = None
        if block.kind not in ("python", "prelude"):
            continue
        met = {*have, f"ranks={num_ranks}"}
        if not block.needs <= met or (num_ranks and block.on_gpu and not block.num_ranks):
            printed = None
            continue
        names.code = block.text
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compiled(block), names)
        printed = out.getvalue()
        count += block.kind == "python"
    return count


def extras_here() -> set[str]:
    """`dev` where the packages of that extra are installed."""
    return {"dev"} if importlib.util.find_spec("transformers") is not None else set()


def check_output(block: Block, printed: str) -> None:
    """Compare a text block with what was printed; `...` stands for anything.

    Raises:
        BlockError: they differ.
    """
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(block.text, printed, flags):
        raise BlockError(
            f"{block.where} says\n{block.text}and the block before it prints\n{printed}"
        )


def load_toml(block: Block) -> None:
    """Load a problem or a space as the commands do."""
    from tl_megamoe import load_problem
    from tl_megamoe.explorer.space import load_space

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.toml"
        path.write_text(block.text, encoding="utf-8")
        if re.search(r"^hidden *=", block.text, re.M):
            load_problem(path)
        else:
            load_space(str(path))


def main() -> None:
    """Run a page on a GPU; in a process of a torchrun job with --ranks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--ranks", type=int, default=0)
    args = parser.parse_args()
    if args.ranks:
        disable_multicast()
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # also for blocks of one rank
    count = run_page(args.page, {"sm90", *extras_here()}, args.ranks)
    if args.ranks:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    print(f"{args.page}: {count} blocks ran")


if __name__ == "__main__":
    main()
