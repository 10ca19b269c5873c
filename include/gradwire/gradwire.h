/*
 * gradwire in C (C99; may be included from C++ of any standard).
 *
 *   codec       gw_codec_parse, gw_codec_count, gw_codec_info_at
 *   frame       gw_encode, gw_decode, gw_frame_inspect
 *   compressor  gw_compressor_create: a codec with the residual of one tensor
 *   exchange    gw_layout_create, gw_exchange_create: collective algorithms without input or output
 *
 * Errors. Functions that can fail return a gw_status; GW_OK is 0. A function that fails leaves its
 * output arguments alone, unless its comment says otherwise. gw_last_error_message() says more.
 * Every function that returns a status can return GW_INVALID_ARGUMENT, if a pointer is NULL that
 * must not be, and GW_OUT_OF_MEMORY. Its comment names the other statuses.
 *
 * Handles (gw_codec, ...) are made by functions such as gw_codec_parse and gw_layout_create, and
 * freed by functions whose names end in free, which accept NULL. Functions that only read a handle
 * and can't fail, and those that fill in default options, must not be given NULL. All threads may
 * use a gw_codec or a gw_layout at once; every other handle serves one call at a time. Strings end
 * with NUL. A returned string belongs to the library. It lives as long as the handle that it comes
 * from, or for ever if it comes from none.
 *
 * A number called size counts bytes, others count values. A pointer to no values may be NULL. The
 * caller owns all memory that it passes.
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

/* The version of this header. */
#define GW_VERSION_MAJOR 0
#define GW_VERSION_MINOR 1
#define GW_VERSION_PATCH 0

/* The version of the loaded library: "0.1.0". */
GW_API const char* gw_version(void);

/* ---- errors -------------------------------------------------------------------------------- */

/* The numbers never change. spec/format.md lists those below 200. */
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

/* One sentence about the last call of this thread that failed: it names the value that was wrong
   and says what would be right. It is "" before the first failure. A call that succeeds leaves it
   alone, as with errno. The pointer is valid until the thread's next call that fails. */
GW_API const char* gw_last_error_message(void);
/* For libraries on top of this one: makes a copy of message the result of gw_last_error_message in
   this thread, unless status is GW_OK. Returns status. */
GW_API gw_status gw_set_last_error(gw_status status, const char* message);

/* ---- execution ----------------------------------------------------------------------------- */

/* The SIMD target and the number of threads that do the work. They never change a result. */
typedef struct gw_execution gw_execution;

/* target: a name that gw_simd_target gives, or NULL or "auto" for the best. threads: 1 to 256,
   including the caller's own. GW_INVALID_ARGUMENT: the message lists what is valid. */
GW_API gw_status gw_execution_create(const char* target, int threads, gw_execution** execution);
GW_API void gw_execution_free(gw_execution* execution);
GW_API const char* gw_execution_target(const gw_execution* execution);
GW_API int gw_execution_threads(const gw_execution* execution);

/* The names of the SIMD targets of this CPU, best first, "scalar" last; NULL after the last. */
GW_API const char* gw_simd_target(size_t index);

/* Where a function takes an execution, NULL means the best target and the caller's thread alone. */

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
  int error_feedback;     /* whether the codec keeps a residual by default */
  int lossless;           /* whether no error is left, so that ef and residual are no keys */
  int draws;              /* whether encoding draws random numbers, so that gw_draw matters */
  int shares_scales;      /* whether ranks can share scales and add symbols undecoded */
  int carries_non_finite; /* whether NaN and Inf are sent as they are if no residual is kept */
  const gw_parameter_info* parameters;
  size_t parameter_count;
} gw_codec_info;

GW_API size_t gw_codec_count(void);
/* NULL if index is not below gw_codec_count(). */
GW_API const gw_codec_info* gw_codec_info_at(size_t index);

/* A codec with its parameters. */
typedef struct gw_codec gw_codec;

/* text: a codec string as everywhere in gradwire, such as "3lc" or "3lc:s=1.00,coder=rice".
   GW_UNKNOWN_CODEC and GW_BAD_PARAMETER: the message lists what is valid. */
GW_API gw_status gw_codec_parse(const char* text, gw_codec** codec);
GW_API void gw_codec_free(gw_codec* codec);
/* The canonical text: parsing it gives an equal codec. */
GW_API const char* gw_codec_text(const gw_codec* codec);
GW_API const gw_codec_info* gw_codec_get_info(const gw_codec* codec);

