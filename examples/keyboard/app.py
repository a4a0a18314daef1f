"""A keyboard with a device in it: the smallest app that takes part.

    python examples/keyboard/app.py --folder /tmp/keyboard --registry http://127.0.0.1:8080/ < text

Each input line counts as typed: the app donates its word n-grams. Then the device polls the public
log and answers what its policy and budget allow, and the app shows what was sent. A real app asks
the person before `opt_in`, runs the device regularly, and keeps the key in the system's keyring.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chorister.device import Device, HeadFile, KeyFile
from chorister.device.audit_pages import as_text
from chorister.encoding import split_words
from chorister.errors import ChoristerError
from chorister.policy import Policy

HERE = Path(__file__).parent
LONGEST = 4


def ngrams(line: str) -> Iterator[dict[str, object]]:
    """Yield every run of one to four words as an event of the stream `keyboard`."""
    words = split_words(line)
    for start in range(len(words)):
        for end in range(start + 1, min(start + LONGEST, len(words)) + 1):
            yield {"ngram": " ".join(words[start:end]), "perplexity": None}


def open_device(folder: Path, policy: Path, registry: str) -> Device:
    """Open the device in `folder`; its key and the ledger's head are next to it, never inside."""
    store = folder / "device"
    return Device(
        store,
        Policy.load(policy),
        KeyFile(folder / "key", store=store),
        registry=registry,
        head=HeadFile(folder / "head"),
        create=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Donate what was typed, run the device once, and show what happened."""
    parser = argparse.ArgumentParser(description="A keyboard with a device in it.")
    parser.add_argument("--folder", type=Path, required=True, help="where the app keeps its data")
    parser.add_argument("--registry", required=True, help="URL of the public log")
    parser.add_argument("--policy", type=Path, default=HERE / "policy.toml")
    parser.add_argument("--locale", default="en_GB")
    parser.add_argument("--age", type=int, default=None)
    options = parser.parse_args(arguments)

    with open_device(options.folder, options.policy, options.registry) as device:
        # Draw the time first: when the device polls must not depend on how much was typed.
        moment = device.timing.draw_start(device.clock.microseconds())
        device.opt_in()
        device.set_profile("user", {"age": options.age, "locale": options.locale})
        events = [event for line in sys.stdin for event in ngrams(line)]
        device.donate_many("keyboard", events)
        print(f"kept {len(events)} n-grams")
        while (run := device.run_once(at=moment)).waiting:  # until an earlier run has ended
            time.sleep(device.quiet_seconds())
        print(f"answered: {', '.join(run.answered) or 'nothing'}")
        if run.silent or run.problems:
            print(f"silent: {'; '.join(filter(None, [run.silent, *run.problems]))}")
        print(as_text(device.audit.records(newest=3)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ChoristerError as error:
        sys.exit(f"error: {error}")
