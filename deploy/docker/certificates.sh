#!/bin/sh
# Make the certificates and the administrator's token of a cluster, once: certificates.sh DIRECTORY 1@host 2@host …
set -eu
directory=$1
shift
if [ -e "$directory/ca.pem" ]; then
    echo "$directory has certificates already"
    exit 0
fi
exec quiver security init --directory "$directory" "$@"
