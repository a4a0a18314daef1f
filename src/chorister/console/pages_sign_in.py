"""Signing in and out."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from chorister.console.forms import read_form
from chorister.console.web import Visit, Web

__all__ = ["show_sign_in", "sign_in", "sign_out"]

_PAUSE: Final = 0.3  # seconds that a wrong token costs


async def show_sign_in(web: Web, request: Request) -> Response:
    """The form."""
    if web.session_of(request) is not None:
        return RedirectResponse("/", status_code=303)
    return web.page(request, "sign_in.html", None, wrong=False)


async def sign_in(web: Web, request: Request) -> Response:
    """A token in, a new session out; an older one of this browser ends."""
    form = await read_form(request)
    session = web.sessions.sign_in(form.get("token"))
    if session is None:
        await asyncio.sleep(_PAUSE)
        return web.page(request, "sign_in.html", None, status=403, wrong=True)
    before = web.session_of(request)
    if before is not None:
        web.sessions.sign_out(before)
    return web.signed_in(RedirectResponse("/", status_code=303), session)


def sign_out(visit: Visit) -> Response:
    """End the session."""
    visit.web.sessions.sign_out(visit.session)
    return visit.web.signed_out(visit.go_to("/sign-in"))
