#!/usr/bin/env bash
# Builds the documentation site into build/site/html. A warning, such as a link that leads nowhere,
# is an error. Its search must find what newcomers look for (scripts/check_search.py), and its
# reference must show all public names (scripts/check_reference.py). The tools get an environment of
# their own, build/site/venv, with the versions of constraints-docs.txt; it is kept while they stay
# the same.
#
# Needs scripts/setup.sh before.
#
# Usage: scripts/docs.sh [--serve]
#   --serve   then serve the site at http://127.0.0.1:8000 until it is interrupted
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

serve=no
case ${1:-} in
  "") ;;
  --serve) serve=yes ;;
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
  *) echo "docs.sh: unknown option $1 (see --help)" >&2 && exit 2 ;;
esac

venv=$PWD/.venv
site=build/site
if [[ ! -f python/gradwire/_core.pyi ]] || ! "$venv/bin/python" -c 'import gradwire'; then
  echo "docs.sh: gradwire is not built here; run scripts/setup.sh first" >&2
  exit 1
fi

mkdir -p "$site"
if ! cmp -s constraints-docs.txt "$site/installed.txt"; then
  rm -rf "$site/venv" "$site/installed.txt"
  "$venv/bin/python" -m venv --without-pip "$site/venv"
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input --python "$site/venv" \
    install -q --no-deps -r constraints-docs.txt
  cp constraints-docs.txt "$site/installed.txt"
fi

"$venv/bin/python" scripts/make_site.py
# Headers are no pages that it watches, so nothing of an earlier build is kept.
PYTHONPATH=scripts "$site/venv/bin/zensical" build --clean --strict --config-file mkdocs.yml
"$venv/bin/python" scripts/check_search.py "$site/html/search.json"
"$venv/bin/python" scripts/check_reference.py "$site/html"
echo "docs.sh: the site is in $site/html"
if [[ $serve == yes ]]; then
  exec "$venv/bin/python" -m http.server --bind 127.0.0.1 --directory "$site/html" 8000
fi
