"""A map that is finer where people are, in three rounds."""

from __future__ import annotations

from people import POLICY, trips

import chorister as ch


def main() -> None:
    """Rehearse a study and print what it finds."""
    people = trips()
    study = ch.rehearse(people, POLICY, seed=1).study("map", analysis="trips")
    run = ch.heatmap(study, ("x", "y"), (0, 0, 1, 1), depth=7)
    print(run.plan.explain())
    found = run.result
    print(found.explain())
    west = int((people["x"] < 0.5).sum())
    print(f"west of the middle: {found.image(1)[:, 0].sum():,.0f} found, {west:,} in truth")


if __name__ == "__main__":
    main()
