"""The analyst's side: ask, estimate, adapt, rehearse.

A `Study` asks a `Fleet`: a live one (`live_fleet`) or a simulated one (`rehearsal`). A `Question`
has a cost; a `Result` explains itself; `algorithms` are functions over a study.
"""
