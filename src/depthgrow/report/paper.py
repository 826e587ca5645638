"""The published figures that stand beside ours: arXiv 2608.13156 (one seed, nine layers from Qwen3-8B)."""

from __future__ import annotations

from typing import Any

SOURCE = "arXiv 2608.13156"

PAPER: dict[str, Any] = {
    "source": SOURCE,
    "ce": {
        "pre-joint": 2.7603,
        "post-joint": 2.7607,
        "pre-grow": 2.7658,
        "post-grow": 2.7330,
        "pre-freeze": 2.9104,
        "post-freeze": 2.8772,
        "pre-single": 2.9802,
        "post-single": 2.9846,
        "post-joint-long": 2.7518,
        "post-joint-longer": 2.7428,
    },
    # CE(post) - CE(pre); interaction = grow - joint
    "delta": {"joint": 0.0004, "grow": -0.0328, "freeze": -0.0332, "single": 0.0044},
    "interaction": -0.0332,
    # (removal in nats, angle as a share of pi) of each block at the end
    "blocks": {
        "pre-grow": [(8.13, 0.499), (2.36, 0.310), (0.02, 0.031)],
        "post-grow": [(8.32, 0.483), (3.74, 0.365), (2.38, 0.342)],
        "pre-joint": [(8.05, 0.485), (1.47, 0.245), (2.34, 0.360)],
        "post-joint": [(0.55, 0.395), (0.99, 0.166), (4.00, 0.437)],
    },
    # loss at the two transitions, in nats per token; recovery in steps of 50,000
    "transitions": {
        "pre-grow": [
            {"jump": 0.0226, "auc": {"2%": 0.0694, "10%": 0.1217}, "recovery": 101},
            {"jump": 0.0230, "auc": {"2%": 0.0688, "10%": 0.1277}, "recovery": 19_054},
        ],
        "post-grow": [
            {"jump": 0.2500, "auc": {"2%": 0.1820, "10%": 0.1464}, "recovery": 19_914},
            {"jump": 0.2847, "auc": {"2%": 0.2059, "10%": 0.1774}, "recovery": 19_426},
        ],
    },
    # std over tokens of the RMS after block 0 under pre, at the first and the last phase's end
    "scale_std": (5.81, 19.98),
}
