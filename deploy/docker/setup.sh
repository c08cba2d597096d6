#!/bin/sh
# Make the user and the token by which Prometheus reads metrics, once: setup.sh TOKEN_FILE
# The cluster and its administrator are named by QUIVER_URL, QUIVER_CA_FILE and QUIVER_TOKEN_FILE.
set -eu
token=$1
if [ -s "$token" ]; then
    echo "$token exists already"
    exit 0
fi
quiver user list --json | grep -q '"prometheus"' || quiver user create prometheus
quiver acl grant prometheus read cluster
quiver token create prometheus --out "$token"
