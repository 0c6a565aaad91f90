"""What a kernel's machine code says of setmaxnreg: who reaches which, decided by what.

PTX asks that all warps of a warpgroup execute the same setmaxnreg. `check_roles` shows it for one
kernel without running it: it reads nvdisasm's text into a control-flow graph, finds the one branch
that sends a thread to either of the two setmaxnregs, and evaluates its condition for every thread
of the block.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

WARPGROUP = 128
PACKAGE = "nvidia-cuda-nvdisasm"

REGISTER = re.compile(r"U?R(?:\d+|Z)")
PREDICATE = re.compile(r"U?P(?:\d|T)")
LABEL = re.compile(r"^([.\w$]+):$")
INSTRUCTION = re.compile(r"^/\*([0-9a-f]+)\*/\s+(?:@(!?U?P[T\d])\s+)?([A-Z][\w.]*)\s*(.*?)\s*;$")
TARGET = re.compile(r"`\(([.\w$]+)\)")
ENDS = ("EXIT", "KILL", "RET")
JUMPS = ("BRA", "JMP", "CALL", *ENDS)
INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")
TWO_WORDS = ("CS2R", "CS2UR", "DADD", "DMUL", "DFMA", "LEPC")
RETRY = ("WARPSYNC", "USETMAXREG", "PLOP3", "BRA", "NOP")
"""Instructions of the loop around a TRY_ALLOC."""


class SassError(AssertionError):
    """The machine code does not show what is asked of it."""


def nvdisasm() -> str:
    """Path of the disassembler: the wheel's, else one on the PATH."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    wheel = [str(f.locate()) for f in files if f.name in ("nvdisasm", "nvdisasm.exe")]
    found = wheel[0] if wheel else shutil.which("nvdisasm")
    if found is None:
        raise SassError(
            "nvdisasm, which reads the SASS of frozen kernels, is not installed. It comes with "
            f"{PACKAGE}: pip install -e '.[dev]'"
        )
    return found


def disassemble(cubin: Path) -> str:
    """nvdisasm's text of a kernel."""
    tool = nvdisasm()
    run = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SassError(f"{tool} failed with exit code {run.returncode}: {run.stderr[-2000:]}")
    return run.stdout


class Instruction(NamedTuple):
    """One line of SASS: `@guard opcode operands`."""

    offset: int
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def conditions(self) -> list[str]:
        """Predicates that all hold where this instruction acts."""
        leading = self.operands[:1] if self.base in JUMPS else ()
        both = [self.guard, *(p for p in leading if PREDICATE.fullmatch(p.lstrip("!")))]
        return [p for p in both if p not in ("", "PT", "UPT")]

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"/*{self.offset:04x}*/ {guard}{self.opcode} {', '.join(self.operands)}".rstrip()


