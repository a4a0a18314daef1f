"""Words that many people type although they are on no list, each device answering once."""

from __future__ import annotations

from pathlib import Path

import chorister as ch

POLICY = Path(__file__).parents[1] / "keyboard" / "policy.toml"
FUNCTIONS = b'functions = ["length", "lower", "ngrams"]'
TYPED = {
    "good morning to all": 90_000,
    "that rizz is bussin": 60_000,
    "error e4711 again": 40_000,
    "see you soon": 10_000,
}
KNOWN = ("again", "all", "error", "good", "is", "morning", "see", "soon", "that", "to", "you")


def main() -> None:
    """Rehearse a study and print what it finds."""
    # Devices cut words after some characters: the policy has to permit `substr` and `words`.
    permitted = FUNCTIONS.replace(b"]", b', "substr", "words"]')
    policy = ch.Policy.load(POLICY.read_bytes().replace(FUNCTIONS, permitted))
    typed = {"ngram": list(TYPED), "count": list(TYPED.values())}
    study = ch.rehearse(typed, policy, seed=1).study("words", analysis="keyboard.next-word")
    # Six rounds begin with two characters, which also finds codes that are spelled like no word.
    run = ch.discover_words(study, field="keyboard.ngram", deny=KNOWN, rounds=6)
    print(run.plan.explain())
    for step in run:
        print(f"round {step.number}: {step.result.n_reports:,} devices, {len(step.result):,} bins")
    print(run.result.explain())
    print("found:", ", ".join(run.result.found()))


if __name__ == "__main__":
    main()