/* *size: the most bytes that a frame of n values takes. GW_LIMIT_EXCEEDED: n > GW_MAX_NUMEL. */
GW_API gw_status gw_max_encoded_size(const gw_codec* codec, uint64_t n, uint64_t* size);

/* ---- frames -------------------------------------------------------------------------------- */

/* The most values of a frame. */
#define GW_MAX_NUMEL (UINT64_C(1) << 40)

/* Types of input values. All decode to float. */
typedef int32_t gw_dtype;
#define GW_F32 0  /* float */
#define GW_BF16 1 /* uint16_t: the upper half of a float */
#define GW_F16 2  /* uint16_t: IEEE binary16 */

/* Determines the random numbers of codecs that draw: an equal gw_draw and equal values give equal
   bytes. Other codecs ignore it. */
typedef struct gw_draw {
  uint64_t seed;
  uint64_t stream;
  uint64_t step;
} gw_draw;

/* Encodes the n values of x, of type dtype and aligned for it, into one frame, without a residual.
   draw: NULL for zeros. frame: room of capacity bytes, at least gw_max_encoded_size of n.
   *size: the bytes of the frame.

   GW_NON_FINITE: x holds NaN or Inf, which this codec can't carry; the message names the element.
   The frame is then a marker that decodes to NaN everywhere, and *size is set. The caller may send
   it. GW_BUFFER_TOO_SMALL, GW_UNSUPPORTED_DTYPE, GW_LIMIT_EXCEEDED.

   No other thread may write to x meanwhile. If one does, nothing outside the frame is written, but
   decoders may refuse the frame. */
GW_API gw_status gw_encode(const gw_codec* codec, const void* x, uint64_t n, gw_dtype dtype,
                           const gw_draw* draw, void* frame, uint64_t capacity, uint64_t* size,
                           gw_execution* execution);

typedef int32_t gw_decode_mode;
#define GW_STORE 0 /* out[i] = value */
#define GW_ADD 1   /* out[i] += value */

/* Decodes a frame of exactly size bytes and stores the values in out, n floats, or adds them. Any
   bytes are safe.

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
  int non_finite; /* whether it is a marker, which decodes to NaN everywhere */
} gw_frame_info;

/* Checks the checksum of a frame of exactly size bytes and reads its header. codec: NULL, or
   receives the frame's codec, which the caller frees. Errors as gw_decode. */
GW_API gw_status gw_frame_inspect(const void* frame, uint64_t size, gw_frame_info* info,
                                  gw_codec** codec);

/* ---- compressor ---------------------------------------------------------------------------- */

/* A codec and the residual of one tensor of n values: the part that a step does not send is added
   to the input of the next step. */
typedef struct gw_compressor gw_compressor;

/* seed, stream: see gw_draw. The codec may be freed afterwards.
   GW_LIMIT_EXCEEDED: n > GW_MAX_NUMEL. */
GW_API gw_status gw_compressor_create(const gw_codec* codec, uint64_t n, uint64_t seed,
                                      uint64_t stream, gw_compressor** compressor);
GW_API void gw_compressor_free(gw_compressor* compressor);
/* The capacity that gw_compressor_encode needs. */
GW_API uint64_t gw_compressor_max_encoded_size(const gw_compressor* compressor);

/* As gw_encode, but encodes x plus the residual and keeps the part that was not sent as the new
   residual. GW_LENGTH_MISMATCH: n differs from that of gw_compressor_create. After any status but
   GW_OK the residual is as it was; with a codec that has a scale for each group of values, up to
   the rounding of x + residual. */
GW_API gw_status gw_compressor_encode(gw_compressor* compressor, const void* x, uint64_t n,
                                      gw_dtype dtype, uint64_t step, void* frame, uint64_t capacity,
                                      uint64_t* size, gw_execution* execution);

/* The number of values of the residual: n, or 0 without error feedback. */
GW_API uint64_t gw_compressor_residual_numel(const gw_compressor* compressor);
/* Copy the residual to values, or values to the residual. With residual=bf16, setting rounds them.
   GW_LENGTH_MISMATCH: n is not gw_compressor_residual_numel. GW_NON_FINITE (set): a value is NaN or
   Inf; the residual is as it was. */
GW_API gw_status gw_compressor_get_residual(const gw_compressor* compressor, float* values,
                                            uint64_t n);
