// Eight values to one burst in every cycle, in two pipeline stages: the lanes, then the tree of
// concatenations (the paper's burst compressor).
//
// An item is a burst of 0 to 8 values, or raw bytes, which pass through unchanged. Raw bytes take
// the way of a burst whose values are all sent whole: the first two bytes are its tags.
module gw_burst_compressor (
    input  logic         clk,
    input  logic         rst,
    input  logic [  2:0] settings,  // param_a of the codec
    input  logic [271:0] in_bytes,  // values from byte 0 on, or raw bytes
    input  logic         in_raw,
    input  logic [  5:0] in_raw_size,
    input  logic [  3:0] in_present,  // values of the burst; without values it has no bytes
    input  logic         in_last,
    input  logic [  3:0] in_user,
    input  logic         in_valid,
    output logic         in_ready,
    output logic [271:0] out_bytes,
    output logic [  5:0] out_size,
    output logic         out_last,
    output logic [  3:0] out_user,
    output logic         out_valid,
    input  logic         out_ready
);
    // First stage: tags and codes of the lanes. Absent values have the tag 0.
    wire [15:0] tags;
    wire [255:0] codes;
    wire [15:0] lane_tags;
    for (genvar i = 0; i < 8; i++) begin : lane
        wire [ 1:0] tag;
        wire [31:0] code;
        gw_lane_compressor compressor (
            .settings,
            .value(in_bytes[32*i+:32]),
            .tag,
            .code
        );
        wire absent = in_present <= i;
        assign lane_tags[2*i+:2] = in_raw ? 2'd3 : absent ? 2'd0 : tag;
        assign codes[32*i+:32]   = in_raw ? in_bytes[16+32*i+:32] : absent ? 32'd0 : code;
    end
    assign tags = in_raw ? in_bytes[15:0] : lane_tags;

    wire [ 15:0] s_tags;
    wire [ 15:0] s_lane_tags;
    wire [255:0] s_codes;
    wire s_raw, s_last, s_empty, s_valid, s_ready;
    wire [5:0] s_raw_size;
    wire [3:0] s_user;
    gw_stage #(
        .WIDTH(301)
    ) lanes_done (
        .clk,
        .rst,
        .in({tags, lane_tags, codes, in_raw, in_raw_size, in_present == 4'd0, in_last, in_user}),
        .in_valid,
        .in_ready,
        .out({s_tags, s_lane_tags, s_codes, s_raw, s_raw_size, s_empty, s_last, s_user}),
        .out_valid(s_valid),
        .out_ready(s_ready)
    );

    // Second stage: pairs of codes, then four, then eight.
    wire [255:0] pairs, quads, all;
    wire [4*4-1:0] pair_sizes;
    wire [2*5-1:0] quad_sizes;
    wire [5:0] codes_size;
    for (genvar i = 0; i < 4; i++) begin : pair
        wire [1:0] low_tag = s_lane_tags[4*i+:2];
        wire [1:0] high_tag = s_lane_tags[4*i+2+:2];
        gw_concat #(
            .BYTES(4)
        ) concat (
            .low      (s_codes[64*i+:32]),
            .low_size (low_tag == 2'd3 ? 3'd4 : {1'b0, low_tag}),
            .high     (s_codes[64*i+32+:32]),
            .high_size(high_tag == 2'd3 ? 3'd4 : {1'b0, high_tag}),
            .bytes    (pairs[64*i+:64]),
            .size     (pair_sizes[4*i+:4])
        );
    end
    for (genvar i = 0; i < 2; i++) begin : quad
        gw_concat #(
            .BYTES(8)
        ) concat (
            .low      (pairs[128*i+:64]),
            .low_size (pair_sizes[8*i+:4]),
            .high     (pairs[128*i+64+:64]),
            .high_size(pair_sizes[8*i+4+:4]),
            .bytes    (quads[128*i+:128]),
            .size     (quad_sizes[5*i+:5])
        );
    end
    gw_concat #(
        .BYTES(16)
    ) concat (
        .low      (quads[127:0]),
        .low_size (quad_sizes[4:0]),
        .high     (quads[255:128]),
        .high_size(quad_sizes[9:5]),
        .bytes    (all),
        .size     (codes_size)
    );
    wire [5:0] size = s_raw ? s_raw_size : s_empty ? 6'd0 : 6'd2 + codes_size;

    gw_stage #(
        .WIDTH(283)
    ) burst_done (
        .clk,
        .rst,
        .in       ({all, s_tags, size, s_last, s_user}),
        .in_valid (s_valid),
        .in_ready (s_ready),
        .out      ({out_bytes, out_size, out_last, out_user}),
        .out_valid,
        .out_ready
    );
endmodule
