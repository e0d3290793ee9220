"""Choose which requests to a cluster go through the proxy of the environment.

A proxy reads a request over http, with the token in it. So only requests over https to other
machines may take one.
"""

import ipaddress
import os
import platform
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def proxies_for(url: str) -> dict[str, str]:
    """Return the proxy for a request, by its scheme.

    Return {} for a request that goes to its host directly. `https_proxy` and `no_proxy` of the
    environment count. An address of this machine never has a proxy.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = getproxies().get("https", "")
    if parts.scheme != "https" or not proxy or is_this_machine(host) or proxy_bypass(host):
        return {}
    return {"https": proxy}


def without_proxy_here() -> dict[str, str]:
    """Return variables that keep requests to the loopback interface away from the proxy.

    Return {} where there is no proxy. They are for Ray's own processes, and for what users run in
    them: libraries of HTTP heed the variables.
    """
    if not {name for name in getproxies() if name != "no"}:
        return {}
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in known.split(",") if name.strip()]
    names += [name for name in LOOPBACK if name not in names]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))


def is_this_machine(host: str) -> bool:
    """Say whether a host is this machine.

    It is, by its name, or by an address of one of its network interfaces. No name server is asked:
    behind a proxy it may know no name, and the answer may take seconds.
    """
    name = host.lower().rstrip(".")
    if name in ("localhost", platform.node().lower()) or name.endswith(".localhost"):
        return True
    try:
        places = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        # The host is a name, not an address.
        return False
    for family, _, _, _, place in places:
        address = ipaddress.ip_address(str(place[0]).partition("%")[0])
        if address.is_loopback or address.is_unspecified:
            return True
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # This fails unless the address is this machine's.
                probe.bind((place[0], 0))
        except OSError:
            continue
        return True
    return False
