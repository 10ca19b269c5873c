#!/usr/bin/env bash
# Installs those of the Debian PACKAGES that are missing, for which it must be root.
#
# Usage: scripts/install_packages.sh [--list] PACKAGE...
#   --list  only print the missing ones
set -euo pipefail

list=no
if [[ ${1-} == --list ]]; then
  list=yes
  shift
fi
# dpkg-query fails if it does not know a package, which is no error here.
known=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2>/dev/null || true)
installed=" $(sed -n 's/^ii *//p' <<<"$known" | tr '\n' ' ') "
missing=()
for package in "$@"; do
  [[ $installed == *" $package "* ]] || missing+=("$package")
done

if [[ $list == yes ]]; then
  echo "${missing[*]}"
  exit
fi
((${#missing[@]} > 0)) || exit 0
if ((EUID != 0)); then
  echo "system packages are missing and only root can install them. As root:" >&2
  echo "    apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -q -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 -o Acquire::Retries=3)
# Most failed installs have an outdated index. If the update fails, for example because one of
# several mirrors is unreachable, the install may still work.
"${apt[@]}" update || echo "going on with the present package lists"
"${apt[@]}" install -y --no-install-recommends "${missing[@]}"
