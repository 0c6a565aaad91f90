"""The check of setmaxnreg can fail: machine code that it takes, and such that it refuses."""

from __future__ import annotations

import pytest
import sass as sass_module
from sass import SassError, check_roles

GOOD = """
    S2R R0, SR_TID.X
    BSSY B0, `(.after)
    ISETP.GT.U32.AND P0, PT, R0, 0x1f, PT
    @P0 BRA `(.join)
    LDG.E.64 R2, desc[UR6][R4.64]
    .join:
    BSYNC B0
    .after:
    BAR.SYNC.DEFER_BLOCKING 0x2, 0x180
    ISETP.GE.AND P0, PT, R0, 0x80, PT
    @!P0 BRA `(.load)
    .retry:
    WARPSYNC.ALL
    USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8
    PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0
    @!P0 BRA `(.retry)
    .multiply:
    VIADD R1, R1, 0x1
    ISETP.GE.AND P0, PT, R1, 0x80, PT
    @!P0 BRA `(.multiply)
    EXIT
    .load:
    WARPSYNC.ALL
    USETMAXREG.DEALLOC.CTAPOOL 0x28
    ISETP.GE.AND P0, PT, R0, 0x40, PT
    @P0 EXIT
    STG.E desc[UR6][R2.64], RZ
    EXIT
"""
"""The shape of a kernel: two roles behind one branch, loops and exits before and behind."""


