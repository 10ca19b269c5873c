#!/usr/bin/env bash
# Builds the fuzzers and their seeds into $OUT. OSS-Fuzz sets CC, CXX, their flags,
# LIB_FUZZING_ENGINE, SRC, WORK and OUT. `scripts/test.sh oss_fuzz` does the same here.
set -euo pipefail

cmake -S "$SRC/gradwire" -B "$WORK/gradwire" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DGRADWIRE_FUZZ=ON -DGRADWIRE_FUZZ_ENGINE="$LIB_FUZZING_ENGINE" -DGRADWIRE_HARDENED=OFF \
  -DGRADWIRE_INSTALL=OFF -DGRADWIRE_MPI=OFF -DGRADWIRE_PYTHON=OFF -DGRADWIRE_TESTS=OFF
cmake --build "$WORK/gradwire" --target fuzz_corpus fuzzers

for fuzzer in "$WORK"/gradwire/fuzz/fuzz_*; do
  name=$(basename "$fuzzer")
  cp "$fuzzer" "$OUT/"
  (cd "$WORK/gradwire/fuzz/corpus/${name#fuzz_}" && zip -q -r - .) >"$OUT/${name}_seed_corpus.zip"
done
