"""A policy about places and incomes, and people to rehearse with."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from chorister.policy import Policy
from tests.conftest import REPOSITORY

_ANALYSIS = """
[streams.trip]
retention = "30d"

[streams.trip.fields]
x = {{ type = "real" }}
y = {{ type = "real" }}
fare = {{ type = "real" }}

[analyses.trips]
purpose = "Where trips begin and what they cost"
author_keys = ["11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"]
collectors = ["9aab743a52ddb19e7062d78806d2c0c22e1c4dae1e7f4bf992dc8107291a3e47"]
query_class = "fields"
functions = []
max_bins = {max_bins}
mechanisms = ["asymmetric", "symmetric"]

[analyses.trips.window]
shortest = "6h"
longest = "14d"
longest_grace = "14d"

[analyses.trips.cohort]
smallest = 500
largest = 10_000_000

[analyses.trips.budget]
local_epsilon = {local}
epsilon = {epsilon}
delta = 1e-6
reports = {reports}
period = "180d"
composition = {composition}

[analyses.trips.fields]
{fields}
"""


def trips_policy(
    *, reports: int, epsilon: float = 1.0, max_bins: int = 10_000, local_epsilon: int = 0
) -> Policy:
    """A device that answers so many questions about its trips."""
    keyboard = (REPOSITORY / "examples" / "keyboard" / "policy.toml").read_text()
    head = keyboard[: keyboard.index("# All analyses together")]
    local = local_epsilon or 12 * reports
    allowance = f"local_epsilon = {local}, epsilon = {epsilon}, delta = 1e-6, reports = {reports}"
    fields = "\n".join(f'"trip.{name}" = {{ {allowance} }}' for name in ("x", "y", "fare"))
    device = (
        f"[device]\nepsilon = {2 * epsilon}\ndelta = 1e-5\nreports = {reports}\n"
        'period = "180d"\nmin_ledger_age = "7d"\n'
    )
    body = _ANALYSIS.format(
        max_bins=max_bins, local=local, epsilon=epsilon, reports=reports,
        composition='"basic"', fields=fields,
    )  # fmt: skip
    return Policy.load((head + device + body).encode())


def three_towns(devices: int, seed: int) -> tuple[pl.DataFrame, NDArray[np.float64]]:
    """Trips that begin around three towns of different size; one device, one trip."""
    rng = np.random.default_rng(seed)
    centres = np.array([[0.25, 0.25], [0.7, 0.6], [0.3, 0.8]])
    town = rng.choice(3, devices, p=[0.6, 0.3, 0.1])
    spread = np.array([0.02, 0.06, 0.03])[town]
    points = centres[town] + rng.normal(size=(devices, 2)) * spread[:, None]
    fare = rng.lognormal(2.0, 0.5, devices)
    frame = pl.DataFrame(
        {"device": np.arange(devices), "x": points[:, 0], "y": points[:, 1], "fare": fare}
    )
    return frame, points


def rows_of(spec: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a chart's layer, written in place or once for the whole chart."""
    data = layer["data"]
    rows: list[dict[str, Any]] = (
        data["values"] if "values" in data else spec["datasets"][data["name"]]
    )
    return rows
