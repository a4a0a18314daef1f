"""`python -m chorister.cli`: the same as the command `chorister`."""

from chorister.cli import app

app()
