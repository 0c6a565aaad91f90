"""The tiles of a block, from the warp that loads their weights, or in a cluster the scheduler, to
the others.

A position in the walk costs 3000 clocks to turn into a tile, expert and rows (divisions, two or
three searches in shared memory). The weights warp has that time, since it runs ahead; the
others do not, and read what it found.

barrier           arrivals   meaning
tasks.full[slot]  1          the tile's entry is written: code, expert, rows

An entry is written while the tile before it is loaded. So the writer is at most `stages` tiles, its
own and the two of the warpgroups before a reader, and with a few more slots than that none is
overwritten before it is read.
"""

from __future__ import annotations

import tilelang.language as T

TASKS_CUDA = r"""
TLMM_DEV void tlmm_publish(void* entry, void* full, int code, int expert, int rows, int shares) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
    :: "r"(tlmm_smem(entry)), "r"(code), "r"(expert), "r"(rows), "r"(shares) : "memory");
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(tlmm_smem(full)) : "memory"); }
TLMM_DEV void tlmm_read_task(const void* entry, void* full, int parity, int* code, int* expert, int* rows) {
  tlmm_wait_full(tlmm_smem(full), parity);
  int unused;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
    : "=r"(*code), "=r"(*expert), "=r"(*rows), "=r"(unused) : "r"(tlmm_smem(entry)) : "memory"); }
"""


@T.meta_class
class Tasks:
    """Entries of four words and a barrier each."""

    def __init__(self, slots: int, tables, offset: int):
        self.slots = slots
        self.tables = tables
        self.offset = offset
        self.full = T.alloc_barrier([1] * slots)

    def entry(self, slot):
        return T.address_of(self.tables[self.offset + slot * 4])

    @T.inline
    def publish(self, cursor, code, expert, rows, shares=0):
        """Write the entry at `cursor`; `shares` in a cluster (device/cluster.py). One warp."""
        if T.shuffle_elect(32):
            T.call_extern(
                "handle",
                "tlmm_publish",
                self.entry(cursor.stage[0]),
                T.address_of(self.full[cursor.stage[0]]),
                code,
                expert,
                rows,
                shares,
            )

    def shares(self, cursor):
        """Of the entry at `cursor`, which was waited for: whether both blocks of the cluster have
        the tile's weights."""
        return T.call_extern("int32", "tlmm_shares", self.entry(cursor.stage[0]))

    @T.inline
    def read(self, cursor, code, expert, rows):
        """Wait for the entry at `cursor`. Any warp."""
        T.call_extern(
            "handle",
            "tlmm_read_task",
            self.entry(cursor.stage[0]),
            T.address_of(self.full[cursor.stage[0]]),
            cursor.parity[0],
            T.address_of(code),
            T.address_of(expert),
            T.address_of(rows),
        )
