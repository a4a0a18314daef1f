"""Web pages for one team of analysts, over `chorister.analyst` alone.

`config` and `server` start it; `app` puts it together; `workspace` is what the pages show: the
connections, who may see which study, and what runs in the background. `pages_*` are the pages.
"""
