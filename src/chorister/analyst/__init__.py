"""The analyst's side: ask, estimate, adapt, rehearse.

`Study` is the one interface to a live fleet (`live`) and to a rehearsed one (`rehearsal`); a
`Question` has a cost; a `Result` explains itself; `algorithms` are functions over a study.
"""
