#!/bin/sh
# Installs what the image's last stage needs: Python, and the libraries that
# vLLM's and our native code are linked with. No compiler.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends ca-certificates libgomp1 libnuma1 python3
apt-get clean
rm -rf /var/lib/apt/lists/*
