"""Exit with 0 if the node of this container answers on /livez, or on the path that is given; else with 1 and why.

It asks this machine only, so it does not verify the certificate, which names another host.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 2.5


def main() -> int:
    """Ask the node."""
    path = sys.argv[1] if len(sys.argv) > 1 else "/livez"
    port = os.environ.get("QUIVER_NODE__HTTP", "127.0.0.1:8002").rpartition(":")[2]
    host = os.environ.get("QUIVER_NODE__HTTP", "").rpartition(":")[0].strip("[]")
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    problems = []
    for scheme in ("https", "http"):
        try:
            with urllib.request.urlopen(f"{scheme}://{host}:{port}{path}", timeout=TIMEOUT_S, context=context):
                return 0
        except urllib.error.HTTPError as error:  # it answers, and says why it is not well
            problems = [error.read(1000).decode(errors="replace")]
            break
        except OSError as error:
            problems.append(f"{scheme}: {error}")
    print("; ".join(problems), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