@dataclass(frozen=True)
class Kernel:
    """A kernel's instructions in address order, and where its labels stand among them."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]

    @cached_property
    def successors(self) -> list[tuple[int, ...]]:
        """What may run after each instruction, by index."""
        return [self._after(i) for i in range(len(self.code))]

    def _after(self, index: int) -> tuple[int, ...]:
        it = self.code[index]
        following = (index + 1,) if index + 1 < len(self.code) else ()
        if it.base in INDIRECT:
            raise SassError(f"{it}: jumps to an address that is not followed")
        if it.base not in JUMPS:
            return following
        names = () if it.base in ENDS else TARGET.findall(" ".join(it.operands))
        targets = tuple(self.labels[name] for name in names)
        if it.base not in ENDS and len(targets) != 1:
            raise SassError(f"{it}: a jump without a label")
        # BRA.DIV and BRA.U.ANY ask more than their predicates say; a call comes back.
        split = it.conditions or it.base == "CALL" or (it.base not in ENDS and "." in it.opcode)
        return (*targets, *following) if split else targets

    @cached_property
    def predecessors(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.code]
        for index, after in enumerate(self.successors):
            for s in after:
                out[s].append(index)
        return out

    def reach(self, *starts: int, avoid: int = -1) -> set[int]:
        """Instructions that may run from `starts` on, along paths without `avoid`."""
        return self._closure(starts, self.successors, avoid)

    def reaching(self, index: int) -> set[int]:
        """Instructions from which control may come to `index`, itself included."""
        return self._closure((index,), self.predecessors, -1)

    @staticmethod
    def _closure(starts: Iterable[int], edges: Sequence[Sequence[int]], avoid: int) -> set[int]:
        seen: set[int] = set()
        todo = [s for s in starts if s != avoid]
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                todo += [s for s in edges[index] if s != avoid]
        return seen

    def splits(self, index: int) -> bool:
        """Whether threads may part at this instruction, or end there."""
        it = self.code[index]
        return it.base in JUMPS and bool(it.conditions or len(self.successors[index]) != 1)


def parse(text: str) -> Kernel:
    """Read nvdisasm's text of one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        line = line.strip()
        label, instruction = LABEL.match(line), INSTRUCTION.match(line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            offset, guard, opcode, operands = instruction.groups()
            parts = tuple(o.strip() for o in re.split(r",(?![^\[(]*[\])])", operands) if o.strip())
            code.append(Instruction(int(offset, 16), guard or "", opcode, parts))
        elif line.startswith("/*") and line.endswith(";"):
            raise SassError(f"cannot read {line!r}")
    offsets = [it.offset for it in code]
    if not code or offsets != sorted(set(offsets)) or offsets[0]:
        raise SassError(f"expected the text of one kernel, found {offsets.count(0)} beginnings")
    return Kernel(tuple(code), labels)


# ---- values as functions of the thread


def writes(it: Instruction) -> set[str]:
    """Registers and predicates that an instruction may write; rather one too many."""
    out: set[str] = set()
    if it.base in ("R2P", "CALL", "RET"):
        out |= {f"P{i}" for i in range(7)}
    compare = it.base.lstrip("U") in ("ISETP", "FSETP", "DSETP", "PLOP3", "PSETP")
    destination = ""
    for position, op in enumerate(it.operands):
        op = op.split(".")[0]
        if PREDICATE.fullmatch(op) and (not compare or position < 2):
            out.add(op)
        elif REGISTER.fullmatch(op) and not destination and not compare:
            destination = op
        else:
            break
    if destination and not destination.endswith("Z"):
        prefix, number = re.findall(r"[A-Z]+|\d+", destination)
        parts = set(it.opcode.split("."))
        width = 1
        if parts & {"64", "WIDE", "F64", "S64", "U64"} or it.base in TWO_WORDS:
            width = 2
        if parts & {"96", "128", "M88", "MT88"}:
            width = 4
        if it.base.endswith("MMA"):
            width = 256
        out |= {f"{prefix}{int(number) + i}" for i in range(width)}
    return out


class Values:
    """Evaluates what a register holds at an instruction, for one thread of the block.

    Follows copies, shifts, masks, sums and comparisons of tid.x back to where it is read. What is
    written in two places, under a guard or by anything else has no value: an error.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.writes = [writes(it) for it in kernel.code]

    def definition(self, name: str, at: int) -> int:
        """The one instruction whose `name` arrives at instruction `at`."""
        found: set[int] = set()
        seen: set[int] = set()
        todo = list(self.kernel.predecessors[at])
        while todo:
            index = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            if name in self.writes[index]:
                found.add(index)
                if not self.kernel.code[index].guard:
                    continue
            if index == 0:
                raise SassError(
                    f"{name} of {self.kernel.code[at]} may be read before it is written"
                )
            todo += self.kernel.predecessors[index]
        if len(found) != 1:
            places = ", ".join(str(self.kernel.code[i]) for i in sorted(found))
            raise SassError(f"{name} of {self.kernel.code[at]} comes from {len(found)}: {places}")
        return found.pop()

    def at(self, operand: str, index: int, tid: int) -> int:
        """An operand's value where instruction `index` reads it."""
        operand = operand.removesuffix(".reuse")
        if operand.startswith("!"):
            return 1 - self.at(operand[1:], index, tid)
        if operand.startswith("-"):
            return -self.at(operand[1:], index, tid)
        if operand in ("PT", "UPT"):
            return 1
        if operand in ("RZ", "URZ"):
            return 0
        if re.fullmatch(r"0x[0-9a-f]+|\d+", operand):
            return int(operand, 0)
        if REGISTER.fullmatch(operand) or PREDICATE.fullmatch(operand):
            return self._result(self.definition(operand, index), operand, tid)
        raise SassError(f"{operand} of {self.kernel.code[index]} is not followed")

    def _result(self, index: int, name: str, tid: int) -> int:
        it = self.kernel.code[index]
        kind, parts = it.base.removeprefix("U"), it.opcode.split(".")[1:]
        if kind in ("S2R", "S2UR") and it.operands[-1] == "SR_TID.X":
            return tid

        def get(position: int) -> int:
            return self.at(it.operands[position], index, tid)

        count = len(it.operands)
        if kind == "MOV" or kind == "R2UR" and count == 2:
            return get(1)
        if kind == "IMAD" and count == 4 and set(parts) <= {"MOV", "U32", "IADD", "SHL"}:
            return get(1) * get(2) + get(3)
        if kind == "VIADD":
            return get(1) + get(2)
        if kind == "IADD3" and count == 4 and not parts:
            return get(1) + get(2) + get(3)
        if kind == "SHF" and parts[0] == "R" and it.operands[1] in ("RZ", "URZ"):
            return get(3) >> get(2)
        if kind == "LOP3" and parts == ["LUT"] and it.operands[-1] == "!PT":
            at = count - 5  # a predicate before the register: whether the result has a bit
            bits = _lookup(get(at), get(at + 1), get(at + 2), get(at + 3))
            return bits if name == it.operands[at - 1] else int(bits != 0)
        if kind == "ISETP" and count == 5 and name == it.operands[0] and "EX" not in parts:
            compare: Callable[[int, int], bool] = {
                "LT": int.__lt__,
                "LE": int.__le__,
                "GT": int.__gt__,
                "GE": int.__ge__,
                "EQ": int.__eq__,
                "NE": int.__ne__,
            }[parts[0]]
            mask = 0xFFFFFFFF if "U32" in parts else -1
            result, other = int(compare(get(2) & mask, get(3) & mask)), get(4)
            return {"AND": result & other, "OR": result | other, "XOR": result ^ other}[parts[-1]]
        if kind == "PLOP3" and count == 7 and name == it.operands[0]:
            return _lookup(get(2), get(3), get(4), get(5)) & 1
        raise SassError(f"{it}: the branch between the roles is not followed back to tid.x")


def _lookup(a: int, b: int, c: int, table: int) -> int:
    """The 32-bit word whose every bit is the table's answer to those of a, b and c."""
    word = 0
    for row in range(8):
        if table >> row & 1:
            word |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return word & 0xFFFFFFFF


# ---- the rule


class Roles(NamedTuple):
    """The two setmaxnregs of a kernel and the branch that leads to them."""

    load_registers: int
    math_registers: int
    branch: Instruction


def check_roles(text: str, threads: int) -> Roles:
    """Show that all warps of a warpgroup reach the same setmaxnreg, warpgroup 0 the DEALLOC.

    1. There is one DEALLOC, passed once, and one TRY_ALLOC, repeated by itself alone.
    2. Straight-line code leads to each from the two sides of one branch: between, no warp can go
       elsewhere and none leaves.
    3. Every thread passes that branch, once: without it neither setmaxnreg nor an EXIT is reached.
    4. Its condition, evaluated for each of `threads` values of tid.x, sends warpgroup 0 to the
       DEALLOC and the others to the TRY_ALLOC.

    Loops and barriers before the branch are taken to end.

    Raises:
        SassError: one of these is not so, or cannot be read from the text.
    """
    kernel = parse(text)
    dealloc = _only(kernel, "USETMAXREG.DEALLOC")
    alloc = _only(kernel, "USETMAXREG.TRY_ALLOC")
    for index in (dealloc, alloc):
        _check_loop(kernel, index)
    (branch, jumps), (other, _) = _decider(kernel, dealloc), _decider(kernel, alloc)
    if branch != other:
        raise SassError(
            f"{kernel.code[dealloc]} hangs on {kernel.code[branch]}, {kernel.code[alloc]} on "
            f"{kernel.code[other]}: threads part between the roles' branch and a setmaxnreg"
        )
    it = kernel.code[branch]
    for index in sorted(kernel.reach(0, avoid=branch)):
        if index in (dealloc, alloc) or kernel.code[index].base in (*ENDS, "CALL"):
            raise SassError(f"{kernel.code[index]} is reached without passing {it}")
    if branch in kernel.reach(*kernel.successors[branch]):
        raise SassError(f"{it} is passed more than once")
    _check_condition(kernel, branch, jumps, threads)
    return Roles(
        int(kernel.code[dealloc].operands[-1], 0), int(kernel.code[alloc].operands[-1], 0), it
    )


def _only(kernel: Kernel, opcode: str) -> int:
    found = [i for i, it in enumerate(kernel.code) if it.opcode.startswith(opcode)]
    if len(found) != 1 or kernel.code[found[0]].guard:
        places = ", ".join(str(kernel.code[i]) for i in found) or "none"
        raise SassError(f"expected one {opcode} without a guard, found {places}")
    return found[0]


def _check_loop(kernel: Kernel, setmaxnreg: int) -> None:
    """Only the retry of a TRY_ALLOC leads back to a setmaxnreg."""
    it = kernel.code[setmaxnreg]
    allowed = RETRY if "TRY_ALLOC" in it.opcode else ()
    loop = kernel.reach(*kernel.successors[setmaxnreg]) & kernel.reaching(setmaxnreg)
    for index in sorted(loop):
        if kernel.code[index].base not in allowed:
            raise SassError(f"{it} is reached again through {kernel.code[index]}")


def _decider(kernel: Kernel, setmaxnreg: int) -> tuple[int, bool]:
    """The branch from which straight-line code leads to a setmaxnreg, and whether by its jump."""
    before = kernel.reach(0, avoid=setmaxnreg)
    index = setmaxnreg
    while True:
        previous = [p for p in kernel.predecessors[index] if p in before]
        if len(previous) != 1:
            places = ", ".join(str(kernel.code[p]) for p in previous) or "nothing"
            raise SassError(
                f"before {kernel.code[setmaxnreg]}, {kernel.code[index]} follows {places}"
            )
        if kernel.splits(previous[0]):
            break
        index = previous[0]
    it = kernel.code[previous[0]]
    if it.opcode not in ("BRA", "JMP") or len(kernel.successors[previous[0]]) != 2:
        raise SassError(f"before {kernel.code[setmaxnreg]}, threads part at {it}")
    return previous[0], kernel.successors[previous[0]][0] == index


def _check_condition(kernel: Kernel, branch: int, dealloc_jumps: bool, threads: int) -> None:
    it = kernel.code[branch]
    values = Values(kernel)
    for tid in range(threads):
        jumps = all(values.at(p, branch, tid) for p in it.conditions)
        wanted = dealloc_jumps if tid < WARPGROUP else not dealloc_jumps
        if jumps != wanted:
            raise SassError(
                f"{it} sends thread {tid} of warpgroup {tid // WARPGROUP} to the other setmaxnreg "
                "than the rest of its warpgroup, or than its role"
            )
