"""`python -m chorister.cli`, the same as the command `chorister`."""

from chorister.cli import app

if __name__ == "__main__":
    app()
