/*
 * gradwire in C (C99; may be included from C++ of any standard).
 *
 *   codec       gw_codec_parse, gw_codec_count, gw_codec_info_at
 *   frame       gw_encode, gw_decode, gw_frame_inspect
 *   compressor  gw_compressor_create: a codec with the residual of one stream
 *   exchange    gw_layout_create, gw_exchange_create: collective algorithms without input or output
 *
 * Errors. Functions that can fail return a gw_status; GW_OK is 0. What they were to write to their
 * output arguments is then not written, unless said otherwise. gw_last_error_message() says more.
 * Every function that returns a status gives GW_INVALID_ARGUMENT where a pointer is NULL that may
 * not be, and GW_OUT_OF_MEMORY; further ones are named with it.
 *
 * Handles (gw_codec, ...) are made by a function that ends in create, parse or so, and freed by the
 * function that ends in free, which takes NULL. Functions that only read a handle and can't fail,
 * and those that fill in default options, must not be given NULL. A gw_codec and a gw_layout serve
 * all threads at once; every other handle serves one call at a time. Strings end with NUL; those
 * returned belong to the library and live as long as the handle they came from, or for ever where
 * there is none.
 *
 * Sizes are in bytes where they are called size, otherwise in values. Where there are no values
 * their pointer may be NULL. The memory stays the caller's.
 */
#ifndef GRADWIRE_GRADWIRE_H_
#define GRADWIRE_GRADWIRE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define GW_API __attribute__((visibility("default")))
#else
#define GW_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version ------------------------------------------------------------------------------- */

/* Of this header. */
#define GW_VERSION_MAJOR 0
#define GW_VERSION_MINOR 1
#define GW_VERSION_PATCH 0

/* Of the library that is loaded: "0.1.0". */
GW_API const char* gw_version(void);

/* ---- errors -------------------------------------------------------------------------------- */

/* The numbers are pinned. Below 200: as spec/format.md lists them. */
typedef enum gw_status {
  GW_OK = 0,
  GW_INVALID_ARGUMENT = 1,
  GW_UNKNOWN_CODEC = 2,
  GW_BAD_PARAMETER = 3,
  GW_UNSUPPORTED_DTYPE = 4,
  GW_BUFFER_TOO_SMALL = 5,
  GW_TRUNCATED = 6,
  GW_BAD_MAGIC = 7,
  GW_UNSUPPORTED_VERSION = 8,
  GW_RESERVED_BITS = 9,
  GW_CHECKSUM_MISMATCH = 10,
  GW_CORRUPT_PAYLOAD = 11,
  GW_TRAILING_BYTES = 12,
  GW_LIMIT_EXCEEDED = 13,
  GW_NON_FINITE = 14,
  GW_PEER_MISMATCH = 15,
  GW_UNEXPECTED_MESSAGE = 16,
  GW_LENGTH_MISMATCH = 17,
  GW_PEER_LOST = 18,
  GW_DEVICE_ERROR = 19,
  GW_OUT_OF_MEMORY = 200,
  GW_INTERNAL_ERROR = 201 /* a defect of gradwire */
} gw_status;

/* The name that spec/format.md uses: "ok", "checksum_mismatch"; "unknown_status" for others. */
GW_API const char* gw_strerror(gw_status status);

/* One sentence on the last call of this thread that did not return GW_OK: it names the value that
   was wrong and what would be right. "" before the first. Like errno, a call that succeeds leaves
   it alone. Valid until the thread's next call that fails. */
GW_API const char* gw_last_error_message(void);
/* For libraries on top of this one: what gw_last_error_message gives from now on in this thread, a
   copy, unless status is GW_OK. Returns status. */
GW_API gw_status gw_set_last_error(gw_status status, const char* message);

/* ---- execution ----------------------------------------------------------------------------- */

/* Which SIMD target and how many threads do the work. They never change what comes out. */
typedef struct gw_execution gw_execution;

/* target: one of gw_simd_target's, or NULL or "auto" for the best one. threads: 1 to 256, the
   caller's own among them. GW_INVALID_ARGUMENT names what there is. */
GW_API gw_status gw_execution_create(const char* target, int threads, gw_execution** execution);
GW_API void gw_execution_free(gw_execution* execution);
GW_API const char* gw_execution_target(const gw_execution* execution);
GW_API int gw_execution_threads(const gw_execution* execution);

