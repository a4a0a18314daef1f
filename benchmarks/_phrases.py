"""Devices with text, resampled from a file of messages, and what they report about their n-grams.

Everything is computed on the devices of the file; a resampled population is how often each of
them occurs. What a device reports is drawn by the device's own rule, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.special import gammaln

from chorister.encoding import canonical_texts

Ints: TypeAlias = NDArray[np.int64]
DATA = Path(__file__).parents[1] / ".." / "shared" / "data" / "irc_messages.csv.gz"


def messages(path: Path | None, split: str = "words") -> pl.DataFrame:
    """device, message, word: one row a word, in order; generated where there is no file."""
    path = path or DATA
    if path.exists():
        frame = pl.read_csv(path).drop_nulls().select("device", "text")
    else:
        print(f"{path} is absent: using generated messages")
        frame = generated()
    texts = frame["text"].to_list()
    if split == "words":
        texts = canonical_texts(texts)
    return (
        frame.select("device", message=pl.int_range(pl.len()))
        .with_columns(word=pl.Series(texts).str.split(" "))
        .explode("word")
        .filter(pl.col("word").is_not_null() & (pl.col("word") != ""))
    )


def generated(devices: int = 4_000, seed: int = 1) -> pl.DataFrame:
    """Messages of a made-up language: a Markov chain over words with a long tail."""
    rng = np.random.default_rng(seed)
    words = 2_000
    base = 1.0 / np.arange(3, words + 3)
    base /= base.sum()
    follow = np.stack([rng.permutation(words)[:12] for _ in range(words)])
    owners, texts = [], []
    for device in range(devices):
        for _ in range(1 + rng.geometric(0.12)):
            word = int(rng.choice(words, p=base))
            line = [word]
            for _ in range(rng.geometric(0.12)):
                own = rng.random() < 0.6
                word = int(follow[word, rng.geometric(0.3) % 12] if own else rng.choice(words, p=base))
                line.append(word)
            owners.append(device)
            texts.append(" ".join(f"w{each}" for each in line))
    return pl.DataFrame({"device": owners, "text": texts})


@dataclass(frozen=True, eq=False)
class Held:
    """Which device of the file holds which n-gram, each pair once."""

    owners: Ints  # increasing
    grams: Ints  # index into `codes`
    codes: Ints  # increasing, each once
    sizes: Ints  # how many different n-grams each device holds, of unknown words too

    @property
    def devices(self) -> int:
        return len(self.sizes)

    def least_rank(self, drawn: int) -> LeastRank:
        """The law of the best place among so many n-grams that a device draws of its own."""
        if drawn not in self._laws:
            self._laws[drawn] = LeastRank.of(drawn, self.sizes)
        return self._laws[drawn]

    @cached_property
    def _laws(self) -> dict[int, LeastRank]:
        return {}


@dataclass(frozen=True, eq=False)
class LeastRank:
    """The smallest of m places drawn without repetition from 0 .. size-1, for many sizes."""

    place: Ints  # of each size in the table
    offsets: Ints
    table: NDArray[np.float64]  # distribution functions, one after the other, each shifted by 1

    @classmethod
    def of(cls, drawn: int, sizes: Ints) -> LeastRank:
        different = np.unique(sizes[sizes > 0])
        place = np.zeros(int(sizes.max()) + 1, dtype=np.int64)
        place[different] = np.arange(len(different))
        parts = []
        for shift, size in enumerate(different.tolist()):
            most = min(drawn, size)
            at = np.arange(1, size - most + 2)
            above = np.zeros(len(at))  # Pr[smallest >= at]
            left = size - at
            fits = left >= most
            above[fits] = np.exp(
                gammaln(left[fits] + 1) - gammaln(left[fits] - most + 1)
                - gammaln(size + 1) + gammaln(size - most + 1)
            )  # fmt: skip
            parts.append(shift + 1.0 - above)
        lengths = np.array([len(part) for part in parts])
        return cls(place, np.cumsum(lengths) - lengths, np.concatenate(parts))

    def draw(self, sizes: Ints, rng: np.random.Generator) -> Ints:
        at = self.place[sizes]
        found = np.searchsorted(self.table, at + rng.random(len(sizes)), side="right")
        return found - self.offsets[at]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The n-grams of known words, n = 1 .. depth."""

    vocabulary: tuple[str, ...]  # the most widespread words, first the most widespread
    devices: int
    held: dict[int, Held] = field(repr=False)

    @classmethod
    def of(cls, rows: pl.DataFrame, words: int, depth: int) -> Corpus:
        rows = rows.with_columns(device=pl.col("device").rank("dense").cast(pl.Int64) - 1)
        spread = rows.group_by("word").agg(pl.col("device").n_unique().alias("devices"))
        spread = spread.sort(["devices", "word"], descending=[True, False]).with_row_index("code")
        code = (
            rows.join(spread, on="word", how="left", maintain_order="left")["code"]
            .to_numpy().astype(np.int64)
        )  # fmt: skip
        device, message = rows["device"].to_numpy(), rows["message"].to_numpy()
        known = spread["word"].head(words).to_list()
        held = {
            n: _held(device, message, code, n, len(known), len(spread)) for n in range(1, depth + 1)
        }
        return cls(tuple(known), int(device.max()) + 1, held)

    def resampled(self, devices: int, rng: np.random.Generator) -> Ints:
        """Devices of the file, drawn with repetition."""
        return rng.integers(0, self.devices, devices)

    def label(self, code: int, n: int) -> str:
        words = len(self.vocabulary)
        return " ".join(self.vocabulary[code // words**i % words] for i in range(n - 1, -1, -1))


def _held(device: Ints, message: Ints, code: Ints, n: int, known: int, words: int) -> Held:
    length = len(code) - n + 1
    inside = message[:length] == message[n - 1 :]
    whole = np.zeros(length, dtype=np.int64)  # among all words: only to tell n-grams apart
    gram = np.zeros(length, dtype=np.int64)
    familiar = np.ones(length, dtype=np.bool_)
    for i in range(n):
        part = code[i : length + i]
        whole = whole * words + part
        gram = gram * known + part
        familiar &= part < known
    pairs = pl.DataFrame(
        {"d": device[:length], "w": whole, "g": gram, "k": familiar, "i": inside}
    ).filter("i").unique(["d", "w"]).sort("d", "g")  # fmt: skip
    sizes = np.bincount(pairs["d"].to_numpy(), minlength=int(device.max()) + 1)
    pairs = pairs.filter("k")
    codes, grams = np.unique(pairs["g"].to_numpy(), return_inverse=True)
    return Held(pairs["d"].to_numpy(), grams.astype(np.int64), codes, sizes)


def report(
    held: Held,
    candidates: Ints,
    answering: Ints,
    rng: np.random.Generator,
    *,
    drawn: int | None = None,
) -> Ints:
    """How many of the devices `answering` (file devices, with repetition) report each candidate.

    Without `drawn` a device reports any one of the candidates that it holds. With it, it draws so
    many of its different n-grams, and of these reports the candidate that comes first in
    `candidates`.
    """
    place = np.full(len(held.codes), -1, dtype=np.int64)
    at = np.searchsorted(held.codes, candidates)
    at[at == len(held.codes)] = 0
    there = held.codes[at] == candidates
    place[at[there]] = np.flatnonzero(there)
    cell = place[held.grams]
    matching = cell >= 0
    owners, cell = held.owners[matching], cell[matching]
    count = np.bincount(owners, minlength=held.devices)
    start = np.cumsum(count) - count
    some = answering[count[answering] > 0]
    if drawn is None:
        step = (rng.random(len(some)) * count[some]).astype(np.int64)
    else:
        size = len(candidates)
        cell = np.sort(owners * size + cell) % size
        step = held.least_rank(drawn).draw(held.sizes[some], rng)
        within = step < count[some]
        some, step = some[within], step[within]
    return np.bincount(cell[start[some] + step], minlength=len(candidates))


