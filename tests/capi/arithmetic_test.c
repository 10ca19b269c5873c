/* The settings of the caller's arithmetic change no byte and no value. */
#include <fenv.h>
#include <float.h>
#include <stdlib.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "capi/check.h"
#include "capi/inputs.h"

enum { kN = 2003, kSteps = 3 };

typedef struct {
  unsigned char* frame; /* of the last step */
  uint64_t size;
  float decoded[kN]; /* the sum of all steps */
  float residual[kN];
} made;

static float x[kN];

static void make(const char* name, made* result) {
  gw_codec* codec = NULL;
  gw_compressor* compressor = NULL;
  CHECK_OK(gw_codec_parse(name, &codec));
  CHECK_OK(gw_compressor_create(codec, kN, 5, 6, &compressor));
  const uint64_t room = gw_compressor_max_encoded_size(compressor);
  result->frame = malloc(room);
  memset(result->decoded, 0, sizeof(result->decoded));
  memset(result->residual, 0, sizeof(result->residual));
  for (uint64_t step = 0; step < kSteps; ++step) {
    CHECK_OK(gw_compressor_encode(compressor, x, kN, GW_F32, step, result->frame, room,
                                  &result->size, NULL));
    CHECK_OK(gw_decode(result->frame, result->size, result->decoded, kN, GW_ADD, NULL));
  }
  if (gw_compressor_residual_numel(compressor) == kN) {
    CHECK_OK(gw_compressor_get_residual(compressor, result->residual, kN));
  }
  gw_compressor_free(compressor);
  gw_codec_free(codec);
}

static void check_same(const char* name, const made* expected) {
  made found;
  make(name, &found);
  CHECK(found.size == expected->size);
  CHECK(memcmp(found.frame, expected->frame, found.size) == 0);
  CHECK(memcmp(found.decoded, expected->decoded, sizeof(found.decoded)) == 0);
  CHECK(memcmp(found.residual, expected->residual, sizeof(found.residual)) == 0);
  free(found.frame);
}

static void check_codec(const char* name) {
  made expected;
  make(name, &expected);
#if defined(__SSE__)
  const unsigned before = _mm_getcsr();
  const unsigned modes[] = {0x8000, 0x0040, 0x8040}; /* flush to zero, denormals are zeros */
  for (int i = 0; i < 3; ++i) {
    _mm_setcsr(before | modes[i]);
    check_same(name, &expected);
    CHECK((_mm_getcsr() & 0x8040) == modes[i]);
    _mm_setcsr(before);
  }
#endif
  const int roundings[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  for (int i = 0; i < 3; ++i) {
    fesetround(roundings[i]);
    check_same(name, &expected);
    CHECK(fegetround() == roundings[i]);
    fesetround(FE_TONEAREST);
  }
  free(expected.frame);
}

int main(void) {
  const float sizes[] = {1e-37f, 1e-34f, 1.0f}; /* gradients below 1e-2 are denormal with 1e-37 */
  for (int size = 0; size < 3; ++size) {
    fill_gradient(x, kN, 3);
    for (int i = 0; i < kN; ++i) x[i] *= sizes[size];
    for (uint64_t i = 0; i < gw_codec_count(); ++i) check_codec(gw_codec_info_at(i)->name);
    check_codec("3lc:s=1.1");
    check_codec("qsgd:norm=l2");
  }
  return check_result();
}
