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
SINGLE_DELTA = 0.0044  # after grow's first phase
