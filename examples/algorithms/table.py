"""How long trips take by what they cost: a two-way table."""

from __future__ import annotations

from people import POLICY, trips

import chorister as ch


def main() -> None:
    """Rehearse a study and print what it finds."""
    people = trips()
    study = ch.rehearse(people, POLICY, seed=1).study("table", analysis="trips")
    run = ch.crosstab(
        study, ch.intervals("minutes", range(0, 61, 2)), ch.intervals("fare", range(0, 41, 2))
    )
    print(run.plan.explain())
    found = run.result
    print(found.explain())
    short = float(found.shares[1:11].sum())
    truth = float((people["minutes"] < 20).mean())
    print(f"below 20 minutes: {short:.3f} found, {truth:.3f} in truth")


if __name__ == "__main__":
    main()
