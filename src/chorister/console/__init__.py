"""Web pages for one team of analysts, on top of `chorister.analyst`.

`app` serves the routes; `access` decides who may call them; `web` renders pages. `workspace` holds
what they show: `connections` to fleets, who may see which study, and what runs in the `background`.
`pages_*` are the pages, `forms` and `algorithms` what can be entered, `charts` what is drawn.
"""