/* Names of what this CPU can run, best first, "scalar" last; NULL from the end of the list on. */
GW_API const char* gw_simd_target(size_t index);

/* Functions that take an execution take NULL for: the best target, the caller's thread alone. */

/* ---- codecs -------------------------------------------------------------------------------- */

typedef struct gw_parameter_info {
  const char* name;
  const char* default_value;
  const char* values; /* what is accepted: "[1, 2)", "zre|none" */
  const char* help;
} gw_parameter_info;

typedef struct gw_codec_info {
  const char* name;
  const char* summary;
  const char* source;     /* paper and section */
  int error_feedback;     /* whether it keeps a residual by default */
  int lossless;           /* whether nothing is left over, so that ef and residual are no keys */
  int draws;              /* whether it encodes with random numbers, so that gw_draw matters */
  int shares_scales;      /* whether ranks can share its scales and add its symbols undecoded */
  int carries_non_finite; /* whether it sends NaN and Inf as they are where no residual is kept */
  const gw_parameter_info* parameters;
  size_t parameter_count;
} gw_codec_info;

GW_API size_t gw_codec_count(void);
/* NULL from gw_codec_count() on. */
GW_API const gw_codec_info* gw_codec_info_at(size_t index);

/* A codec with its parameters. */
typedef struct gw_codec gw_codec;

/* text: "3lc", "3lc:s=1.75,coder=rice", as everywhere in gradwire. GW_UNKNOWN_CODEC and
   GW_BAD_PARAMETER list what is valid. */
GW_API gw_status gw_codec_parse(const char* text, gw_codec** codec);
GW_API void gw_codec_free(gw_codec* codec);
/* Canonical text: parsing it gives an equal codec. */
GW_API const char* gw_codec_text(const gw_codec* codec);
GW_API const gw_codec_info* gw_codec_get_info(const gw_codec* codec);

/* Bytes that a frame of n values takes at most. GW_LIMIT_EXCEEDED: n > GW_MAX_NUMEL. */
GW_API gw_status gw_max_encoded_size(const gw_codec* codec, uint64_t n, uint64_t* size);

/* ---- frames -------------------------------------------------------------------------------- */

/* No frame holds more values. */
#define GW_MAX_NUMEL (UINT64_C(1) << 40)

/* Types of input values. All decode to float. */
typedef int32_t gw_dtype;
#define GW_F32 0  /* float */
#define GW_BF16 1 /* uint16_t: the upper half of a float */
#define GW_F16 2  /* uint16_t: IEEE binary16 */

/* What stochastic codecs draw their random numbers from: the same three and the same values give
   the same bytes. Deterministic codecs ignore it. */
typedef struct gw_draw {
  uint64_t seed;
  uint64_t stream;
  uint64_t step;
} gw_draw;

/* Encodes x, n values of type dtype aligned as their type, into one frame, without a residual.
   draw: NULL for zeros. frame: capacity bytes, at least gw_max_encoded_size of n. *size: bytes
   used.

   GW_NON_FINITE: x holds NaN or Inf, which this codec can't carry; the message names the element.
   The frame is then a marker that decodes to NaN everywhere, and *size is set: send it or not.
   GW_BUFFER_TOO_SMALL, GW_UNSUPPORTED_DTYPE, GW_LIMIT_EXCEEDED. */
GW_API gw_status gw_encode(const gw_codec* codec, const void* x, uint64_t n, gw_dtype dtype,
                           const gw_draw* draw, void* frame, uint64_t capacity, uint64_t* size,
                           gw_execution* execution);

typedef int32_t gw_decode_mode;
#define GW_STORE 0 /* out[i] = value */
#define GW_ADD 1   /* out[i] += value */

/* Decodes a frame of exactly size bytes into or onto out, n floats. Any bytes are safe.

   GW_LENGTH_MISMATCH: the frame does not hold n values. GW_TRUNCATED, GW_BAD_MAGIC,
   GW_UNSUPPORTED_VERSION, GW_UNKNOWN_CODEC, GW_BAD_PARAMETER, GW_RESERVED_BITS,
   GW_UNSUPPORTED_DTYPE, GW_LIMIT_EXCEEDED, GW_TRAILING_BYTES, GW_CHECKSUM_MISMATCH: out is as it
   was. GW_CORRUPT_PAYLOAD: out holds unspecified values. */
