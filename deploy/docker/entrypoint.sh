#!/bin/sh
# The entry point of the image: `node` runs a node, everything else is a command of quiver.
# Settings are environment variables (QUIVER_NODE__JOIN, …). What follows is found out if nobody has set it:
# - the id of the node: the pod name-0 of a StatefulSet is node 1;
# - its certificate: node.pem in /etc/quiver, or node-1.pem in a directory with those of all nodes.
set -eu

if [ "${1:-}" != node ]; then
    exec quiver "$@"
fi
shift

if [ -z "${QUIVER_NODE__ID:-}" ]; then
    ordinal=${HOSTNAME##*-}
    case "$ordinal" in
        '' | *[!0-9]*)
            echo "error: the node has no id: set QUIVER_NODE__ID, a number from 1 that is unique in the cluster" >&2
            exit 2
            ;;
    esac
    export QUIVER_NODE__ID=$((ordinal + 1))
fi

if [ -z "${QUIVER_SECURITY__DIRECTORY:-}" ] && [ -z "${QUIVER_TLS__CERTIFICATE_FILE:-}" ]; then
    if [ -e /etc/quiver/node.pem ]; then
        export QUIVER_SECURITY__DIRECTORY=/etc/quiver
    elif [ -e "/etc/quiver/node-$QUIVER_NODE__ID.pem" ]; then
        export QUIVER_TLS__IS_ENABLED=true
        export QUIVER_TLS__CA_FILE=/etc/quiver/ca.pem
        export QUIVER_TLS__CERTIFICATE_FILE="/etc/quiver/node-$QUIVER_NODE__ID.pem"
        export QUIVER_TLS__KEY_FILE="/etc/quiver/node-$QUIVER_NODE__ID.key"
        export QUIVER_SECURITY__ADMIN_FILE=/etc/quiver/admin.hash
    fi
fi

# exec: the node gets the signals, and its exit code is the container's.
exec quiver node "$@"
