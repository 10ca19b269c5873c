#!/usr/bin/env bash
# Makes FOLDER/python, Debian's Python 3.11 for 64-bit Arm, which qemu-user runs on this machine.
# Installs no package: Debian's are unpacked in FOLDER/root. QEMU_CPU chooses the CPU.
#
# Usage: scripts/arm_python.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?FOLDER is missing}")
[[ -x $folder/python ]] && exit
mkdir -p "$folder/lists/partial" "$folder/debs" "$folder/root"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] http://deb.debian.org/debian bookworm main" >"$folder/sources.list"
apt=(apt-get -qq -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oAPT::Sandbox::User=root
  -oDir::Etc::sourcelist="$folder/sources.list" -oDir::Etc::sourceparts=-
  -oDir::State::Lists="$folder/lists" -oDir::State::status=/dev/null)
"${apt[@]}" update
(cd "$folder/debs" && "${apt[@]}" download python3.11-minimal libpython3.11-minimal \
  libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 \
  liblzma5 libsqlite3-0 libuuid1 libcrypt1)
for package in "$folder"/debs/*.deb; do
  dpkg -x "$package" "$folder/root"
done
cat >"$folder/python.new" <<SCRIPT
#!/bin/sh
exec qemu-aarch64 -L "$folder/root" "$folder/root/usr/bin/python3.11" "\$@"
SCRIPT
chmod +x "$folder/python.new"
mv "$folder/python.new" "$folder/python"