GW_API gw_status gw_decode(const void* frame, uint64_t size, float* out, uint64_t n,
                           gw_decode_mode mode, gw_execution* execution);

typedef struct gw_frame_info {
  uint64_t n;            /* values */
  uint64_t payload_size; /* bytes without the header */
  uint32_t checksum;
  gw_dtype dtype; /* of the values that were encoded */
  int non_finite; /* whether it is a marker: decodes to NaN everywhere */
} gw_frame_info;

/* Reads the header of a frame of exactly size bytes, after its checksum has been checked. codec:
   NULL, or gets the frame's codec, to be freed. Errors as gw_decode. */
GW_API gw_status gw_frame_inspect(const void* frame, uint64_t size, gw_frame_info* info,
                                  gw_codec** codec);

/* ---- compressor ---------------------------------------------------------------------------- */

/* A codec and its residual for one stream of tensors of n values: what one step did not send is
   added to the next one's input. */
typedef struct gw_compressor gw_compressor;

/* seed, stream: see gw_draw. GW_LIMIT_EXCEEDED: n > GW_MAX_NUMEL. The codec may be freed. */
GW_API gw_status gw_compressor_create(const gw_codec* codec, uint64_t n, uint64_t seed,
                                      uint64_t stream, gw_compressor** compressor);
GW_API void gw_compressor_free(gw_compressor* compressor);
/* Room that gw_compressor_encode needs. */
GW_API uint64_t gw_compressor_max_encoded_size(const gw_compressor* compressor);

/* As gw_encode, of x plus the residual; keeps what was not sent. n: as many values as it was made
   for, else GW_LENGTH_MISMATCH. After any status but GW_OK the residual is as it was. */
GW_API gw_status gw_compressor_encode(gw_compressor* compressor, const void* x, uint64_t n,
                                      gw_dtype dtype, uint64_t step, void* frame, uint64_t capacity,
                                      uint64_t* size, gw_execution* execution);

/* Values of the residual: n, or 0 without error feedback. */
GW_API uint64_t gw_compressor_residual_numel(const gw_compressor* compressor);
/* Copies the residual to values, or from them. n: gw_compressor_residual_numel, else
   GW_LENGTH_MISMATCH. GW_NON_FINITE (set): a value is NaN or Inf; nothing is changed. With
   residual=bf16 the values are rounded to that. */
GW_API gw_status gw_compressor_get_residual(const gw_compressor* compressor, float* values,
                                            uint64_t n);
GW_API gw_status gw_compressor_set_residual(gw_compressor* compressor, const float* values,
                                            uint64_t n);

/* ---- layout -------------------------------------------------------------------------------- */

/* A tensor of a bucket (the floats of all tensors, one after the other). */
typedef struct gw_tensor {
  const char* name;
  const uint64_t* dims; /* its shape */
  size_t dim_count;
} gw_tensor;

/* The way of a packet: a gradient to the rank that sums it (push), the result back (pull). */
typedef int32_t gw_direction;
#define GW_PUSH_AND_PULL 0
#define GW_PUSH 1
#define GW_PULL 2

/* Gives the tensors whose names match pattern (as a shell matches file names) a codec. */
typedef struct gw_rule {
  const char* pattern;
  const char* codec;
  gw_direction direction;
} gw_rule;

typedef struct gw_layout_options {
  const char* codec;      /* "3lc" */
  const char* pull_codec; /* NULL: as codec */
  const gw_rule* rules;   /* the first that matches wins, before everything below */
  size_t rule_count;
  const char* const* exclude; /* name patterns that go raw */
  size_t exclude_count;
  uint64_t min_numel; /* 256: smaller tensors go raw, as do those of fewer than 2 dimensions */
} gw_layout_options;

/* Sets the defaults; set what differs after it. */
GW_API void gw_layout_options_init(gw_layout_options* options);

/* How a bucket is cut into segments, which rank sums each, and which codec each takes. Every rank
   computes the same layout from the same arguments. */
typedef struct gw_layout gw_layout;

