"""The four phases, each a set of macros that stand-alone and fused programs share."""
