#!/usr/bin/env bash
# Makes FOLDER a Python environment that has the packages of .venv beside its own, so that these
# keep their versions, and installs REQUIREMENTS there, and nothing that they ask for beyond them.
#
# Usage: scripts/overlay_venv.sh [--own-gradwire] FOLDER [REQUIREMENTS]
#   --own-gradwire  not the gradwire of the checkout, which .venv has: FOLDER will have one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

own=no
if [[ ${1-} == --own-gradwire ]]; then
  own=yes
  shift
fi
folder=$(realpath -m "${1:?FOLDER is missing}")
venv=$PWD/.venv
[[ -x $folder/bin/python ]] || "$venv/bin/python" -m venv --without-pip "$folder"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# .venv finds the checkout by a file of its site directory, which a mere path does not read.
line="import site; site.addsitedir('$packages')"
[[ $own == no ]] || line=$packages
echo "$line" >"${packages/#$venv/$folder}/packages-of-the-repository.pth"
[[ -z ${2-} ]] || "$venv/bin/python" -m pip --disable-pip-version-check --no-input \
  --python "$folder" install -q --no-deps -r "$2"