/* options: NULL for the defaults. GW_UNKNOWN_CODEC, GW_BAD_PARAMETER, GW_LIMIT_EXCEEDED.
   GW_INVALID_ARGUMENT also: a world of no ranks, a value that is no gw_direction. */
GW_API gw_status gw_layout_create(const gw_tensor* tensors, size_t tensor_count,
                                  uint32_t world_size, const gw_layout_options* options,
                                  gw_layout** layout);
GW_API void gw_layout_free(gw_layout* layout);
/* Values of the bucket. */
GW_API uint64_t gw_layout_numel(const gw_layout* layout);
/* The i-th pattern of the rules and excludes that matches no tensor (a typing error, if no other
   bucket has a match); NULL from the end of the list on. */
GW_API const char* gw_layout_unmatched(const gw_layout* layout, size_t index);

typedef struct gw_segment {
  const char* tensor;
  uint64_t tensor_offset; /* first value in the tensor */
  uint64_t bucket_offset; /* first value in the bucket */
  uint64_t n;
  uint32_t owner; /* rank that sums it */
  const char* push_codec;
  const char* pull_codec;
  const char* raw_reason; /* why it goes raw though the codec is another; "" otherwise */
} gw_segment;

GW_API size_t gw_layout_segment_count(const gw_layout* layout);
/* GW_INVALID_ARGUMENT: index is not below gw_layout_segment_count. */
GW_API gw_status gw_layout_segment(const gw_layout* layout, size_t index, gw_segment* segment);

/* ---- exchange ------------------------------------------------------------------------------ */

/* A collective algorithm that averages a bucket over all ranks, without input or output. An engine
   moves its messages:

     gw_exchange_start; then, until gw_exchange_done:
       send what gw_exchange_take_outgoing hands out; receive one message from each rank of
       gw_exchange_awaiting, in any order, and hand it to gw_exchange_receive.

   After a failed start or receive the exchange can't go on, and no rank may use this step's bucket:
   free it. */
typedef struct gw_exchange gw_exchange;

typedef struct gw_exchange_info {
  const char* name;
  const char* summary;
  const char* source; /* paper and section */
  int sums;           /* whether it can give the sum, not the average alone */
  int updates;        /* whether it takes a gw_shard_update */
  const gw_parameter_info* parameters;
  size_t parameter_count;
} gw_exchange_info;

GW_API size_t gw_exchange_count(void);
/* NULL from gw_exchange_count() on. */
GW_API const gw_exchange_info* gw_exchange_info_at(size_t index);

/* Called by the owner of segments when the bucket (n floats) holds their averages, to turn them in
   place into what every rank gets: a model delta, where optimizer states are sharded. Anything but
   GW_OK ends the exchange. */
typedef gw_status (*gw_shard_update)(float* bucket, uint64_t n, void* data);

typedef struct gw_exchange_options {
  const char* kind;       /* "sharded"; or "ring", "hierarchical:between=ring,ranks=4": one of
                             gw_exchange_info_at with its parameters */
  const char* target;     /* as gw_execution_create: NULL */
  int threads;            /* 1 */
  uint64_t seed;          /* of stochastic codecs: 0 */
  gw_shard_update update; /* NULL; for exchanges that take one */
  void* update_data;      /* passed to it */
} gw_exchange_options;

/* Sets the defaults; set what differs after it. */
GW_API void gw_exchange_options_init(gw_exchange_options* options);

/* The exchange of one rank, below the layout's world size; of a hierarchical exchange, which needs
   the parameter ranks here, the layout's world size is the number of machines. options: NULL for
   the defaults; the layout may be freed. GW_INVALID_ARGUMENT: an unknown kind or target.
   GW_LIMIT_EXCEEDED. */
GW_API gw_status gw_exchange_create(const gw_layout* layout, uint32_t rank,
                                    const gw_exchange_options* options, gw_exchange** exchange);
GW_API void gw_exchange_free(gw_exchange* exchange);

/* What must be equal on all ranks. Every rank sends it to the others before the first step ... */
GW_API const char* gw_exchange_description(const gw_exchange* exchange);
/* ... and checks what it gets. GW_PEER_MISMATCH: the message names both ranks and the first
   difference. */
GW_API gw_status gw_exchange_check_peer(const gw_exchange* exchange, uint32_t peer,
                                        const char* description);

