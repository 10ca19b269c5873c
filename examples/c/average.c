/* An engine moves the messages of an exchange. This one keeps all ranks in one process; over a
 * network, each rank has one exchange and sends its messages to the others.
 *
 *   cc -std=c99 average.c $(pkg-config --cflags --libs gradwire) -o average && ./average
 */
#include <stdio.h>
#include <stdlib.h>

#include <gradwire/gradwire.h>

enum { kRanks = 4, kRows = 256, kColumns = 100, kValues = kRows * kColumns };

static float buckets[kRanks][kValues];
static gw_exchange* exchanges[kRanks];

static void require(gw_status status) {
  if (status == GW_OK) return;
  fprintf(stderr, "gradwire: %s: %s\n", gw_strerror(status), gw_last_error_message());
  exit(1);
}

/* Sends the messages of this rank and returns their number. */
static int send_all(uint32_t rank) {
  int sent = 0;
  for (;;) {
    gw_message message;
    size_t count = 0;
    require(gw_exchange_take_outgoing(exchanges[rank], &message, 1, &count));
    if (count == 0) return sent;
    require(gw_exchange_receive(exchanges[message.peer], rank, message.bytes, message.size));
    ++sent;
  }
}

int main(void) {
  const uint64_t dims[] = {kRows, kColumns};
  const gw_tensor tensor = {.name = "weight", .dims = dims, .dim_count = 2};
  gw_layout_options options;
  gw_layout_options_init(&options);
  options.codec = "int8";
  gw_layout* layout = NULL;
  require(gw_layout_create(&tensor, 1, kRanks, &options, &layout));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    require(gw_exchange_create(layout, rank, NULL, &exchanges[rank]));
    /* Before the first step, check that all ranks have the same setup. */
    require(gw_exchange_check_peer(exchanges[0], rank, gw_exchange_description(exchanges[rank])));
  }
  gw_layout_free(layout);

  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < kValues; ++i) buckets[rank][i] = (float)(i + 1) * (float)(rank + 1);
    require(gw_exchange_start(exchanges[rank], buckets[rank], kValues, 0));
  }
  int sent = 1;
  while (sent > 0) {
    sent = 0;
    for (uint32_t rank = 0; rank < kRanks; ++rank) sent += send_all(rank);
  }

  gw_exchange_stats stats;
  require(gw_exchange_get_stats(exchanges[0], &stats));
  printf("the mean of 1000, 2000, 3000 and 4000 is about %.0f on rank 3; ", buckets[3][999]);
  printf("rank 0 sent %d bytes instead of %d\n",
         (int)(stats.push_bytes_sent + stats.pull_bytes_sent),
         (int)(2 * (kRanks - 1) * sizeof(float) * kValues / kRanks));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    if (!gw_exchange_done(exchanges[rank])) return 1;
    gw_exchange_free(exchanges[rank]);
  }
  return 0;
}