def sass(text: str, *changes: tuple[str, str]) -> str:
    """As nvdisasm prints it, after each (old, new) is applied to its one occurrence."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    lines, offset = [".text.mega_moe_kernel:"], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{offset:04x}*/                   {line} ;")
            offset += 16
    return "\n".join(lines)


COMPARE = "ISETP.GE.AND P0, PT, R0, 0x80, PT"
BRANCH = "@!P0 BRA `(.load)"
DEALLOC = "USETMAXREG.DEALLOC.CTAPOOL 0x28"
ALLOC = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8"


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ((COMPARE, "ISETP.GT.U32.AND P0, PT, R0, 0x7f, PT"),),
        ((COMPARE, "ISETP.LT.U32.AND P0, PT, R0, 0x80, PT"), (BRANCH, "@P0 BRA `(.load)")),
        ((COMPARE, "SHF.R.U32.HI R9, RZ, 0x7, R0\nISETP.NE.AND P0, PT, R9.reuse, RZ, PT"),),
        ((COMPARE, "LOP3.LUT P0, RZ, R0, 0xffffff80, RZ, 0xc0, !PT"),),
        (
            (COMPARE, "R2UR UR4, R0\nUISETP.GE.AND UP1, UPT, UR4, 0x80, UPT"),
            (BRANCH, "PLOP3.LUT P0, PT, PT, PT, UP1, 0x80, 0x0\n@!P0 BRA `(.load)"),
        ),
        ((COMPARE, f"IMAD.MOV.U32 R7, RZ, RZ, R0\n{COMPARE.replace('R0', 'R7')}"),),
        ((f"{BRANCH}\n", "@!P0 BRA `(.go)\nBRA `(.retry)\n.go:\nBRA `(.load)\n"),),
    ],
)
def test_accepts_what_compilers_write(changes: tuple[tuple[str, str], ...]) -> None:
    roles = check_roles(sass(GOOD, *changes), 384)
    assert (roles.load_registers, roles.math_registers) == (40, 232)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param((("0x80, PT\n    @!P0 BRA `(.load)", "0x60, PT\n    @!P0 BRA `(.load)"),),
                     "sends thread 96 of warpgroup 0", id="compared-with-96"),
        pytest.param((("0x80, PT\n    @!P0 BRA `(.load)", "0x100, PT\n    @!P0 BRA `(.load)"),),
                     "sends thread 128 of warpgroup 1", id="a-math-warpgroup-deallocates"),
        pytest.param(((BRANCH, BRANCH.replace("!", "")),),
                     "sends thread 0 of warpgroup 0", id="roles-swapped"),
        pytest.param(((DEALLOC, "NOP"),), "expected one USETMAXREG.DEALLOC", id="no-dealloc"),
        pytest.param(((ALLOC, "NOP"),), "expected one USETMAXREG.TRY_ALLOC", id="no-alloc"),
        pytest.param(((DEALLOC, f"{DEALLOC}\n{DEALLOC}"),),
                     "expected one USETMAXREG.DEALLOC", id="two-deallocs"),
        pytest.param(((DEALLOC, f"@P0 {DEALLOC}"),), "without a guard", id="guarded-dealloc"),
        pytest.param(
            ((DEALLOC, f"ISETP.GE.AND P1, PT, R0, 0x40, PT\n@P1 BRA `(.skip)\n{DEALLOC}\n.skip:"),),
            "threads part between", id="warps-skip-it"),
        pytest.param(
            ((DEALLOC, f"ISETP.GE.AND P1, PT, R0, 0x40, PT\n@P1 BRA `(.j)\nNOP\n.j:\n{DEALLOC}"),),
            "follows .*NOP", id="warps-part-and-meet"),
        pytest.param(((".load:", ".load:\nISETP.GE.AND P1, PT, R0, 0x60, PT\n@P1 EXIT"),),
                     "threads part at .*EXIT", id="warps-leave-between"),
        pytest.param((("BAR.SYNC", "ISETP.EQ.AND P1, PT, R0, 0x1f, PT\n@P1 EXIT\nBAR.SYNC"),),
                     "EXIT is reached without passing", id="threads-leave-before"),
        pytest.param((("LDG.E.64 R2, desc[UR6][R4.64]", "BRA `(.load)"),),
                     "WARPSYNC.ALL follows", id="a-way-around-the-branch"),
        pytest.param((("BSYNC B0", "BRA.DIV UR5, `(.load)"),),
                     "WARPSYNC.ALL follows", id="a-divergent-way-around"),
        pytest.param((("@!P0 BRA `(.multiply)", "@!P0 BRA `(.retry)"),),
                     "is reached again through", id="alloc-in-a-loop"),
        pytest.param((("STG.E desc[UR6][R2.64], RZ", "BRA `(.after)"),),
                     "is reached again through", id="roles-in-a-loop"),
        pytest.param(((COMPARE, "ISETP.GE.AND P0, PT, R2, 0x80, PT"),),
                     "may be read before it is written", id="an-unknown-register"),
        pytest.param(((COMPARE, f"LDS R0, [UR4]\n{COMPARE}"),),
                     "LDS R0, .* not followed back", id="not-the-thread-index"),
        pytest.param(((COMPARE, f"@P0 VIADD R0, R0, 0x1\n{COMPARE}"),),
                     "comes from 2", id="changed-by-some-threads"),
        pytest.param(((COMPARE, f"LDG.E.128 R244, desc[UR6][R4.64]\nIMAD.WIDE R252, R2, R3, R4\n"
                                f"CS2R R0, SRZ\n{COMPARE}"),),
                     "CS2R R0, SRZ.* not followed", id="overwritten"),
        pytest.param((("VIADD R1, R1, 0x1", "BRX R2 -0x10"),),
                     "jumps to an address", id="jump-table"),
        pytest.param((("LDG.E.64 R2, desc[UR6][R4.64]", "CALL.REL.NOINC `(.multiply)"),),
                     "CALL.REL.NOINC .* without passing", id="a-call-before"),
    ],
)  # fmt: skip
def test_refuses_what_a_warp_could_miss(changes: tuple[tuple[str, str], ...], message: str) -> None:
    with pytest.raises(SassError, match=message):
        check_roles(sass(GOOD, *changes), 384)


def test_text_must_be_one_kernel() -> None:
    with pytest.raises(SassError, match="found 2 beginnings"):
        check_roles(sass(GOOD) + "\n" + sass(GOOD), 384)
    with pytest.raises(SassError, match="found 0 beginnings"):
        check_roles("", 384)
    with pytest.raises(SassError, match="cannot read"):
        check_roles("/*0000*/ what is this ;", 384)


def test_a_missing_disassembler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass_module, "PACKAGE", "no-such-package")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        SassError, match=r"nvdisasm, .* is not installed.*pip install -e '.\[dev\]'"
    ):
        sass_module.nvdisasm()
