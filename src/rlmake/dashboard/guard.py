"""Who may ask: this page in this browser, and programs on this machine.

A page of another site can make a browser send requests here. It can't choose their `Host`, so a name that was rebound
to this address is refused, and it can't leave out `Origin` where it matters, so POST from elsewhere is refused.
"""

import ipaddress
from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}
LOCAL = ("localhost", "127.0.0.1", "::1")


def host_name(value: str) -> str:
    """The name in a Host header or an origin's authority, without port and brackets."""
    if value.startswith("["):
        return value[1 : value.find("]")].lower()
    return value.rpartition(":")[0].lower() if value.count(":") == 1 else value.lower()


class Guard:
    """Refuses foreign hosts and origins, and puts the headers on every answer.

    `host` is what the server listens on. On a wildcard or another address than loopback, that address and names the
    user gives in `allowed` are let in too; any literal address is, since a name can't be rebound to it.
    """

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", allowed: Iterable[str] = ()):
        self.app = app
        self.names = {*LOCAL, host.lower(), *(name.lower() for name in allowed)}
        self.any_address = host not in LOCAL

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}

        async def decorated(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        if fault := self._fault(scope["method"], headers):
            await PlainTextResponse(fault, 403)(scope, receive, decorated)
        else:
            await self.app(scope, receive, decorated)

    def _fault(self, method: str, headers: dict[str, str]) -> str | None:
        if not self._known(host_name(headers.get("host", ""))):
            return "refused: this host name is not the dashboard's (--allow-host NAME lets one in)"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
            return "refused: a request from another site"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return "refused: a request from another site"
        if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return "refused: send application/json"
        return None

    def _known(self, name: str) -> bool:
        if name in self.names:
            return True
        if not self.any_address:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
