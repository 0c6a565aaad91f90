"""The schedule explorer behind `tl-megamoe`: enumerate, compile, check, time, record, freeze."""
