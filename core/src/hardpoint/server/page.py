"""The web page: one HTML file, one style sheet, one script, the same for both interfaces."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Response

PATHS = ("/", "/page.css", "/page.js")
"""For which no key is asked: the files say nothing of the server, and the page asks for the key that its requests bear."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing from elsewhere, no code in the markup, no page around this one; and a script that sets markup from text fails."""

_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def router(interface: Literal["users", "operators"]) -> APIRouter:
    """Return the routes of the page: with a chat for users, with sleep and wake for operators."""
    routes = APIRouter(include_in_schema=False)
    here = Path(__file__).parent
    html, style, script = (here.joinpath(f"page.{suffix}").read_text("utf-8") for suffix in ("html", "css", "js"))
    html = html.replace('data-interface="users"', f'data-interface="{interface}"')

    @routes.get("/")
    async def page() -> Response:
        return Response(html, media_type="text/html", headers=_HEADERS)

    @routes.get("/page.css")
    async def style_sheet() -> Response:
        return Response(style, media_type="text/css", headers=_HEADERS)

    @routes.get("/page.js")
    async def code() -> Response:
        return Response(script, media_type="text/javascript", headers=_HEADERS)

    return routes
