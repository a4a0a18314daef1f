"""Phrases that many people type, found word by word, each device answering once."""

from __future__ import annotations

from pathlib import Path

import chorister as ch

POLICY = Path(__file__).parents[1] / "keyboard" / "policy.toml"
PHRASES = {
    "good morning to all": 90_000,
    "see you soon again": 60_000,
    "how are you today": 40_000,
    "the rain in spain": 10_000,
}
VOCABULARY = sorted({word for phrase in PHRASES for word in phrase.split()})


def main() -> None:
    """Rehearse a study and print what it finds."""
    typed = {"ngram": list(PHRASES), "count": list(PHRASES.values())}
    study = ch.rehearse(typed, POLICY, seed=1).study("phrases", analysis="keyboard.next-word")
    run = ch.discover_ngrams(study, VOCABULARY, max_n=3)
    print(run.plan.explain())
    for step in run:
        print(f"round {step.number}: {step.result.n_reports:,} devices, {len(step.result):,} bins")
    print(run.result.explain())
    print("found:", ", ".join(run.result.found(3)))


if __name__ == "__main__":
    main()
