"""Words that the text report and the results page explain alike."""

from __future__ import annotations

MEDIANS = (
    "Ratios are medians of the ratios of each round, so columns of medians need not divide exactly."
)
NAME = (
    "pp- pingpong (each math warpgroup computes its own tile), sw- swapped (both share one, whose "
    "products follow its rows in steps of 16), else cooperative (both share one); m rows of a tile "
    "(block_m; of a swapped one the most); n columns of a tile of linear1 and linear2 (block_n); "
    "s stages of the operand ring in K blocks; w experts of a wave, or lag: how many blocks of "
    "rows linear2 follows linear1 by; d dispatch warps, l load warps; r registers of a load and of "
    "a math thread; f rows in flight of a dispatch warp; sm blocks of the grid; p K blocks of the "
    "first weights that are prefetched; e1 at the end: weights are what L2 gives up first"
)
TERMS = (
    (
        "floor",
        "About the least time that the layer could take on this card: the larger of the time to "
        "read its weights and activations at the bandwidth that the memory was measured to have, "
        "and the time for its multiplications at the rate of the yardstick.",
    ),
    (
        "`ratio_to_floor`, `/ floor`",
        "Time divided by the floor: 1 is at the floor, 1.25 a quarter above it. The floor takes "
        "the yardstick of its own run, so this is the number that compares different runs and "
        "cards: closely where memory decides the floor; where the multiplications do (above about "
        "512 tokens) it carries the noise of the yardstick, the highest of its round.",
    ),
    (
        "yardstick",
        "TFLOP/s that a plain FP8 matrix product (8192 x 8192 x 8192) reaches on the same card "
        "just before and after. The card is limited by power, so it is faster when cool: a time "
        "means nothing without the yardstick beside it.",
    ),
    (
        "`ratio_to_baseline`, `/ default`",
        "Time divided by that of a baseline in the same interleaved round: in the search, the "
        "built-in default schedule. This is the number that compares candidates that were not "
        "timed together. Below 1 is faster than the default.",
    ),
    (
        "spread",
        "Robust standard deviation of `/ default` from round to round of a confirmation (1.4826 x "
        "the median absolute deviation), so how far a single round may be off. The median over n "
        "rounds is surer: its standard error is 1.2533 x spread / sqrt(n). Two candidates differ "
        "if the gain of one over the other exceeds twice the spread of the gain, which "
        "`tl-megamoe freeze` and `tl-megamoe why` print: they compare round by round, where both "
        "saw the same card. The default's own spread is zero by construction and shown as `-`.",
    ),
    (
        "p10, p90",
        "A tenth of the samples (of a confirmed candidate: of the rounds' medians) lie below p10, "
        "a tenth above p90.",
    ),
    (
        "screen",
        "Every candidate that a search takes up is checked against a reference and timed briefly. "
        "It finds "
        "what is promising; its order among close candidates is not to be trusted.",
    ),
    (
        "confirm",
        "The best of the screen are timed again by the full protocol: several seeds (other "
        "routings and inputs), several observations of each, all candidates interleaved. Where a "
        "candidate is confirmed, that decides.",
    ),
    (
        "bench",
        "Our schedule (the frozen one unless another was named) beside other implementations.",
    ),
    (
        "frozen",
        "The schedule that the library takes for a token count; `tl-megamoe why` explains one.",
    ),
    (
        "TFLOP/s, GB/s",
        "Work of the layer over its time: 2 x routed tokens x 3 x hidden x intermediate "
        "operations; the bytes of weights and activations that memory must deliver or take.",
    ),
    (
        "the name of a schedule",
        f"{NAME}.",
    ),
)
