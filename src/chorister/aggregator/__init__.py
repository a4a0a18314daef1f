"""The two aggregators: sealed reports in, one noisy sum out, and nothing else."""

from __future__ import annotations
