#!/usr/bin/env bash
# Installs Chromium, in which tests/serving/test_page.py opens the server's page. Where it cannot be installed, that test
# is skipped and says so.
set -euo pipefail

command -v chromium >/dev/null && exit
if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "note: no chromium here, and no apt-get to install it with; tests/serving/test_page.py will be skipped"
    exit
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null && apt-get install -qq -y --no-install-recommends chromium >/dev/null ||
    echo "note: chromium could not be installed; tests/serving/test_page.py will be skipped"
