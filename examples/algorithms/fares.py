"""What trips cost: the distribution of fares and its quantiles."""

from __future__ import annotations

from people import POLICY, trips

import chorister as ch


def main() -> None:
    """Rehearse a study and print what it finds."""
    people = trips()
    study = ch.rehearse(people, POLICY, seed=1).study("fares", analysis="trips")
    run = ch.distribution(study, "fare", 0, 40)
    print(run.plan.explain())
    found = run.result.quantiles((0.25, 0.5, 0.75))
    for share, value, low, high in zip(
        (0.25, 0.5, 0.75), found["quantile"], found["ci_low"], found["ci_high"], strict=True
    ):
        truth = people["fare"].quantile(share)
        print(f"{share:.0%}: {value:.2f} [{low:.2f}, {high:.2f}], truth {truth:.2f}")


if __name__ == "__main__":
    main()
