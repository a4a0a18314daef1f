"""Asks three rounds in a folder, and kills itself where it is told to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import chorister as ch
from chorister.analyst.rehearsal import Rehearsal
from tests.analyst.fleets import AGES, generous
from tests.keyboard import ANALYSIS


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("still alive")


def main() -> None:
    folder, moment = Path(sys.argv[1]), sys.argv[2]
    if moment == "published":
        Rehearsal.collect = lambda *_: die()  # type: ignore[method-assign]
    elif moment == "drawn":  # released and lost: before the result is on disk
        kept = Rehearsal._release

        def release_and_die(*arguments: object) -> None:
            kept(*arguments)  # type: ignore[arg-type]
            die()

        Rehearsal._release = release_and_die  # type: ignore[method-assign,assignment]
    elif moment.startswith("write-"):  # the n-th file is complete, but not in its place
        left = [int(moment.removeprefix("write-"))]
        replace = os.replace

        def replace_or_die(source: str, target: Path) -> None:
            left[0] -= 1
            if not left[0]:
                die()
            replace(source, target)

        os.replace = replace_or_die  # type: ignore[assignment]
    study = ch.rehearse(AGES, generous(1), folder=folder).study("victim", analysis=ANALYSIS)
    if moment != "no":
        ask(study, 2)
    for number in (1, 2, 3):
        result = ask(study, number)
        print(number, result.n_reports, result.parts[0].sums.tolist())


def ask(study: ch.Study, number: int) -> ch.Result:
    cells = range(10, 90, 10 * number)
    return study.ask(
        study.histogram(ch.intervals("age", cells), local_epsilon=3, epsilon=1, participation="0.3")
    )


if __name__ == "__main__":
    main()
