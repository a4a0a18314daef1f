"""The two aggregators: sealed reports in, one noisy sum out, and nothing else.

`service` puts an aggregator together from its settings, `server` runs it as a process. `http`
answers requests, `jobs` does the work behind them, `storage` holds every SQL statement,
`operations` is what operators see, and `cosigning` is an aggregator's part in the public log.
"""

from __future__ import annotations
