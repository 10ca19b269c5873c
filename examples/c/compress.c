/* Compresses gradients of some steps with error feedback and decodes them.
 *
 *   cc -std=c99 compress.c $(pkg-config --cflags --libs gradwire) -o compress && ./compress
 */
#include <stdio.h>
#include <stdlib.h>

#include <gradwire/gradwire.h>

enum { kValues = 100000, kSteps = 50 };

/* Ends the program with gradwire's message if a call failed. */
static void require(gw_status status) {
  if (status == GW_OK) return;
  fprintf(stderr, "gradwire: %s: %s\n", gw_strerror(status), gw_last_error_message());
  exit(1);
}

int main(void) {
  gw_codec* codec = NULL;
  require(gw_codec_parse("3lc:s=1.75,coder=rice", &codec));
  gw_compressor* compressor = NULL;
  require(gw_compressor_create(codec, kValues, 0, 0, &compressor));
  gw_codec_free(codec);

  /* All memory is ours: the gradient, the room for a frame, and the sum that a receiver keeps. */
  float* gradient = malloc(kValues * sizeof(float));
  float* received = calloc(kValues, sizeof(float));
  const uint64_t room = gw_compressor_max_encoded_size(compressor);
  unsigned char* frame = malloc(room);
  if (gradient == NULL || received == NULL || frame == NULL) return 1;

  uint64_t sent = 0;
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kValues; ++i) gradient[i] = (float)(i % 101 - 50) * 1e-4f;
    uint64_t size = 0;
    require(gw_compressor_encode(compressor, gradient, kValues, GW_F32, step, frame, room, &size,
                                 NULL));
    sent += size;
    /* Any receiver can decode a frame alone. */
    require(gw_decode(frame, size, received, kValues, GW_ADD, NULL));
  }

  double owed = 0;
  double sum = 0;
  for (int i = 0; i < kValues; ++i) {
    const double wanted = kSteps * (double)gradient[i];
    owed += (wanted - received[i]) * (wanted - received[i]);
    sum += wanted * wanted;
  }
  printf("gradwire %s: %d steps, %.2f bits a value, ", gw_version(), (int)kSteps,
         8.0 * (double)sent / ((double)kValues * kSteps));
  printf("still owed: %.1f %% of the sum\n", 100.0 * owed / sum);

  gw_compressor_free(compressor);
  free(gradient);
  free(received);
  free(frame);
  return 0;
}
