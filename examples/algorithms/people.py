"""The population of the examples: trips around three towns, one per device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

POLICY = Path(__file__).with_name("policy.toml")


def trips(devices: int = 30_000, seed: int = 1) -> pl.DataFrame:
    """Return where each trip begins, how long it takes and what it costs."""
    rng = np.random.default_rng(seed)
    town = rng.choice(3, devices, p=[0.6, 0.3, 0.1])
    centre = np.array([[0.25, 0.25], [0.7, 0.6], [0.3, 0.8]])[town]
    spread = np.array([0.02, 0.06, 0.03])[town][:, None]
    points = np.clip(centre + spread * rng.standard_normal((devices, 2)), 0.0, 0.999)
    minutes = np.clip(rng.gamma(4.0, 5.0, devices), 1.0, 59.9)
    fare = np.clip(2.0 + 0.5 * minutes * rng.lognormal(0.0, 0.2, devices), 0.0, 39.9)
    return pl.DataFrame(
        {"device": np.arange(devices), "x": points[:, 0], "y": points[:, 1],
         "fare": fare, "minutes": minutes}
    )  # fmt: skip
