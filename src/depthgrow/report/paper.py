"""The published figures that stand beside ours: arXiv 2608.13156 (one seed, nine layers from Qwen3-8B)."""

from __future__ import annotations

SOURCE = "arXiv 2608.13156"

CE = {
    "pre-joint": 2.7603,
    "post-joint": 2.7607,
    "pre-grow": 2.7658,
    "post-grow": 2.7330,
    "pre-freeze": 2.9104,
    "post-freeze": 2.8772,
    "pre-single": 2.9802,
    "post-single": 2.9846,
}

DELTA = {"joint": 0.0004, "grow": -0.0328, "freeze": -0.0332}  # CE(post) - CE(pre)
INTERACTION = -0.0332  # DELTA[grow] - DELTA[joint]
# (removal in nats, angle as a share of pi) of each block at the end
BLOCKS = {
    "pre-grow": [(8.13, 0.499), (2.36, 0.310), (0.02, 0.031)],
    "post-grow": [(8.32, 0.483), (3.74, 0.365), (2.38, 0.342)],
    "pre-joint": [(8.05, 0.485), (1.47, 0.245), (2.34, 0.360)],
    "post-joint": [(0.55, 0.395), (0.99, 0.166), (4.00, 0.437)],
}

SINGLE_DELTA = 0.0044  # after grow's first phase