GW_API gw_status gw_compressor_set_residual(gw_compressor* compressor, const float* values,
                                            uint64_t n);

/* ---- layout -------------------------------------------------------------------------------- */

/* A tensor of a bucket (the floats of all tensors, one after the other). */
typedef struct gw_tensor {
  const char* name;     /* that of no other tensor of the bucket: residuals belong to names */
  const uint64_t* dims; /* its shape */
  size_t dim_count;
} gw_tensor;

/* The direction of a packet: a push brings gradients to the rank that sums them, a pull brings the
   result back. */
typedef int32_t gw_direction;
#define GW_PUSH_AND_PULL 0
#define GW_PUSH 1
#define GW_PULL 2

/* Gives a codec to the tensors whose names match pattern, as a shell matches file names. */
typedef struct gw_rule {
  const char* pattern;
  const char* codec;
  gw_direction direction;
} gw_rule;

typedef struct gw_layout_options {
  const char* codec;      /* "3lc" */
  const char* pull_codec; /* NULL: as codec */
  const gw_rule* rules;   /* the first match wins, before the fields below */
  size_t rule_count;
  const char* const* exclude; /* name patterns that go raw */
  size_t exclude_count;
  uint64_t min_numel; /* 256: smaller tensors go raw, and so do those of fewer than 2 dimensions */
} gw_layout_options;

/* Sets the defaults; set other values afterwards. */
GW_API void gw_layout_options_init(gw_layout_options* options);

/* How a bucket is cut into segments, which rank sums each segment, and which codecs encode it.
   Every rank computes the same layout from the same arguments. */
typedef struct gw_layout gw_layout;

/* options: NULL for the defaults. GW_UNKNOWN_CODEC, GW_BAD_PARAMETER, GW_LIMIT_EXCEEDED.
   GW_INVALID_ARGUMENT: also if world_size is 0, a direction is no gw_direction, or two tensors have
   one name. */
GW_API gw_status gw_layout_create(const gw_tensor* tensors, size_t tensor_count,
                                  uint32_t world_size, const gw_layout_options* options,
                                  gw_layout** layout);
GW_API void gw_layout_free(gw_layout* layout);
/* The number of values of the bucket. */
GW_API uint64_t gw_layout_numel(const gw_layout* layout);
/* The patterns of rules and exclude that match no tensor of this bucket, by index; NULL after the
   last. If such a pattern matches in no bucket, it may be mistyped. */
GW_API const char* gw_layout_unmatched(const gw_layout* layout, size_t index);

typedef struct gw_segment {
  const char* tensor;
  uint64_t tensor_offset; /* first value in the tensor */
  uint64_t bucket_offset; /* first value in the bucket */
  uint64_t n;
  uint32_t owner; /* rank that sums it */
  const char* push_codec;
  const char* pull_codec;
  const char* raw_reason; /* why it goes raw instead of with the chosen codec; "" otherwise */
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
  const char*
      default_codec; /* the codec to take where the user names none and residuals are kept */
  int sums;          /* whether it can give the sum instead of the average */
  int updates;       /* whether it takes a gw_shard_update */
  const gw_parameter_info* parameters;
  size_t parameter_count;
} gw_exchange_info;

GW_API size_t gw_exchange_count(void);
/* NULL if index is not below gw_exchange_count(). */
GW_API const gw_exchange_info* gw_exchange_info_at(size_t index);

/* The exchange calls this function on the owner of segments when the bucket (n floats) holds their
   averages. It replaces them in place by the values that every rank gets, for example a model delta
   if optimizer states are sharded. Any result but GW_OK ends the exchange. */
typedef gw_status (*gw_shard_update)(float* bucket, uint64_t n, void* data);

typedef struct gw_exchange_options {
  const char* kind;       /* "sharded"; or "ring", "hierarchical:between=ring,ranks=4": one of
                             gw_exchange_info_at with its parameters */
  const char* target;     /* as gw_execution_create: NULL */
  int threads;            /* 1 */
  uint64_t seed;          /* of stochastic codecs: 0 */
  gw_shard_update update; /* NULL; only for exchanges that take an update */
  void* update_data;      /* passed to it */
} gw_exchange_options;

/* Sets the defaults; set other values afterwards. */
GW_API void gw_exchange_options_init(gw_exchange_options* options);

