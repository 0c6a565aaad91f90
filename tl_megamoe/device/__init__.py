"""Device building blocks: barriers, rings, the tile walk, copies between ranks, the FP8 product."""
