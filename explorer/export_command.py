"""`tl-megamoe export`: the kernels that a layer needs, for processes that must not compile.

It writes what a buffer of one capacity can choose: the kernel of every token count from 0 to the
capacity, and the launch that quantises BF16 activations. `SymmBuffer(..., kernels=DIR)` loads them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tl_megamoe.exported import check_out, export_kernels
from tl_megamoe.frozen import device_key
from tl_megamoe.kernel import KernelSpec
from tl_megamoe.layout import make_layout
from tl_megamoe.manifest import COMMAND
from tl_megamoe.problem import Problem
from tl_megamoe.selection import schedule_intervals
from tl_megamoe.shared_experts import with_shared

from . import doctor
from .args import (
    add_problem,
    add_ranks,
    add_recipe,
    non_negative,
    one_count,
    recipe_of,
    running_problem,
    whole_problem,
)
from .check import NUM_SMS
from .farm import quiet_tilelang


def add_parser(add: Callable[..., Any]) -> None:
    """Register the verb; `add` makes a sub-parser from a name, a function and a text."""
    parser = add("export", run_export, "Write a layer's kernels to a folder, to serve from.")
    add_problem(parser)
    add_ranks(parser)
    add_recipe(parser, "recipe of the buffer")
    parser.add_argument(
        "--capacity", type=one_count, default=8192, help="tokens of the buffer (8192)"
    )
    parser.add_argument(
        "--num-shared", type=non_negative, default=0, metavar="S", help="shared experts (0)"
    )
    parser.add_argument(
        "--clamp", action="store_true", help="kernels of calls with an activation_clamp"
    )
    parser.add_argument(
        "--precise", action="store_true", help="kernels of calls with fast_math=False"
    )
    parser.add_argument("--device", help="GPU that will run them, as nvidia-h200 (this machine's)")
    parser.add_argument(
        "--num-sms",
        type=one_count,
        help=f"multiprocessors of that GPU (this machine's, or {NUM_SMS})",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder")


def run_export(args: argparse.Namespace) -> int:
    """The verb; 0 when the folder is written."""
    from tl_megamoe.quantize import QuantizeSpec  # torch, which other commands do without

    out = check_out(args.out)
    device = _device_of(args)
    routed, mode = _running_problem(args)
    problem, recipe = with_shared(routed, args.num_shared), recipe_of(args)
    make_layout(problem, args.capacity, recipe)  # refuses a capacity that no buffer has
    share = problem.num_ranks if mode == "virtual" else 1
    most = (args.num_sms or _num_sms(device)) // share
    intervals = schedule_intervals(
        problem, device, args.capacity, rank_mode=mode, recipe=recipe, num_sms=most
    )
    specs = [
        KernelSpec(
            problem=problem,
            schedule=schedule,
            capacity=args.capacity,
            recipe=recipe,
            clamp=args.clamp,
            fast_math=not args.precise,
        )
        for _, schedule in intervals
    ]
    quantize = QuantizeSpec.of(problem, args.capacity, recipe, args.num_shared)
    notes = {
        "command": command_of(args, routed, device, mode),
        "device": device,
        "problem": {"name": routed.name, **routed.key()},
        "num_shared": args.num_shared,
        "rank_mode": mode,
        "capacity": args.capacity,
        "recipe": str(recipe),
        "schedules": [{"max_tokens": end, "schedule": s.name} for end, s in intervals],
    }
    quiet_tilelang()
    try:
        manifest = export_kernels(out, specs, [quantize], notes, on_kernel=_say)
    except RuntimeError as error:  # a compiler's, whose disk may be full
        print(f"tl-megamoe: {out} is not written: {error}", file=sys.stderr)
        return 1
    for end, schedule in intervals:
        print(f"up to {end:>6} tokens  {schedule.name}")
    size = manifest.num_bytes / 2**20
    print(f"{out}: {len(manifest.kernels)} kernels, {size:.1f} MiB")
    return 0


def command_of(args: argparse.Namespace, problem: Problem, device: str, mode: str) -> str:
    """The command that writes the same kernels anywhere, for the manifest and its errors."""
    words = [COMMAND, problem.flags(), f"--capacity {args.capacity}"]
    words += [f"--recipe {args.recipe}", f"--device {device}"]
    if mode != "one":
        words.append(f"--rank-mode {mode}")
    if args.num_sms is not None:
        words.append(f"--num-sms {args.num_sms}")
    if args.num_shared:
        words.append(f"--num-shared {args.num_shared}")
    words += [f"--{name}" for name in ("clamp", "precise") if getattr(args, name)]
    return " ".join([*words, "--out", shlex.quote(str(args.out))])


def _running_problem(args: argparse.Namespace) -> tuple[Problem, str]:
    """As `running_problem`; where all ranks run, --num-ranks or the preset may name them too."""
    if args.rank_mode != "one" and args.ranks is None:
        args = argparse.Namespace(**{**vars(args), "ranks": whole_problem(args).num_ranks})
    return running_problem(args)


def _device_of(args: argparse.Namespace) -> str:
    name = args.device or doctor.find_gpu()
    if name is None:
        raise ValueError(
            "no SM90 GPU here: name the one that will run the kernels, as --device nvidia-h200"
        )
    return device_key(name)


def _num_sms(device: str) -> int:
    """Multiprocessors of this machine's GPU if it is the one meant, else of an SXM card."""
    here = doctor.find_gpu()
    if here is None or device_key(here) != device:
        return NUM_SMS
    import torch

    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)


def _say(number: int, total: int, name: str) -> None:
    print(f"[{number}/{total}] {name}", file=sys.stderr)
