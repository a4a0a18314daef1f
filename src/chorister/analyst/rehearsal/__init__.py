"""A simulated fleet, to try a study before asking real people.

`simulation` draws what the aggregators would release, for any number of devices; `real_devices`
runs a small fleet of real devices and servers in this process. Both need a `population`:
`device_tables` reads it, `queries` runs a recipe's query on it, `columns` holds the rows that come
out.
"""

from chorister.analyst.rehearsal.simulation import Rehearsal, rehearse

__all__ = ["Rehearsal", "rehearse"]
