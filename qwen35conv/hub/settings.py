"""What the environment says of the Hub: its address, the token, and the way to it."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers

from qwen35conv.errors import Qwen35ConvError, SourceError
from qwen35conv.facts.header import shown
from qwen35conv.version import __version__

_WAY = "check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE"


def endpoint() -> str:
    """The Hub's address, for people: a name and password in it are left out."""
    scheme, separator, rest = constants.ENDPOINT.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def request_headers() -> dict[str, str]:
    """What goes with every request to the Hub, the token included. Raises SourceError where it can't be sent."""
    headers = build_hf_headers(library_name="qwen35conv", library_version=__version__)
    if not headers.get("authorization", "").isascii():
        raise SourceError(
            "HF_TOKEN, or the token of `hf auth login`, is none: it holds signs that no token has",
            hint="copy it again from the Hub's settings",
        )
    return headers


def check_settings(make: type[Qwen35ConvError] = SourceError) -> None:
    """Raises an error that `make` makes where nothing could be asked with the settings, whoever answers."""
    try:
        parts = urlsplit(constants.ENDPOINT)
        httpx2.URL(constants.ENDPOINT)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx2.InvalidURL):
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise make(
            f"HF_ENDPOINT is no address of a Hub: {shown(endpoint())!r}",
            hint="unset it, or give one such as https://huggingface.co",
        )
    if constants.HF_HUB_DOWNLOAD_TIMEOUT < 0:
        raise make("HF_HUB_DOWNLOAD_TIMEOUT is below 0", hint="unset it, or give a number of seconds")
    try:
        request_headers()
    except SourceError as error:
        raise make(str(error), hint=error.hint) from error
    try:
        get_session()
    except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
        told = error.strerror or error if isinstance(error, OSError) else error
        raise make(f"the network's settings can't be used: {shown(str(told))}", hint=_WAY) from error