/* Makes the exchange of one rank, which is below the layout's world size. For a hierarchical
   exchange, the layout's world size is the number of machines, and kind must give the parameter
   ranks. options: NULL for the defaults. The layout may be freed afterwards. GW_INVALID_ARGUMENT:
   also an unknown kind or target. GW_LIMIT_EXCEEDED. */
GW_API gw_status gw_exchange_create(const gw_layout* layout, uint32_t rank,
                                    const gw_exchange_options* options, gw_exchange** exchange);
GW_API void gw_exchange_free(gw_exchange* exchange);

/* A text that must be equal on all ranks. Every rank sends it to the others before the first
   step. */
GW_API const char* gw_exchange_description(const gw_exchange* exchange);
/* Compares the description that came from peer with this rank's own. GW_PEER_MISMATCH: the message
   names both ranks and the first difference. */
GW_API gw_status gw_exchange_check_peer(const gw_exchange* exchange, uint32_t peer,
                                        const char* description);

/* Begins a step on bucket, n floats, in which the exchange works until it is done. step: the same
   on all ranks. GW_LENGTH_MISMATCH: n is not gw_layout_numel. GW_UNEXPECTED_MESSAGE: the previous
   step has not ended. */
GW_API gw_status gw_exchange_start(gw_exchange* exchange, float* bucket, uint64_t n, uint64_t step);

typedef struct gw_message {
  uint32_t peer;     /* the rank to which it goes */
  const void* bytes; /* valid until the next start */
  uint64_t size;
} gw_message;

/* Hands out messages that are ready to be sent, each once, at most capacity of them. *count: their
   number; 0 if none is ready. */
GW_API gw_status gw_exchange_take_outgoing(gw_exchange* exchange, gw_message* messages,
                                           size_t capacity, size_t* count);
/* The ranks from which a message must come before the algorithm can go on, ascending. *count: their
   number, at most the world size minus 1. GW_BUFFER_TOO_SMALL: capacity is below *count, which is
   set. */
GW_API gw_status gw_exchange_awaiting(const gw_exchange* exchange, uint32_t* peers, size_t capacity,
                                      size_t* count);
/* No message for this rank has more bytes, in any step: who learns a message's size before its
   bytes refuses a larger one. */
GW_API uint64_t gw_exchange_max_message_size(const gw_exchange* exchange);
/* Takes a message that came from peer, and uses or copies it before it returns. Any bytes are safe.
   GW_UNEXPECTED_MESSAGE: the message is of another step or rank, or came before. GW_PEER_MISMATCH.
   Damaged messages give the statuses of gw_decode. If the update fails, its status is returned. */
GW_API gw_status gw_exchange_receive(gw_exchange* exchange, uint32_t peer, const void* message,
                                     uint64_t size);
/* Whether the bucket holds the result, the same bits on every rank. */
GW_API int gw_exchange_done(const gw_exchange* exchange);

/* The place of the NaN or Inf that was found first. */
typedef struct gw_non_finite {
  uint32_t rank;      /* whose value it was; of a sum that overflowed, that which added */
  const char* tensor; /* valid until the next start */
  uint64_t element;   /* index in the tensor */
} gw_non_finite;

/* 1: the step's result is NaN on every rank, and *where (if where is not NULL) names the value that
   caused this. 0: it is not, and *where stays as it was. */
GW_API int gw_exchange_non_finite(const gw_exchange* exchange, gw_non_finite* where);

/* Call it after a step whose result no rank applied: the values that the step sent go back into the
   residuals. At most once after each step, when it is done; else GW_UNEXPECTED_MESSAGE. */
GW_API gw_status gw_exchange_retract(gw_exchange* exchange);
/* Multiplies all residuals by factor, for gradients whose scale changed by that factor. Call it
   between steps. GW_INVALID_ARGUMENT: factor is not finite. */
GW_API gw_status gw_exchange_scale_residuals(gw_exchange* exchange, float factor);

/* A piece of a residual with its place, for checkpoints. */
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
/* Adds a piece to the residuals. It may come from another layout of the same tensors.
   GW_INVALID_ARGUMENT: there is no such tensor or range, or the direction is neither GW_PUSH nor
   GW_PULL. GW_NON_FINITE: a value is NaN or Inf. */
GW_API gw_status gw_exchange_import_residual(gw_exchange* exchange, const gw_residual_piece* piece);

/* Counters since the exchange was made; exchange_counters.def describes each. */
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
