#!/usr/bin/env bash
# Builds the image of Containerfile in build/container/, and trains in it on two ranks. buildah does
# so without a daemon. Where the registry of the base image cannot be reached, debootstrap makes the
# base, of this machine's release of Debian. While the image is built, it has this machine's
# certificates and settings of pip.
#
# As root on Debian it installs buildah and debootstrap.
#
# Usage: scripts/container.sh [FOLDER]
#   FOLDER  has the sources, by default the checkout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
sources=$(realpath "${1:-.}")
work=$PWD/build/container

scripts/install_packages.sh buildah debootstrap
mkdir -p "$work"
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }
export BUILDAH_ISOLATION=chroot
trap 'buildah rm --all >/dev/null' EXIT

# make_base NAME
make_base() {
  local release container
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  rm -rf "$work/base"
  debootstrap --variant=minbase "$release" "$work/base" http://deb.debian.org/debian \
    >"$work/debootstrap.log"
  container=$(buildah from scratch)
  buildah copy -q "$container" "$work/base" / >/dev/null
  buildah commit -q --rm "$container" "$1"
}

base=$(sed -n 's/^ARG BASE=//p' Containerfile)
if ! buildah pull -q "$base" 2>/dev/null; then
  echo "note: the registry of $base cannot be reached; debootstrap makes the base"
  base=localhost/gradwire-base
  buildah inspect --type image "$base" >/dev/null 2>&1 || make_base "$base"
fi

# The certificates of this machine are among those that the build installs.
read_setting() { python3 -m pip config list | sed -n "s/^[^.]*\\.$1='\\(.*\\)'$/\\1/p" | head -n 1; }
links=$(read_setting find-links)
index=$(read_setting index-url)
{
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n'
  printf '%s\n' ${links:+"find-links = $links"} ${index:+"index-url = $index"}
} >"$work/pip.conf"
volumes=(--volume "$work/pip.conf:/etc/pip.conf:ro")
for folder in /usr/local/share/ca-certificates $links; do
  [[ ! -d $folder ]] || volumes+=(--volume "$folder:$folder:ro")
done

buildah build -q --pull-never --build-arg BASE="$base" "${volumes[@]}" -t localhost/gradwire \
  -f "$sources/Containerfile" "$sources"
container=$(buildah from --pull-never localhost/gradwire)
buildah copy -q "$container" examples/adamw.py /home/gradwire/ >/dev/null
buildah run "$container" -- python -c 'import gradwire.torch'
buildah run --env GLOO_SOCKET_IFNAME=lo "$container" -- torchrun --standalone \
  --local-addr 127.0.0.1 --nproc-per-node 2 adamw.py
buildah images localhost/gradwire
