#!/usr/bin/env bash
# Makes FOLDER/python, the Python VERSION of Debian's release SUITE for MACHINE (aarch64 or x86_64),
# which qemu-user runs on this machine. Installs no package: Debian's are unpacked in FOLDER/root.
# QEMU_CPU chooses the CPU.
#
# Usage: scripts/debian_python.sh FOLDER MACHINE SUITE VERSION
set -euo pipefail
folder=$(realpath -m "${1:?FOLDER is missing}")
machine=${2:?MACHINE is missing}
suite=${3:?SUITE is missing}
python=python${4:?VERSION is missing}
[[ -x $folder/python ]] && exit
declare -A architectures=([aarch64]=arm64 [x86_64]=amd64)
architecture=${architectures[$machine]}
mkdir -p "$folder/lists/partial" "$folder/debs" "$folder/root"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] http://deb.debian.org/debian $suite main" >"$folder/sources.list"
apt=(apt-get -qq -oAPT::Architecture="$architecture" -oAPT::Architectures="$architecture"
  -oAPT::Sandbox::User=root
  -oDir::Etc::sourcelist="$folder/sources.list" -oDir::Etc::sourceparts=-
  -oDir::State::Lists="$folder/lists" -oDir::State::status=/dev/null)
"${apt[@]}" update
ssl=libssl3
[[ $suite == bookworm ]] || ssl=libssl3t64
(cd "$folder/debs" && "${apt[@]}" download "$python-minimal" "lib$python-minimal" \
  "lib$python-stdlib" libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 "$ssl" libbz2-1.0 \
  liblzma5 libsqlite3-0 libuuid1 libcrypt1)
for package in "$folder"/debs/*.deb; do
  dpkg -x "$package" "$folder/root"
done
# From Debian 13 on, packages have files in /usr alone.
for name in lib lib64; do
  [[ -e $folder/root/$name ]] || ln -s "usr/$name" "$folder/root/$name"
done
cat >"$folder/python.new" <<SCRIPT
#!/bin/sh
exec qemu-$machine -L "$folder/root" "$folder/root/usr/bin/$python" "\$@"
SCRIPT
chmod +x "$folder/python.new"
mv "$folder/python.new" "$folder/python"
