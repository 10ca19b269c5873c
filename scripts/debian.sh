#!/usr/bin/env bash
# Makes Debian packages of the commit HEAD in build/debian/, and checks them: lintian finds nothing,
# a C program compiles and runs with what the packages have, and Python imports the module.
#
# The packages are for Debian 13 and later: the command line needs python3-typer 0.12, which Debian
# 12 does not have. They are built on Debian 12 too, and everything but the command line runs there.
# Needs scripts/setup.sh; as root it installs what else the build needs. The tests are left out (scripts/test.sh has them).
#
# Usage: scripts/debian.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1-} != -h && ${1-} != --help ]] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0; }
root=$PWD
version=$(git show HEAD:pyproject.toml | sed -n 's/^version = "\(.*\)"/\1/p')
work=$root/build/debian
source=$work/gradwire-$version

packages=(build-essential cmake debhelper dh-python dpkg-dev libbenchmark-dev libhwy-dev libxxhash-dev lintian
  mpi-default-dev pkgconf python3-dev python3-numpy)
scripts/install_packages.sh "${packages[@]}"
rm -rf "$work"
mkdir -p "$source"
git archive HEAD | tar -x -C "$source"
nanobind=$(.venv/bin/python -c 'import nanobind; print(nanobind.__path__[0])')
mkdir -p "$source/third_party/nanobind"
cp -r "$nanobind"/{cmake,ext,include,src} "$nanobind"-*.dist-info/licenses/LICENSE \
  "$source/third_party/nanobind/"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
tar -C "$work" -c --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
  "gradwire-$version" | gzip -n9 >"$work/gradwire_$version.orig.tar.gz"
cp -r "$source/packaging/debian" "$source/debian"

cd "$source"
DEB_BUILD_OPTIONS="nocheck parallel=$(nproc)" DEB_BUILD_PROFILES=nocheck dpkg-buildpackage -us -uc
cd "$work"
# The packages close no bug of Debian.
lintian --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs --info gradwire_*.changes

mkdir installed
for package in *.deb; do dpkg-deb -x "$package" installed; done
prefix=$work/installed/usr
libraries=$(dirname "$(find "$prefix" -name libgradwire.so)")
cc -std=c99 "$root/examples/c/average.c" -I "$prefix/include" -L "$libraries" -lgradwire -lm \
  -o average
LD_LIBRARY_PATH=$libraries ./average
PYTHONPATH=$prefix/lib/python3/dist-packages /usr/bin/python3 -c \
  'import gradwire, numpy; x = numpy.ones(99, "f4"); assert (gradwire.decode(gradwire.encode(x, "bf16")) == x).all()'
ls -l ./*.deb