/* Begins a step on bucket, n floats, which the exchange works in until it is done. step: the same
   on all ranks. GW_LENGTH_MISMATCH: n is not gw_layout_numel. GW_UNEXPECTED_MESSAGE: the step
   before has not ended. */
GW_API gw_status gw_exchange_start(gw_exchange* exchange, float* bucket, uint64_t n, uint64_t step);

typedef struct gw_message {
  uint32_t peer;     /* rank that gets it */
  const void* bytes; /* valid until the next start */
  uint64_t size;
} gw_message;

/* Hands out messages that are ready, each once: at most capacity of them; *count says how many, 0
   when there is none. */
GW_API gw_status gw_exchange_take_outgoing(gw_exchange* exchange, gw_message* messages,
                                           size_t capacity, size_t* count);
/* Ranks from which a message is due before the algorithm can go on, ascending. *count: how many.
   Room for one less than the world size is always enough; with less than *count:
   GW_BUFFER_TOO_SMALL, and *count is set. */
GW_API gw_status gw_exchange_awaiting(const gw_exchange* exchange, uint32_t* peers, size_t capacity,
                                      size_t* count);
/* A message came; it is used or copied before this returns. Any bytes are safe.
   GW_UNEXPECTED_MESSAGE: of another step, another rank, or a second time. GW_PEER_MISMATCH. Errors
   of damaged messages as gw_decode. What an update returned. */
GW_API gw_status gw_exchange_receive(gw_exchange* exchange, uint32_t peer, const void* message,
                                     uint64_t size);
/* Whether the bucket holds the result, the same bits on every rank. */
GW_API int gw_exchange_done(const gw_exchange* exchange);

/* Where an input was first seen to hold NaN or Inf. */
typedef struct gw_non_finite {
  uint32_t rank;
  const char* tensor; /* valid until the next start */
  uint64_t element;   /* index in the tensor */
} gw_non_finite;

/* 1: the step's result is NaN on every rank, and *where (which may be NULL) says why. 0: it is
   not, and *where stays as it was. */
GW_API int gw_exchange_non_finite(const gw_exchange* exchange, gw_non_finite* where);

/* For a step whose result nobody applied: what it sent is owed again. Once a step, when done; else
   GW_UNEXPECTED_MESSAGE. */
GW_API gw_status gw_exchange_retract(gw_exchange* exchange);
/* For inputs whose unit changed by factor, between steps. GW_INVALID_ARGUMENT: factor is not
   finite. */
GW_API gw_status gw_exchange_scale_residuals(gw_exchange* exchange, float factor);

/* A piece of residual with its place, for checkpoints. */
typedef struct gw_residual_piece {
  gw_direction direction; /* GW_PUSH or GW_PULL */
  const char* tensor;
  uint64_t offset; /* first value in the tensor */
  uint64_t n;
  const float* values;
} gw_residual_piece;

/* A copy of all residuals of an exchange. */
typedef struct gw_residuals gw_residuals;

GW_API gw_status gw_exchange_export_residuals(const gw_exchange* exchange,
                                              gw_residuals** residuals);
GW_API void gw_residuals_free(gw_residuals* residuals);
GW_API size_t gw_residuals_count(const gw_residuals* residuals);
/* GW_INVALID_ARGUMENT: index is not below gw_residuals_count. */
GW_API gw_status gw_residuals_at(const gw_residuals* residuals, size_t index,
                                 gw_residual_piece* piece);
/* Adds a piece to the residuals, also one of another layout of the same tensors.
   GW_INVALID_ARGUMENT: no such tensor or range, or a direction that is neither. GW_NON_FINITE: a
   value is NaN or Inf. */
GW_API gw_status gw_exchange_import_residual(gw_exchange* exchange, const gw_residual_piece* piece);

/* What exchange_counters.def says. */
typedef struct gw_exchange_stats {
#define GW_EXCHANGE_COUNTER(type, name, python_name) type name;
#include "gradwire/exchange_counters.def"
#undef GW_EXCHANGE_COUNTER
} gw_exchange_stats;

GW_API gw_status gw_exchange_get_stats(const gw_exchange* exchange, gw_exchange_stats* stats);

#ifdef __cplusplus
}
#endif

#endif /* GRADWIRE_GRADWIRE_H_ */
