"""The privacy mathematics: randomizers, amplification by aggregation, composition, cost."""

from __future__ import annotations

from chorister.privacy.randomizers import Interval, LocalModel, Mechanism, OneHotRandomizer

__all__ = ["Interval", "LocalModel", "Mechanism", "OneHotRandomizer"]
